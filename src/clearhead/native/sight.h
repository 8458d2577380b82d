// Which keys a panel of queries sees, stretch by stretch: none of them, some of the pairs, or all. Empty stretches cost nothing,
// and full ones need no mask.
#pragma once
#include <iterator>

#include "mask.h"
#include "stretches.h"
#include "threads.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

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
      std::vector<int64_t> ids;
      std::unique_copy(q, q + call_.queries, std::back_inserter(ids));  // mostly there are few, side by side: they sort sooner
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
        return see_ids(parts, q + i0, q + i1, out);
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
      case kBlocks: return node.fields[0].flags.empty() ? see_chosen(node, i0, i1, out) : see_blocks(node, b, h, i0, i1, out);
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
        Stretches &left = out.part(0), &right = out.part(1);
        left.begin(keys), right.begin(keys);
        see(node.left, b, h, i0, i1, left);
        see(node.right, b, h, i0, i1, right);
        return out.join(left, right, node.kind == kAnd);
      }
    }
  }

  // What some lines of a table of blocks say of each block of keys, and where it changes.
  void see_blocks(const MaskNode& node, int64_t b, int64_t h, int64_t i0, int64_t i1, Stretches& out) const {
    const int64_t block = node.constant, across = (call_.keys + block - 1) / block, first = i0 / block, last = (i1 - 1) / block;
    const uint8_t* const top = block_table(call_, node, b, h) + first * across;
    std::vector<uint8_t> some, every;
    if (last > first) {
      some.assign(top, top + across), every = some;
      for (const uint8_t* line = top + across; line <= top + (last - first) * across; line += across)
        for (int64_t c = 0; c < across; ++c) some[c] |= line[c], every[c] &= line[c];
    }
    const uint8_t *const any = last > first ? some.data() : top, *const all = last > first ? every.data() : top;
    const auto change = [across](const uint8_t* row, int64_t c) {  // of truth values, 0 or 1
      const void* found = c < across ? std::memchr(row + c, !row[c], across - c) : nullptr;
      return found ? static_cast<const uint8_t*>(found) - row : across;
    };
    for (int64_t c = 0, next_any = 0, next_all = 0; c < across;) {
      if (c >= next_any) next_any = change(any, c);
      if (c >= next_all) next_all = change(all, c);
      const Verdict here = all[c] ? kAll : any[c] ? kSome : kNone;
      c = std::min(next_any, next_all);
      out.add(c == across ? call_.keys : c * block, here);
    }
  }

  // The same of a table of which few blocks let something through, given by their places in it, ascending.
  void see_chosen(const MaskNode& node, int64_t i0, int64_t i1, Stretches& out) const {
    const int64_t block = node.constant, across = (call_.keys + block - 1) / block, first = i0 / block, last = (i1 - 1) / block;
    const std::vector<int64_t>& places = node.fields[0].numbers;
    auto place = std::lower_bound(places.begin(), places.end(), first * across);
    std::vector<int64_t> all;
    for (int64_t row = first; row <= last; ++row)
      for (; place != places.end() && *place < (row + 1) * across; ++place) all.push_back(*place - row * across);
    if (last > first) std::sort(all.begin(), all.end());
    for (size_t n = 0, end; n < all.size(); n = end) {
      for (end = n + 1; end < all.size() && all[end] == all[n];) ++end;
      out.add(all[n] * block, kNone);
      out.add((all[n] + 1) * block, int64_t(end - n) > last - first ? kAll : kSome);
    }
    out.add(call_.keys, kNone);
  }

  void see_id(const std::vector<Part>& parts, int64_t id, Verdict pure, Stretches& out) const {
    for (auto part = of_id(parts, id); part != parts.end() && part->id == id; ++part) {
      out.add(part->start, kNone);
      out.add(part->stop, part->pure ? pure : kSome);
    }
    out.add(call_.keys, kNone);
  }

  // The keys of several ids, all of them seen by some and by none of the others.
  void see_ids(const std::vector<Part>& parts, const int64_t* first, const int64_t* last, Stretches& out) const {
    std::vector<int64_t> ids;
    std::unique_copy(first, last, std::back_inserter(ids));
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    std::vector<std::pair<int64_t, int64_t>> seen;  // from where to where
    for (const int64_t id : ids)
      for (auto part = of_id(parts, id); part != parts.end() && part->id == id; ++part) seen.emplace_back(part->start, part->stop);
    std::sort(seen.begin(), seen.end());  // they may meet, where what is short between two was taken with them
    for (const auto& [start, stop] : seen) out.add(start, kNone), out.add(stop, kSome);
    out.add(call_.keys, kNone);
  }

  static std::vector<Part>::const_iterator of_id(const std::vector<Part>& parts, int64_t id) {
    return std::lower_bound(parts.begin(), parts.end(), id, [](const Part& x, int64_t id) { return x.id < id; });
  }

  const Call& call_;
  const int64_t strip_;
  std::vector<Found> found_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
