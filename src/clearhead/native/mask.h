// Masks by tile: which keys some queries can see at all, whether a tile is all or nothing, and the tile itself.
#pragma once
#include <algorithm>
#include <cstring>

#include "problem.h"

namespace clearhead {

// The kinds of nodes and what they look at, numbered as in `core/lowered.py`.
enum MaskKind : int {
  kBand,       // fields low, high: low ≤ key − query ≤ high
  kBefore,     // field count: key < count
  kDocuments,  // fields of ids (T) and (S): the same id
  kFlags,      // fields of flags (T) and (S): one of the two is set
  kBlocks,     // constant block, field table (blocks of T × blocks of S)
  kArray,      // the array
  kAnd, kOr, kNot,
};

namespace CLEARHEAD_ISA {

struct Span { int64_t low, high; };  // keys low ≤ j < high

enum Verdict { kNone = 0, kSome, kAll };

// The table of a node of blocks for one batch row and head: (blocks of queries, blocks of keys).
inline const uint8_t* block_table(const Call& call, const MaskNode& node, int64_t b, int64_t h) {
  const Field& field = node.fields[0];
  const int64_t block = node.constant, one = ((call.queries + block - 1) / block) * ((call.keys + block - 1) / block);
  const int64_t row = field.each ? field.each : int64_t(field.flags.size());
  return field.flag_row(b) + (row > one ? h * one : 0);
}

// A mask of one call, asked about one batch row and head at a time.
class Mask {
 public:
  Mask(const Call& call, int64_t b, int64_t h) : call_(call), b_(b), h_(h) {}

  bool any() const { return !call_.mask.empty(); }

  // The keys that queries [i0, i1) may see, and perhaps some that they may not.
  Span span(int64_t i0, int64_t i1) const {
    if (i0 >= i1) return {0, 0};  // no query sees anything
    return any() ? span(root(), i0, i1, true) : Span{0, keys()};
  }

  Verdict decide(int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    if (i0 >= i1) return kNone;
    return any() ? decide(root(), i0, i1, j0, j1) : kAll;
  }

  // allowed[(j − j0) · width + (i − i0)] for queries [i0, i1), keys [j0, j1). Nothing else is written to: what lies between
  // i1 − i0 and `width` is no query.
  void tile(int64_t i0, int64_t i1, int64_t j0, int64_t j1, int width, uint8_t* allowed) const {
    tile(root(), i0, i1, j0, j1, width, allowed);
  }

 private:
  int root() const { return int(call_.mask.size()) - 1; }
  int64_t keys() const { return call_.keys; }

  int64_t blocks(int64_t block) const { return (keys() + block - 1) / block; }

  Span everything() const { return {0, keys()}; }
  Span clipped(int64_t low, int64_t high) const { return {std::max<int64_t>(low, 0), std::min(high, keys())}; }
  static bool empty(Span s) { return s.low >= s.high; }

  // Keys for which a node says `value` to some query of [i0, i1), and perhaps some for which it does not.
  Span span(int n, int64_t i0, int64_t i1, bool value) const {
    const MaskNode& node = call_.mask[n];
    switch (node.kind) {
      case kBand: {
        const int64_t first = node.fields[0].number(b_), last = node.fields[1].number(b_);
        if (value) return clipped(i0 + first, i1 - 1 + last + 1);
        // what all of them see is no part of it, where it reaches one end of the keys
        const int64_t low = i1 - 1 + first, high = i0 + last + 1;
        if (low >= high) return everything();
        return low <= 0 ? clipped(high, keys()) : high >= keys() ? clipped(0, low) : everything();
      }
      case kBefore: {
        const int64_t count = node.fields[0].number(b_);
        return value ? clipped(0, count) : clipped(count, keys());
      }
      case kDocuments: return value ? documents(node, i0, i1) : everything();
      case kFlags: {
        const uint8_t *q = node.fields[0].flag_row(b_), *k = node.fields[1].flag_row(b_);
        if (!value || std::find(q + i0, q + i1, 1) != q + i1) return everything();
        return between(std::find(k, k + keys(), 1) - k, [=](int64_t j) { return k[j] != 0; });
      }
      case kBlocks: {
        const uint8_t* table = block_table(call_, node, b_, h_);
        const int64_t block = node.constant, across = blocks(block);
        int64_t low = across, high = 0;
        for (int64_t row = i0 / block; row <= (i1 - 1) / block; ++row)
          for (int64_t c = 0; c < across; ++c)
            if ((table[row * across + c] != 0) == value) low = std::min(low, c), high = std::max(high, c + 1);
        return clipped(low * block, high * block);
      }
      case kArray: return array(node, i0, i1, value);
      case kNot: return span(node.left, i0, i1, !value);
      default: {
        const Span l = span(node.left, i0, i1, value), r = span(node.right, i0, i1, value);
        if ((node.kind == kAnd) == value) return {std::max(l.low, r.low), std::min(l.high, r.high)};
        if (empty(l)) return r;
        if (empty(r)) return l;
        return {std::min(l.low, r.low), std::max(l.high, r.high)};
      }
    }
  }

