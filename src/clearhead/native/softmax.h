// The running softmax of one panel: the largest score, the total and the entropy's sum of each query.
#pragma once
#include <cmath>
#include <numeric>
#include <utility>

#include "score.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// What a row ends with, the sink counted in: a weight is 2^((score − peak) · factor) / total. The sums so far, which are
// relative to the largest score, become weights by their share.
template <class T> struct Ending { T largest, peak, total, share, lse, entropy; };

constexpr double kFarAbove = 60;  // nats: e^60 times as many keys as there can be still fits into any of the types

// A sink's logit in the unit in which scores are kept.
template <class T> inline T in_units(double sink, const Units<T>& units) { return T(sink / double(units.to_score)); }

// Sums relative to the largest score so far, which is subtracted before the factor is applied: the largest key's weight is
// then exactly 1 before it is divided, and scores of 10⁴ lose no digits. Where nobody is `told` of logarithms there are none: each
// takes as long as hundreds of multiply-adds.
template <class T>
inline Ending<T> ending(T largest, T total, T weighted, const Units<T>& units, double sink, bool told) {
  constexpr T none = -std::numeric_limits<T>::infinity();
  if (total != total) largest = total;  // not every instruction set's maximum keeps NaN
  if (largest == none) return {none, none, T(0), T(0), T(sink), T(0)};
  const T score = largest * units.to_score;
  const double above = sink - double(score);
  if (above > kFarAbove) {  // next to the sink all keys together are nothing: the denominator is relative to the sink
    const double worth = std::exp(-above), keys = double(total) * worth;
    const T share = T(worth / (1 + keys)), lse = T(sink + std::log1p(keys));
    const T entropy = share == 0 ? T(0) : share * (total * T(above + std::log1p(keys)) - T(kLn2) * weighted);
    return {largest, in_units(sink, units), T(1 + keys), share, lse, entropy};
  }
  // the sink's part of the denominator, relative to the largest score
  const T extra = above == -std::numeric_limits<double>::infinity() ? T(0) : T(std::exp(above));
  const T denominator = total + extra, share = T(1) / denominator, logarithm = told ? std::log(denominator) : T(0);
  return {largest, largest, denominator, share, score + logarithm, share * (total * logarithm - T(kLn2) * weighted)};
}

