// Which keys a panel of queries sees, stretch by stretch: none of them, some of the pairs, or all. Empty stretches cost nothing,
// and full ones need no mask.
#pragma once
#include "isa.h"
#include "mask.h"
#include "threads.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// keys for which a mask is decided at once, whole blocks of them; gaps that are shorter are not worth a stretch of their own
constexpr int64_t kMaskStep = 32 / kRows * kRows;

struct Stretch { int64_t end; Verdict verdict; };  // keys up to `end`, from where the one before it ends

// All keys, cut where the verdict changes.
class Stretches {
 public:
  void begin(int64_t keys) { keys_ = keys, all_.clear(), cursor_ = 0; }
  void add(int64_t end, Verdict verdict) {
    end = std::min(end, keys_);
    const int64_t start = all_.empty() ? 0 : all_.back().end;
    if (end <= start) return;
    if (!all_.empty() && all_.back().verdict == verdict) all_.back().end = end;
    else all_.push_back({end, verdict});
  }

  // What holds of keys [j0, j1), which lie where `each` or `on_to` was asked for last, or behind it.
  Verdict over(int64_t j0, int64_t j1) const {
    size_t n = cursor_;
    while (all_[n].end <= j0) ++n;
    const Verdict first = all_[n].verdict;
    for (; all_[n].end < j1; ++n)
      if (all_[n + 1].verdict != first) return kSome;
    return first;
  }

  // use(j0, j1) for the parts of [low, high) of which something is seen; to be asked in ascending order.
  template <class Use> void each(int64_t low, int64_t high, Use use) {
    on_to(low);
    int64_t from = low, start = -1, stop = 0;
    for (size_t n = cursor_; n < all_.size() && from < high; ++n) {
      const int64_t end = std::min(all_[n].end, high);
      if (all_[n].verdict != kNone) {
        if (start >= 0 && from - stop >= kMaskStep) use(start, stop), start = -1;
        if (start < 0) start = from;
        stop = end;
      }
      from = end;
    }
    if (start >= 0) use(start, stop);
  }
  void again() { cursor_ = 0; }
  // Where one is, back to there, and on to what holds from `low` on.
  size_t mark() const { return cursor_; }
  void back(size_t mark) { cursor_ = mark; }
  void on_to(int64_t low) {
    while (cursor_ < all_.size() && all_[cursor_].end <= low) ++cursor_;
  }

  // The first key from `low` on of which something is seen; all keys where there is none.
  int64_t next(int64_t low) const {
    int64_t from = low;
    for (size_t n = cursor_; n < all_.size(); ++n) {
      if (all_[n].end > from && all_[n].verdict != kNone) return from;
      from = std::max(from, all_[n].end);
    }
    return keys_;
  }

  // use(tile) for the tiles of so many keys in [low, high) of which something is seen.
  template <class Use> void each_tile(int64_t low, int64_t high, int64_t tile, Use use) const {
    int64_t from = low, next = 0;
    for (size_t n = cursor_; n < all_.size() && from < high; ++n) {
      const int64_t end = std::min(all_[n].end, high);
      if (all_[n].verdict != kNone)
        for (next = std::max(next, from / tile); next * tile < end; ++next) use(next);
      from = std::max(from, end);
    }
  }

  // How far one can go from `low` on until `most` keys are seen, what lies between them counted where it is short.
  int64_t reach(int64_t low, int64_t most) const {
    int64_t from = low;
    for (size_t n = cursor_; n < all_.size() && from < keys_; ++n) {
      if (all_[n].end <= from) continue;
      const int64_t count = all_[n].end - from;
      const int64_t cost = all_[n].verdict != kNone ? count : std::min(count, kMaskStep);
      if (cost > most) return from + most;
      most -= cost, from = all_[n].end;
    }
    return keys_;
  }

  int64_t size() const { return int64_t(all_.size()); }

  // How many keys are seen.
  int64_t count() const {
    int64_t found = 0, from = 0;
    for (const Stretch& one : all_) {
      if (one.verdict != kNone) found += one.end - from;
      from = one.end;
    }
    return found;
  }

  // How many keys are seen by either of two, and by one of them only, added to both numbers.
  static void compare(const Stretches& left, const Stretches& right, int64_t& either, int64_t& apart) {
    int64_t from = 0;
    for (size_t x = 0, y = 0; x < left.all_.size() && y < right.all_.size();) {
      const Stretch l = left.all_[x], r = right.all_[y];
      const int64_t end = std::min(l.end, r.end);
      if (l.verdict != kNone || r.verdict != kNone) either += end - from;
      if ((l.verdict != kNone) != (r.verdict != kNone)) apart += end - from;
      x += l.end <= r.end, y += r.end <= l.end, from = end;
    }
  }

