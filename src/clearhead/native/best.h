// The largest numbers of many, lane by lane, in order: found without a branch, by comparing and exchanging.
#pragma once
#include <algorithm>
#include <utility>

#include "isa.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kTogetherBest = 8;  // numbers that are added at once

// The `most` largest, none below 0, of those that were added; `most` is a power of two, and no fewer than are added at once.
template <class T, int64_t most> class Best {
 public:

  // The number in place `n`, from the largest on.
  Vec<T> at(int64_t n) const { return sorted_[n]; }

  // As many vectors as there are, kTogetherBest at most, `step` apart; no more is done where no lane has one above `least`.
  CLEARHEAD_INLINE void add(const T* numbers, int64_t step, int64_t count, Vec<T> least) {
    Vec<T> next[kTogetherBest], top = {};
    for (int64_t n = 0; n < kTogetherBest; ++n) {
      next[n] = n < count ? load<T>(numbers + n * step) : Vec<T>{};
      top = max(top, next[n]);
    }
    if (!lanes_above<T>(top, max(sorted_[most - 1], least))) return;
    sort(next, std::make_integer_sequence<int, 19>());
    // of two lists in order, one turned around, the larger of each pair are the largest of both; they rise once and fall once,
    // and halving after halving puts such a list in order
    for (int64_t n = 0; n < kTogetherBest; ++n) sorted_[most - 1 - n] = max(sorted_[most - 1 - n], next[n]);
    halve<most / 2>(std::make_integer_sequence<int64_t, most>());
  }

 private:
  // Every exchange is known when this is compiled, so that all numbers stay in registers.
  template <int64_t apart, int64_t... n> CLEARHEAD_INLINE void halve(std::integer_sequence<int64_t, n...> all) {
    ((n & apart ? void() : exchange(sorted_, n, (n | apart))), ...);
    if constexpr (apart > 1) halve<apart / 2>(all);
  }

  static CLEARHEAD_INLINE void exchange(Vec<T>* x, int64_t upper, int64_t lower) {
    const Vec<T> larger = max(x[upper], x[lower]);
    x[lower] = min(x[upper], x[lower]);
    x[upper] = larger;
  }

  // Eight in 19 exchanges: fours in order, then both together (Batcher's odd–even merge).
  static constexpr int kPairs[19][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {0, 2}, {1, 3}, {4, 6}, {5, 7}, {1, 2}, {5, 6},
                                        {0, 4}, {1, 5}, {2, 6}, {3, 7}, {2, 4}, {3, 5}, {1, 2}, {3, 4}, {5, 6}};
  static_assert(kTogetherBest == 8);
  template <int... n> static CLEARHEAD_INLINE void sort(Vec<T>* x, std::integer_sequence<int, n...>) {
    (exchange(x, kPairs[n][0], kPairs[n][1]), ...);
  }

  static_assert(most >= kTogetherBest && (most & (most - 1)) == 0);
  Vec<T> sorted_[most] = {};
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