template <class T> struct Rows {
  static constexpr int panel = kPanel<T>, lanes = kLanes<T>;
  static constexpr T none = -std::numeric_limits<T>::infinity();
  T largest[panel], total[panel], weighted[panel];

  Rows() {
    std::fill(largest, largest + panel, none);
    std::fill(total, total + panel, T(0));
    std::fill(weighted, weighted + panel, T(0));
  }

  // s[key][query] becomes 2^((s − largest) · factor), with the largest of all keys so far; totals and values follow it. Vectors past
  // `wanted` are left as they are.
  template <int vecs = kVecs> void exponentiate(T* s, int64_t count, T factor, bool entropy, T* values, int64_t width, int wanted) {
    if constexpr (vecs > 1)
      if (wanted < vecs) return exponentiate<vecs - 1>(s, count, factor, entropy, values, width, wanted);
    T top[panel];
    tops<vecs>(s, count, top);
    move<vecs>(top, factor, values, width);
    T shift[panel];
    shifts(shift);
    Vec<T> sums[vecs] = {}, spread[vecs] = {};
    if (entropy) run<true, vecs>(s, count, factor, shift, sums, spread);
    else run<false, vecs>(s, count, factor, shift, sums, spread);
    for (int j = 0; j < vecs; ++j) {
      store<T>(total + j * lanes, load<T>(total + j * lanes) + sums[j]);
      store<T>(weighted + j * lanes, load<T>(weighted + j * lanes) + spread[j]);
    }
  }

  // True where some query's weights are NaN.
  bool spoiled() const {
    return std::any_of(total, total + panel, [](T x) { return x != x; });
  }

  // s[key][query] becomes the weight, once `largest` and `total` are final, the sink counted in.
  void weigh(T* s, int64_t count, T factor) const {
    weigh_each(s, count, factor, [](T* at, Vec<T> weight, int) CLEARHEAD_LAMBDA { store<T>(at, weight); });
  }

  // The same for what `exponentiate` left when `then` were the largest scores.
  void weigh_again(T* s, int64_t count, T factor, const T* then) const {
    T shift[panel];
    shifts(shift);
    Vec<T> share[kVecs], limited[kVecs];
    for (int j = 0; j < kVecs; ++j) share[j] = (load<T>(then + j * lanes) - load<T>(shift + j * lanes)) * factor;
    exp2<T, kVecs>(share, limited);
    for (int x = 0; x < panel; ++x) share[x / lanes][x % lanes] = total[x] == 0 ? T(0) : share[x / lanes][x % lanes] / total[x];
    for (int64_t k = 0; k < count; ++k)
      for (int j = 0; j < kVecs; ++j) store<T>(s + k * panel + j * lanes, load<T>(s + k * panel + j * lanes) * share[j]);
  }

  // As `weigh`, and d[key][query] becomes the weight · (d − spread), which is the derivative of a score.
  void weigh(T* s, int64_t count, T factor, T* d, const T* spread) const {
    weigh_each(s, count, factor, [&](T* at, Vec<T> weight, int lane) CLEARHEAD_LAMBDA {
      T* const here = d + (at - s);
      store<T>(at, weight);
      store<T>(here, weight * (load<T>(here) - load<T>(spread + lane)));
    });
  }

 private:
  // Calls `use` for each vector of weights, with where it belongs and the first of its lanes.
  template <class Use> CLEARHEAD_INLINE void weigh_each(T* s, int64_t count, T factor, Use use) const {
    T shift[panel], share[panel];
    shifts(shift);
    for (int x = 0; x < panel; ++x) share[x] = total[x] == 0 ? T(0) : T(1) / total[x];
    in_groups<kVecs>(s, count, [&](T* at, auto group) CLEARHEAD_LAMBDA {
      using Of = decltype(group);
      Vec<T> x[Of::size], limited[Of::size];
      powers<Of>(at, factor, shift, x, limited);
      for (int j = 0; j < Of::size; ++j) use(at + Of::at(j), x[j] * load<T>(share + Of::lane(j)), Of::lane(j));
    });
  }

  // What is subtracted before the exponential: the largest score, or 0 where there is none yet.
  void shifts(T* shift) const {
    for (int x = 0; x < panel; ++x) shift[x] = largest[x] == none ? T(0) : largest[x];
  }

  // The largest score of each query so far; two chains for each, since a maximum waits for the one before.
  template <int vecs> void tops(const T* s, int64_t count, T* top) const {
    Vec<T> even[vecs], odd[vecs];
    for (int j = 0; j < vecs; ++j) even[j] = odd[j] = load<T>(largest + j * lanes);
    int64_t k = 0;
    for (; k + 2 <= count; k += 2)
      for (int j = 0; j < vecs; ++j) {
        even[j] = max(even[j], load<T>(s + k * panel + j * lanes));
        odd[j] = max(odd[j], load<T>(s + (k + 1) * panel + j * lanes));
      }
    if (k < count)
      for (int j = 0; j < vecs; ++j) even[j] = max(even[j], load<T>(s + k * panel + j * lanes));
    for (int j = 0; j < vecs; ++j) store<T>(top + j * lanes, max(even[j], odd[j]));
  }

  // A larger score: what was summed so far is worth less.
  template <int vecs> void move(const T* top, T factor, T* values, int64_t width) {
    T worth[panel];
    bool changed = false;
    for (int x = 0; x < vecs * lanes; ++x) {
      const T now = top[x];
      worth[x] = 1;
      if (now == largest[x]) continue;
      if (largest[x] != none) {
        const T apart = (largest[x] - now) * factor;
        worth[x] = std::exp2(apart);
        weighted[x] = worth[x] * (weighted[x] + total[x] * apart);
        total[x] *= worth[x];
        changed = true;
      }
      largest[x] = now;
    }
    if (!changed) return;
    for (int64_t c = 0; c < width; ++c)
      for (int j = 0; j < vecs; ++j) {
        T* at = values + c * panel + j * lanes;
        store<T>(at, load<T>(at) * load<T>(worth + j * lanes));
      }
  }

  // Calls `act` for the first `vecs` vectors of every key in turn, kExpVecs of them at a time; `act` knows at compile time how many
  // it has, where they lie and which of the panel's vectors each of them is.
  template <int vecs, class Act> CLEARHEAD_INLINE static void in_groups(T* s, int64_t count, Act act) {
    constexpr int keys = std::lcm(kExpVecs, vecs) / vecs, groups = keys * vecs / kExpVecs;
    static_assert(groups * kExpVecs == keys * vecs);
    int64_t k = 0;
    for (; k + keys <= count; k += keys) in_group<vecs>(s + k * panel, act, std::make_integer_sequence<int, groups>());
    for (; k < count; ++k) act(s + k * panel, Group<vecs, vecs, 0>());
  }

  template <int vecs, int many, int start> struct Group {
    static constexpr int size = many;
    static constexpr int lane(int j) { return (start + j) % vecs * lanes; }
    static constexpr int at(int j) { return (start + j) / vecs * panel + lane(j); }
  };

  template <int vecs, class Act, int... group>
  CLEARHEAD_INLINE static void in_group(T* s, Act act, std::integer_sequence<int, group...>) {
    (act(s, Group<vecs, kExpVecs, group * kExpVecs>()), ...);
  }

  // 2^((s − shift) · factor) of a group of vectors.
  template <class Of> CLEARHEAD_INLINE static void powers(const T* at, T factor, const T* shift, Vec<T>* x, Vec<T>* limited) {
    for (int j = 0; j < Of::size; ++j) x[j] = (load<T>(at + Of::at(j)) - load<T>(shift + Of::lane(j))) * factor;
    exp2<T, Of::size>(x, limited);
  }

  template <bool entropy, int vecs>
  static void run(T* s, int64_t count, T factor, const T* shift, Vec<T>* sums, Vec<T>* spread) {
    Vec<T> total[vecs] = {}, heat[vecs] = {};
    in_groups<vecs>(s, count, [&](T* at, auto group) CLEARHEAD_LAMBDA {
      using Of = decltype(group);
      Vec<T> x[Of::size], limited[Of::size];
      powers<Of>(at, factor, shift, x, limited);
      for (int j = 0; j < Of::size; ++j) {
        total[Of::lane(j) / lanes] += x[j];
        if (entropy) heat[Of::lane(j) / lanes] += x[j] * limited[j];
        store<T>(at + Of::at(j), x[j]);
      }
    });
    for (int j = 0; j < vecs; ++j) sums[j] = total[j], spread[j] = heat[j];
  }
};

// The logit of a head's sink; −inf where there is none.
inline double sink_of(const Call& call, int64_t h) {
  return call.sinks.empty() ? -std::numeric_limits<double>::infinity() : call.sinks[h];
}

// Whether anybody wants to know of a row more than its output.
inline bool told(const Call& call) { return call.lse || call.wanted.entropy; }

// Everything that a row has one of.
template <class T>
inline void write_ending(const Call& call, const Units<T>& units, int64_t at, const Ending<T>& end) {
  if (call.lse) {
    static_cast<T*>(call.lse)[at] = end.lse;
    static_cast<T*>(call.peak)[at] = end.peak;
    static_cast<T*>(call.total)[at] = end.total;
  }
  if (call.wanted.max_score) static_cast<T*>(call.wanted.max_score)[at] = end.largest * units.to_score;
  if (call.wanted.entropy) static_cast<T*>(call.wanted.entropy)[at] = end.entropy;
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