  void turn() {
    for (Stretch& one : all_) one.verdict = one.verdict == kAll ? kNone : one.verdict == kNone ? kAll : kSome;
  }
  // What both allow, or at least one.
  void join(const Stretches& left, const Stretches& right, bool both) {
    for (size_t x = 0, y = 0; x < left.all_.size() && y < right.all_.size();) {
      const Stretch l = left.all_[x], r = right.all_[y];
      add(std::min(l.end, r.end), both ? std::min(l.verdict, r.verdict) : std::max(l.verdict, r.verdict));
      x += l.end <= r.end, y += r.end <= l.end;
    }
  }

 private:
  std::vector<Stretch> all_;
  int64_t keys_ = 0;
  size_t cursor_ = 0;
};

// What is found once for all panels of a call: where keys of an id lie, which keys are marked, what tiles of arrays hold.
class Sights {
 public:
  struct Part { int64_t id, start, stop; bool pure; };  // keys [start, stop) of an id; pure: no others between them
  struct Found {
    std::vector<std::vector<Part>> parts;  // by id, then by place; for each batch row that has its own
    std::vector<uint8_t> states;           // [plane][strip][step]
    int64_t by_head = 0, heads = 1, strips = 0, steps = 0;
    std::vector<int64_t> plane;            // for each batch row
  };

  // `strip` queries are looked at together where the mask is an array.
  Sights(const Call& call, int64_t strip, int threads) : call_(call), strip_(strip), found_(call.mask.size()) {
    for (size_t n = 0; n < found_.size(); ++n) {
      const MaskNode& node = call.mask[n];
      if (node.kind == kDocuments) find_documents(node, found_[n]);
      if (node.kind == kFlags) find_marked(node, found_[n]);
      if (node.kind == kArray) find_states(node, found_[n], threads);
    }
  }

  // Where a leaf may change from one query to the next, as far as it is cheap to know, in the first batch row and head.
  std::vector<int64_t> borders(size_t n) const {
    const MaskNode& node = call_.mask[n];
    std::vector<int64_t> found;
    const auto between = [&](const auto* row) {
      for (int64_t i = 1; i < call_.queries; ++i)
        if (row[i] != row[i - 1]) found.push_back(i);
    };
    if (node.kind == kBlocks)
      for (int64_t i = node.constant; i < call_.queries; i += node.constant) found.push_back(i);
    if (node.kind == kDocuments) between(node.fields[0].row(0));
    if (node.kind == kFlags) between(node.fields[0].flag_row(0));
    if (node.kind == kArray) found = changes(found_[n]);
    return found;
  }

  // True where a mask reads an array of the caller's.
  bool reads_arrays() const {
    return std::any_of(call_.mask.begin(), call_.mask.end(), [](const MaskNode& node) { return node.kind == kArray; });
  }

  // True where all batch rows and heads see alike, whatever an array may hold.
  bool alike() const {
    return std::all_of(call_.mask.begin(), call_.mask.end(), [&](const MaskNode& node) {
      const auto shared = [](const Field& field) { return field.each == 0; };
      const bool one_table = node.kind != kBlocks || block_table(call_, node, 0, 1) == block_table(call_, node, 0, 0);
      return node.kind != kArray && one_table && std::all_of(node.fields.begin(), node.fields.end(), shared);
    });
  }

  // What queries [i0, i1) see of all keys.
  void see(int64_t b, int64_t h, int64_t i0, int64_t i1, Stretches& out) const {
    out.begin(call_.keys);
    if (call_.mask.empty() || !call_.keys) return out.add(call_.keys, kAll);
    see(int(found_.size()) - 1, b, h, i0, i1, out);
  }

 private:
  // The same of an array: between strips of queries that see much that the one before does not.
  std::vector<int64_t> changes(const Found& found) const {
    std::vector<int64_t> all;
    const int64_t steps = found.steps, last = found.states.empty() ? 0 : found.strips;
    for (int64_t strip = 1; strip < last; ++strip) {  // of the first batch row and head
      const uint8_t *here = found.states.data() + strip * steps, *other = here - steps;
      int32_t seen = 0, differs = 0;
      for (int64_t s = 0; s < steps; ++s) seen += (here[s] | other[s]) != 0, differs += (here[s] != 0) != (other[s] != 0);
      if (3 * int64_t(differs) > seen) all.push_back(strip * strip_);
    }
    return all;
  }