  // From `first` to the last key for which `rule` holds.
  template <class Rule> Span between(int64_t first, Rule rule) const {
    int64_t high = keys();
    while (high > first && !rule(high - 1)) --high;
    return {first, high};
  }

  // Keys with an id among those of the queries, as far as the least and the largest of them tell.
  Span documents(const MaskNode& node, int64_t i0, int64_t i1) const {
    const int64_t *q = node.fields[0].row(b_), *k = node.fields[1].row(b_);
    const auto [low, high] = std::minmax_element(q + i0, q + i1);
    const int64_t least = *low, most = *high;
    if (node.fields[1].ascends(b_)) return {std::lower_bound(k, k + keys(), least) - k, std::upper_bound(k, k + keys(), most) - k};
    const auto among = [=](int64_t id) { return id >= least && id <= most; };
    return between(std::find_if(k, k + keys(), among) - k, [=](int64_t j) { return among(k[j]); });
  }

  // From the first to the last `value` of some rows; each is searched only where it could widen the span.
  Span array(const MaskNode& node, int64_t i0, int64_t i1, bool value) const {
    const char* base = node.array.at(b_, h_);
    const int64_t col = node.array.col, across = col ? keys() : std::min<int64_t>(keys(), 1);
    int64_t low = across, high = 0;
    for (int64_t i = i0; i < (node.array.row ? i1 : i0 + 1); ++i) {
      const char* row = base + i * node.array.row;
      int64_t j = 0;
      while (col == 1 && j + 8 <= low && eight(row + j, !value)) j += 8;
      while (j < low && (row[j * col] != 0) != value) ++j;
      low = j;
    }
    for (int64_t i = node.array.row ? i1 - 1 : i0; i >= i0; --i) {
      const char* row = base + i * node.array.row;
      int64_t j = across;
      while (col == 1 && j - 8 >= high && eight(row + j - 8, !value)) j -= 8;
      while (j > high && (row[(j - 1) * col] != 0) != value) --j;
      high = j;
    }
    return col || low >= high ? Span{low, high} : everything();
  }

  // True where eight bytes are all the same truth value.
  static bool eight(const char* at, bool value) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    return word == (value ? 0x0101010101010101u : 0u);
  }

  // What some queries see of some keys, from what is true of any pair and of all.
  static Verdict verdict(bool any, bool all) { return all ? kAll : any ? kSome : kNone; }

