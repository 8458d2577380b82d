// Masks by tile: which keys some queries can see at all, whether a tile is all or nothing, and the tile itself.
#pragma once
#include <algorithm>

#include "problem.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

struct Span { int64_t low, high; };  // keys low ≤ j < high

enum Verdict { kNone, kSome, kAll };

// A mask of one call, asked about one batch row and head at a time.
class Mask {
 public:
  Mask(const Call& call, int64_t b, int64_t h) : call_(call), b_(b), h_(h) {}

  bool any() const { return !call_.mask.empty(); }

  // The keys that queries [i0, i1) may see, and perhaps some that they may not.
  Span span(int64_t i0, int64_t i1) const {
    Span s = any() ? span(root(), i0, i1) : Span{0, call_.keys};
    return {std::max<int64_t>(s.low, 0), std::min(s.high, call_.keys)};
  }

  Verdict decide(int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    return any() ? decide(root(), i0, i1, j0, j1) : kAll;
  }

  // allowed[(j − j0) · width + (i − i0)] for queries [i0, i1), keys [j0, j1).
  void tile(int64_t i0, int64_t i1, int64_t j0, int64_t j1, int width, uint8_t* allowed) const {
    tile(root(), i0, i1, j0, j1, width, allowed);
  }

 private:
  int root() const { return int(call_.mask.size()) - 1; }
  int64_t queries() const { return call_.queries; }
  int64_t keys() const { return call_.keys; }

  Span span(int n, int64_t i0, int64_t i1) const {
    const MaskNode& node = call_.mask[n];
    switch (node.kind) {
      case kBand: return {i0 + node.offset[b_] - node.back, i1 - 1 + node.offset[b_] + node.ahead + 1};
      case kBefore: return {0, node.count[b_]};
      case kAnd: {
        const Span l = span(node.left, i0, i1), r = span(node.right, i0, i1);
        return {std::max(l.low, r.low), std::min(l.high, r.high)};
      }
      case kOr: {
        const Span l = span(node.left, i0, i1), r = span(node.right, i0, i1);
        if (l.low >= l.high) return r;
        if (r.low >= r.high) return l;
        return {std::min(l.low, r.low), std::max(l.high, r.high)};
      }
      default: return {0, keys()};
    }
  }

  Verdict decide(int n, int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    const MaskNode& node = call_.mask[n];
    switch (node.kind) {
      case kBand: {
        const int64_t low = j0 - (i1 - 1) - node.offset[b_], high = j1 - 1 - i0 - node.offset[b_];
        if (low >= -node.back && high <= node.ahead) return kAll;
        return low > node.ahead || high < -node.back ? kNone : kSome;
      }
      case kBefore: return j1 <= node.count[b_] ? kAll : j0 >= node.count[b_] ? kNone : kSome;
      case kDocuments: {
        const int64_t* q = node.query_ids.data() + b_ * queries();
        const int64_t* k = node.key_ids.data() + b_ * keys();
        const auto [q_low, q_high] = std::minmax_element(q + i0, q + i1);
        const auto [k_low, k_high] = std::minmax_element(k + j0, k + j1);
        if (*q_high < *k_low || *k_high < *q_low) return kNone;
        return *q_low == *q_high && *k_low == *k_high && *q_low == *k_low ? kAll : kSome;
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

  void tile(int n, int64_t i0, int64_t i1, int64_t j0, int64_t j1, int width, uint8_t* allowed) const {
    const MaskNode& node = call_.mask[n];
    switch (node.kind) {
      case kBand: {
        const int64_t offset = node.offset[b_], low = -node.back, high = node.ahead;
        return fill(i0, i1, j0, j1, width, allowed,
                    [=](int64_t i, int64_t j) { return j - i - offset >= low && j - i - offset <= high; });
      }
      case kBefore: {
        const int64_t count = node.count[b_];
        return fill(i0, i1, j0, j1, width, allowed, [=](int64_t, int64_t j) { return j < count; });
      }
      case kDocuments: {
        const int64_t* q = node.query_ids.data() + b_ * queries();
        const int64_t* k = node.key_ids.data() + b_ * keys();
        return fill(i0, i1, j0, j1, width, allowed, [=](int64_t i, int64_t j) { return q[i] == k[j]; });
      }
      case kFlags: {
        const uint8_t* q = node.query_flags.data() + b_ * queries();
        const uint8_t* k = node.key_flags.data();
        return fill(i0, i1, j0, j1, width, allowed, [=](int64_t i, int64_t j) { return q[i] | k[j]; });
      }
      case kBlocks: {
        const uint8_t* table = node.table.data();
        const int64_t block = node.block, across = node.key_blocks;
        return fill(i0, i1, j0, j1, width, allowed,
                    [=](int64_t i, int64_t j) { return table[i / block * across + j / block]; });
      }
      case kArray: {
        const char* base = node.array.at(b_, h_);
        const int64_t row = node.array.row, col = node.array.col;
        for (int64_t i = i0; i < i1; ++i)
          for (int64_t j = j0; j < j1; ++j) allowed[(j - j0) * width + (i - i0)] = base[i * row + j * col] != 0;
        return;
      }
      case kNot: {
        tile(node.left, i0, i1, j0, j1, width, allowed);
        for (int64_t x = 0; x < (j1 - j0) * width; ++x) allowed[x] = !allowed[x];
        return;
      }
      default: {
        std::vector<uint8_t> other((j1 - j0) * width);
        tile(node.left, i0, i1, j0, j1, width, allowed);
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