  static void put(std::vector<Part>& parts, int64_t id, int64_t start, int64_t stop) {
    if (!parts.empty() && parts.back().id == id && start - parts.back().stop < kMaskStep) {
      parts.back().pure = parts.back().pure && start == parts.back().stop;
      parts.back().stop = stop;
    } else {
      parts.push_back({id, start, stop, true});
    }
  }

  // The keys of each id that a query has, as few parts as possible: what is short between two of them is taken with them.
  void find_documents(const MaskNode& node, Found& found) const {
    const Field &queries = node.fields[0], &keys = node.fields[1];
    for (int64_t b = 0; b < (keys.each || queries.each ? call_.batch : std::min<int64_t>(call_.batch, 1)); ++b) {
      const int64_t *q = queries.row(b), *k = keys.row(b);
      std::vector<int64_t> ids(q, q + call_.queries);
      std::sort(ids.begin(), ids.end());
      ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
      std::vector<Part> all;
      for (int64_t j = 0, end; j < call_.keys; j = end) {
        for (end = j + 1; end < call_.keys && k[end] == k[j];) ++end;
        if (std::binary_search(ids.begin(), ids.end(), k[j])) all.push_back({k[j], j, end, true});
      }
      if (!keys.ascends(b))
        std::stable_sort(all.begin(), all.end(), [](const Part& x, const Part& y) { return x.id < y.id; });
      found.parts.emplace_back();
      for (const Part& part : all) put(found.parts.back(), part.id, part.start, part.stop);
    }
  }

  void find_marked(const MaskNode& node, Found& found) const {
    const Field& keys = node.fields[1];
    for (int64_t b = 0; b < (keys.each ? call_.batch : std::min<int64_t>(call_.batch, 1)); ++b) {
      const uint8_t* k = keys.flag_row(b);
      found.parts.emplace_back();
      for (int64_t j = 0, end; j < call_.keys; j = end) {
        for (end = j + 1; end < call_.keys && k[end] == k[j];) ++end;
        if (k[j]) put(found.parts.back(), 0, j, end);
      }
    }
  }

  // One more row of truth values, whatever is not 0 is true: of each key all so far or'ed together, and 0xff where every
  // one is true. By vectors, so that it does not depend on what a compiler finds.
  static void take_row(const char* row, int64_t apart, int64_t count, uint8_t* some, uint8_t* every) {
    using Bytes = uint8_t __attribute__((vector_size(32)));
    int64_t j = 0;
    for (; apart == 1 && j + int64_t(sizeof(Bytes)) <= count; j += sizeof(Bytes)) {
      Bytes here, any, all;
      std::memcpy(&here, row + j, sizeof here), std::memcpy(&any, some + j, sizeof any), std::memcpy(&all, every + j, sizeof all);
      any |= here, all &= Bytes(here != 0);
      std::memcpy(some + j, &any, sizeof any), std::memcpy(every + j, &all, sizeof all);
    }
    for (; j < count; ++j) some[j] |= uint8_t(row[j * apart]), every[j] &= row[j * apart] ? 0xff : 0;
  }

  // Arrays are read once, however many heads share them.
  void find_states(const MaskNode& node, Found& found, int threads) const {
    const View& array = node.array;
    const bool rows = array.row != 0, columns = array.col != 0;
    found.heads = array.head ? call_.heads : 1;
    found.strips = rows ? (call_.queries + strip_ - 1) / strip_ : 1;
    found.steps = columns ? (call_.keys + kMaskStep - 1) / kMaskStep : 1;
    std::vector<int64_t> first;  // batch row of each plane
    for (int64_t b = 0; b < call_.batch; ++b) {
      const bool known = b && array.batch[b] == array.batch[b - 1];
      if (!known) first.push_back(b);
      found.plane.push_back(int64_t(first.size()) - 1);
    }
    found.by_head = array.head ? 1 : 0;
    if (!call_.keys || !call_.queries) return;
    found.states.resize(first.size() * found.heads * found.strips * found.steps);
    parallel(call_, int64_t(first.size()) * found.heads * found.strips, threads, [&](int) {
      return [&](int64_t task) {
        const int64_t p = task % found.strips, plane = task / found.strips;
        const char* base = array.at(first[plane / found.heads], plane % found.heads);
        const int64_t count = columns ? call_.keys : 1;
        const int64_t i0 = rows ? p * strip_ : 0, i1 = rows ? std::min(i0 + strip_, call_.queries) : 1;
        uint8_t* out = found.states.data() + task * found.steps;
        // row by row, as they lie in memory: what is known of each key so far is the cache's
        std::vector<uint8_t> some(count, 0), every(count, 0xff);
        for (int64_t i = i0; i < i1; ++i) take_row(base + i * array.row, array.col, count, some.data(), every.data());
        for (int64_t j0 = 0; j0 < count; j0 += kMaskStep) {
          const int64_t j1 = std::min(j0 + kMaskStep, count);
          uint8_t any = 0, all = 0xff;
          for (int64_t j = j0; j < j1; ++j) any |= some[j], all &= every[j];
          *out++ = all ? kAll : any ? kSome : kNone;
        }
      };
    });
  }