  Verdict decide(int n, int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    const MaskNode& node = call_.mask[n];
    switch (node.kind) {
      case kBand: {
        const int64_t first = node.fields[0].number(b_), last = node.fields[1].number(b_);
        const int64_t low = j0 - (i1 - 1), high = j1 - 1 - i0;
        if (low >= first && high <= last) return kAll;
        return low > last || high < first ? kNone : kSome;
      }
      case kBefore: {
        const int64_t count = node.fields[0].number(b_);
        return j1 <= count ? kAll : j0 >= count ? kNone : kSome;
      }
      case kDocuments: {
        const int64_t *q = node.fields[0].row(b_), *k = node.fields[1].row(b_);
        const auto [q_low, q_high] = std::minmax_element(q + i0, q + i1);
        const auto [k_low, k_high] =
            node.fields[1].ascends(b_) ? std::make_pair(k + j0, k + j1 - 1) : std::minmax_element(k + j0, k + j1);
        if (*q_high < *k_low || *k_high < *q_low) return kNone;
        return *q_low == *q_high && *k_low == *k_high && *q_low == *k_low ? kAll : kSome;
      }
      case kFlags: {
        const uint8_t *q = node.fields[0].flag_row(b_), *k = node.fields[1].flag_row(b_);
        const bool asked = std::find(q + i0, q + i1, 0) == q + i1;
        return verdict(std::find(q + i0, q + i1, 1) != q + i1 || std::find(k + j0, k + j1, 1) != k + j1, asked);
      }
      case kBlocks: {
        const uint8_t* table = block_table(call_, node, b_, h_);
        const int64_t block = node.constant, across = blocks(block);
        bool any = false, all = true;
        for (int64_t row = i0 / block; row <= (i1 - 1) / block; ++row)
          for (int64_t c = j0 / block; c <= (j1 - 1) / block; ++c) {
            const bool here = table[row * across + c] != 0;
            any = any || here, all = all && here;
          }
        return verdict(any, all);
      }
      case kArray: {
        const char* base = node.array.at(b_, h_);
        const int64_t rows = node.array.row ? i1 - i0 : 1, columns = node.array.col ? j1 - j0 : 1;
        uint8_t any = 0, all = 1;
        for (int64_t i = 0; i < rows && all >= any; ++i) {  // until both have been found
          const char* at = base + (i0 + i) * node.array.row + j0 * node.array.col;
          int64_t j = 0;
          if (node.array.col == 1)
            for (const bool first = *at != 0; j + 8 <= columns && eight(at + j, first); j += 8) any |= first, all &= first;
          for (; j < columns && all >= any; ++j) {
            const uint8_t here = at[j * node.array.col] != 0;
            any |= here, all &= here;
          }
        }
        return verdict(any, all);
      }
      case kAnd: {
        const Verdict l = decide(node.left, i0, i1, j0, j1);
        if (l == kNone) return kNone;
        const Verdict r = decide(node.right, i0, i1, j0, j1);
        return r == kNone ? kNone : l == kAll && r == kAll ? kAll : kSome;
      }
      case kOr: {
        const Verdict l = decide(node.left, i0, i1, j0, j1);
        if (l == kAll) return kAll;
        const Verdict r = decide(node.right, i0, i1, j0, j1);
        return r == kAll ? kAll : l == kNone && r == kNone ? kNone : kSome;
      }
      case kNot: {
        const Verdict v = decide(node.left, i0, i1, j0, j1);
        return v == kAll ? kNone : v == kNone ? kAll : kSome;
      }
      default: return kSome;
    }
  }

  template <class Rule>
  static void fill(int64_t i0, int64_t i1, int64_t j0, int64_t j1, int width, uint8_t* allowed, Rule rule) {
    for (int64_t j = j0; j < j1; ++j)
      for (int64_t i = i0; i < i1; ++i) allowed[(j - j0) * width + (i - i0)] = rule(i, j);
  }

  // Pairs with low ≤ j − i ≤ high: of each key one run of queries. Sixteen of them at a time, counted in bytes.
  static void band(int64_t low, int64_t high, int64_t i0, int64_t i1, int64_t j0, int64_t j1, int width, uint8_t* allowed) {
    using Bytes = uint8_t __attribute__((vector_size(16)));
    constexpr int64_t some = sizeof(Bytes);
    constexpr Bytes places{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t i = i0; i < i1; i += some)
      for (int64_t j = j0; j < j1; ++j) {
        const int64_t first = std::clamp<int64_t>(j - i - high, 0, some), end = std::clamp<int64_t>(j - i - low + 1, first, some);
        const Bytes seen = Bytes(places - uint8_t(first) < uint8_t(end - first)) & 1;
        uint8_t* const row = allowed + (j - j0) * width + (i - i0);
        if (i + some <= i1) std::memcpy(row, &seen, some);
        else for (int64_t x = 0; x < i1 - i; ++x) row[x] = seen[x];
      }
  }

  // Eight rows of eight truth values become eight columns: squares of 4, 2 and 1 of them change places.
  static void turn_eight(const char* from, int64_t row, uint8_t* to, int64_t width) {
    uint64_t x[8];
    for (int n = 0; n < 8; ++n) {
      std::memcpy(&x[n], from + n * row, 8);
      x[n] |= x[n] >> 4, x[n] |= x[n] >> 2, x[n] |= x[n] >> 1;  // whatever is not 0 becomes 1
      x[n] &= 0x0101010101010101u;
    }
    const auto swap = [&x](int apart, uint64_t low) {
      for (int n = 0; n < 8; ++n) {
        if (n & apart) continue;
        const uint64_t moved = ((x[n] >> 8 * apart) ^ x[n + apart]) & low;
        x[n + apart] ^= moved, x[n] ^= moved << 8 * apart;
      }
    };
    swap(4, 0x00000000ffffffffu), swap(2, 0x0000ffff0000ffffu), swap(1, 0x00ff00ff00ff00ffu);
    for (int n = 0; n < 8; ++n) std::memcpy(to + n * width, &x[n], 8);
  }