  void see(int n, int64_t b, int64_t h, int64_t i0, int64_t i1, Stretches& out) const {
    const MaskNode& node = call_.mask[n];
    const Found& found = found_[n];
    const int64_t keys = call_.keys;
    switch (node.kind) {
      case kBand: {
        const int64_t first = node.fields[0].number(b), last = node.fields[1].number(b);
        const int64_t start = i0 + first, stop = i1 + last, inner = i1 - 1 + first, end = i0 + last + 1;
        if (first > last) return out.add(keys, kNone);
        out.add(start, kNone);
        if (inner < end) out.add(inner, kSome), out.add(end, kAll);
        out.add(stop, kSome);
        return out.add(keys, kNone);
      }
      case kBefore: {
        out.add(node.fields[0].number(b), kAll);
        return out.add(keys, kNone);
      }
      case kDocuments: {
        const int64_t* q = node.fields[0].row(b);
        const std::vector<Part>& parts = found.parts[found.parts.size() > 1 ? b : 0];
        if (std::all_of(q + i0, q + i1, [&](int64_t id) { return id == q[i0]; })) return see_id(parts, q[i0], kAll, out);
        Stretches one, before;
        out.add(keys, kNone);
        for (int64_t i = i0; i < i1; ++i) {
          if (i > i0 && (q[i] == q[i - 1] || std::find(q + i0, q + i, q[i]) != q + i)) continue;
          std::swap(out, before);
          one.begin(keys), out.begin(keys);
          see_id(parts, q[i], kSome, one);
          out.join(one, before, false);
        }
        return;
      }
      case kFlags: {
        const uint8_t* q = node.fields[0].flag_row(b);
        const bool some = std::find(q + i0, q + i1, 1) != q + i1;
        if (some && std::find(q + i0, q + i1, 0) == q + i1) return out.add(keys, kAll);
        for (const Part& part : found.parts[found.parts.size() > 1 ? b : 0]) {
          out.add(part.start, some ? kSome : kNone);
          out.add(part.stop, part.pure ? kAll : kSome);
        }
        return out.add(keys, some ? kSome : kNone);
      }
      case kBlocks: {
        const uint8_t* table = block_table(call_, node, b, h);
        const int64_t block = node.constant, across = (keys + block - 1) / block, down = (i1 - 1) / block;
        const uint8_t* const top = table + i0 / block * across;
        Verdict now = kNone;
        for (int64_t c = 0; c < across; ++c) {
          Verdict here = top[c] ? kAll : kNone;
          for (int64_t row = i0 / block + 1; row <= down; ++row)
            if ((table[row * across + c] != 0) != (here == kAll)) here = kSome;
          if (here != now) out.add(c * block, now), now = here;
        }
        return out.add(keys, now);
      }
      case kArray: {
        const int64_t plane = found.plane[b] * found.heads + h * found.by_head;
        const int64_t first = found.strips > 1 ? i0 / strip_ : 0, last = found.strips > 1 ? (i1 - 1) / strip_ : 0;
        const uint8_t* const states = found.states.data() + (plane * found.strips + first) * found.steps;
        for (int64_t s = 0; s < found.steps; ++s) {
          uint8_t state = states[s];
          for (int64_t n = 1; n <= last - first; ++n)
            if (states[n * found.steps + s] != state) state = kSome;
          out.add(s + 1 == found.steps ? keys : (s + 1) * kMaskStep, Verdict(state));
        }
        return;
      }
      case kNot: {
        see(node.left, b, h, i0, i1, out);
        return out.turn();
      }
      default: {
        Stretches left, right;
        left.begin(keys), right.begin(keys);
        see(node.left, b, h, i0, i1, left);
        see(node.right, b, h, i0, i1, right);
        return out.join(left, right, node.kind == kAnd);
      }
    }
  }

  void see_id(const std::vector<Part>& parts, int64_t id, Verdict pure, Stretches& out) const {
    auto part = std::lower_bound(parts.begin(), parts.end(), id, [](const Part& x, int64_t id) { return x.id < id; });
    for (; part != parts.end() && part->id == id; ++part) {
      out.add(part->start, kNone);
      out.add(part->stop, part->pure ? pure : kSome);
    }
    out.add(call_.keys, kNone);
  }

  const Call& call_;
  const int64_t strip_;
  std::vector<Found> found_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