  // What an array says, which has its queries one below the other. Not inline: most masks have none.
  __attribute__((noinline)) void turned(const View& array, int64_t i0, int64_t i1, int64_t j0, int64_t j1, int width,
                                        uint8_t* allowed) const {
    const char* base = array.at(b_, h_);
    const int64_t row = array.row, col = array.col;
    int64_t i = i0;
    for (; col == 1 && i + 8 <= i1; i += 8) {
      int64_t j = j0;
      for (; j + 8 <= j1; j += 8) turn_eight(base + i * row + j, row, allowed + (j - j0) * width + (i - i0), width);
      for (; j < j1; ++j)
        for (int64_t n = 0; n < 8; ++n) allowed[(j - j0) * width + (i + n - i0)] = base[(i + n) * row + j] != 0;
    }
    for (; i < i1; ++i)
      for (int64_t j = j0; j < j1; ++j) allowed[(j - j0) * width + (i - i0)] = base[i * row + j * col] != 0;
  }

  void tile(int n, int64_t i0, int64_t i1, int64_t j0, int64_t j1, int width, uint8_t* allowed) const {
    const MaskNode& node = call_.mask[n];
    switch (node.kind) {
      case kBand: return band(node.fields[0].number(b_), node.fields[1].number(b_), i0, i1, j0, j1, width, allowed);
      case kBefore: {
        const int64_t count = node.fields[0].number(b_);
        return fill(i0, i1, j0, j1, width, allowed, [=](int64_t, int64_t j) { return j < count; });
      }
      case kDocuments: {
        const int64_t *q = node.fields[0].row(b_), *k = node.fields[1].row(b_);
        return fill(i0, i1, j0, j1, width, allowed, [=](int64_t i, int64_t j) { return q[i] == k[j]; });
      }
      case kFlags: {
        const uint8_t *q = node.fields[0].flag_row(b_), *k = node.fields[1].flag_row(b_);
        return fill(i0, i1, j0, j1, width, allowed, [=](int64_t i, int64_t j) { return q[i] | k[j]; });
      }
      case kBlocks: {
        const uint8_t* table = block_table(call_, node, b_, h_);
        const int64_t block = node.constant, across = blocks(block);
        for (int64_t j = j0; j < j1; ++j)
          for (int64_t i = i0, end; i < i1; i = end) {  // a division for each block and not for each pair
            end = std::min((i / block + 1) * block, i1);
            std::fill(allowed + (j - j0) * width + (i - i0), allowed + (j - j0) * width + (end - i0), table[i / block * across + j / block]);
          }
        return;
      }
      case kArray: return turned(node.array, i0, i1, j0, j1, width, allowed);
      case kNot: {
        tile(node.left, i0, i1, j0, j1, width, allowed);
        for (int64_t j = 0; j < j1 - j0; ++j)
          for (int64_t i = 0; i < i1 - i0; ++i) allowed[j * width + i] = !allowed[j * width + i];
        return;
      }
      default: {
        // what leaves the answer to the other is not asked
        const Verdict passes = node.kind == kAnd ? kAll : kNone;
        if (decide(node.left, i0, i1, j0, j1) == passes) return tile(node.right, i0, i1, j0, j1, width, allowed);
        tile(node.left, i0, i1, j0, j1, width, allowed);
        if (decide(node.right, i0, i1, j0, j1) == passes) return;
        std::vector<uint8_t> other((j1 - j0) * width);
        tile(node.right, i0, i1, j0, j1, width, other.data());
        if (node.kind == kAnd)
          for (size_t x = 0; x < other.size(); ++x) allowed[x] &= other[x];
        else
          for (size_t x = 0; x < other.size(); ++x) allowed[x] |= other[x];
        return;
      }
    }
  }

  const Call& call_;
  const int64_t b_, h_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
