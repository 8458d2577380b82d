// What each key got of the queries besides plain sums: sums with a weight for each query, the largest weight, and how much
// outputs would change without the key.
#pragma once
#include "score.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// What is sought of each key, (batch, heads, S): null pointers are not. Queries count from a number on.
struct SoughtByKey {
  const void* emphasis = nullptr;  // (T) for each head: how much a query counts in `weighted`
  void* weighted = nullptr;
  int64_t most_from = 0;
  void* most = nullptr;
  int64_t removal_from = 0;
  void* removal = nullptr;

  bool any() const { return weighted || most || removal; }
};

// As Observer does, one of these watches a chunk of queries of one head. A tile's numbers are kept for each query of a panel
// apart, and put together when all panels have shown theirs.
template <class T> class ByKey {
 public:
  static constexpr int panel = kPanel<T>, lanes = kLanes<T>;
  // where less is left of a query's weights, what the others hold is lost to rounding; as in core/formula.py
  static constexpr T kAlone = T(0.000244140625);
  static constexpr int64_t kKeys = 4;  // whose distances from the outputs are summed side by side

  ByKey(const Call& call, const SoughtByKey& sought, int64_t b, int64_t h) : call_(call), want_(sought), b_(b), h_(h) {
    for (auto [wanted, kept] : {std::pair{sought.weighted, &weighted_}, {sought.most, &most_}, {sought.removal, &removal_}})
      if (wanted) kept->by_key.assign(call.keys, T(0)), kept->tile.assign(kTile * panel, T(0));
    if (sought.removal) output_.resize(rounded(call.width, kRows) * panel);
  }

  // Some query of this chunk is NaN: of two weights, NaN is then the larger.
  void spoil() { spoiled_ = true; }

  void see(const T* weights, const Packed<T>& packed, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    const int64_t first = (j0 % kTile) * panel;
    if (want_.weighted) weigh(weights, weighted_.tile.data() + first, i0, i1, j1 - j0);
    if (want_.most && i1 > want_.most_from) raise(weights, most_.tile.data() + first, want_.most_from - i0, j1 - j0);
    if (want_.removal && i1 > want_.removal_from)
      remove(weights, removal_.tile.data() + first, packed, i0, i1, j0, j1);
  }

  // All panels have shown their weights for keys [j0, j1).
  void end_tile(int64_t j0, int64_t j1) {
    for (Kept* kept : {&weighted_, &removal_}) {
      if (kept->tile.empty()) continue;
      for (int64_t j = j0; j < j1; ++j) {
        Vec<T> total = {};
        for (int x = 0; x < kVecs; ++x) total += load<T>(kept->tile.data() + (j - j0) * panel + x * lanes);
        kept->by_key[j] += sum<T>(total);
      }
      std::fill(kept->tile.begin(), kept->tile.end(), T(0));
    }
    if (most_.tile.empty()) return;
    for (int64_t j = j0; j < j1; ++j) {
      const T* row = most_.tile.data() + (j - j0) * panel;
      for (int x = 0; x < panel; ++x) most_.by_key[j] = larger(most_.by_key[j], row[x]);
    }
    std::fill(most_.tile.begin(), most_.tile.end(), T(0));
  }

  int64_t bytes() const {
    size_t numbers = output_.size();
    for (const Kept* kept : {&weighted_, &most_, &removal_}) numbers += kept->by_key.size() + kept->tile.size();
    return int64_t(numbers * sizeof(T));
  }

  // Add what this chunk found to the results; chunks of a head come in order.
  void add() const {
    const int64_t first = (b_ * call_.heads + h_) * call_.keys;
    for (auto [out, kept] : {std::pair{want_.weighted, &weighted_}, {want_.removal, &removal_}})
      for (int64_t j = 0; out && j < call_.keys; ++j) static_cast<T*>(out)[first + j] += kept->by_key[j];
    T* most = static_cast<T*>(want_.most) + first;
    for (int64_t j = 0; want_.most && j < call_.keys; ++j) most[j] = larger(most[j], most_.by_key[j]);
  }

 private:
  struct Kept {
    Buffer<T> by_key, tile;
  };

  // The larger of two, or NaN.
  static T larger(T a, T b) { return a >= b || a != a ? a : b; }

  void weigh(const T* weights, T* tile, int64_t i0, int64_t i1, int64_t keys) {
    T counts[panel] = {};
    const T* emphasis = static_cast<const T*>(want_.emphasis) + call_.row_of(b_, h_);
    std::copy(emphasis + i0, emphasis + i1, counts);
    for (int64_t k = 0; k < keys; ++k)
      for (int x = 0; x < panel; ++x)  // who does not count spoils nothing
        tile[k * panel + x] += counts[x] == 0 ? T(0) : weights[k * panel + x] * counts[x];
  }

  // Lanes from `first` on count.
  void raise(const T* weights, T* tile, int64_t first, int64_t keys) {
    if (spoiled_ || first > 0) {
      for (int64_t k = 0; k < keys; ++k)
        for (int64_t x = std::max<int64_t>(first, 0); x < panel; ++x)
          tile[k * panel + x] = larger(tile[k * panel + x], weights[k * panel + x]);
      return;
    }
    for (int64_t at = 0; at < keys * panel; at += lanes) store<T>(tile + at, max(load<T>(tile + at), load<T>(weights + at)));
  }

  void remove(const T* weights, T* tile, const Packed<T>& packed, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    T whole[panel];
    read_output(i0, i1, whole);
    const int64_t skipped = std::max<int64_t>(want_.removal_from - i0, 0);
    for (int64_t j = j0; j < j1; j += kKeys) {
      const int64_t some = std::min(kKeys, j1 - j);
      alignas(kBytes) T apart[kKeys * panel];
      some == kKeys ? distances<kKeys>(packed, j, apart) : distances_of(some, packed, j, apart);
      for (int64_t k = 0; k < some; ++k) {
        const T* row = weights + (j + k - j0) * panel;
        T* sums = tile + (j + k - j0) * panel;
        for (int64_t x = skipped; x < panel; ++x) {
          const T w = row[x], left = T(1) - w, ratio = w / (left < kAlone ? T(1) : left);
          const T change = left < kAlone ? whole[x] : ratio * ratio * apart[k * panel + x];
          sums[x] += w == 0 ? T(0) : change;
        }
      }
    }
  }

  // The outputs of a panel by feature, and their squared lengths. They are in the precision of sums: who asks for this
  // has the output written so.
  void read_output(int64_t i0, int64_t i1, T* whole) {
    std::fill(whole, whole + panel, T(0));
    std::fill(output_.begin(), output_.end(), T(0));
    for (int64_t i = i0; i < i1; ++i) {
      const char* row = call_.out.at(b_, h_) + i * call_.out.row;
      for (int64_t c = 0; c < call_.width; ++c) {
        const T number = *reinterpret_cast<const T*>(row + c * call_.out.col);
        output_[c * panel + (i - i0)] = number;
        whole[i - i0] += number * number;
      }
    }
  }

  // ‖v − o‖² of some keys from `j` on, for each query of a panel: as a difference feature by feature, since v may be nearly o.
  template <int some> void distances(const Packed<T>& packed, int64_t j, T* apart) const {
    Vec<T> sums[some * kVecs] = {};
    for (int64_t c = 0; c < call_.width; ++c) {
      const T* v = packed.v.data() + c / kRows * packed.value_stride + packed.at(j) * kRows + c % kRows;
      Vec<T> o[kVecs];
      for (int x = 0; x < kVecs; ++x) o[x] = load<T>(output_.data() + c * panel + x * lanes);
      for (int k = 0; k < some; ++k)
        for (int x = 0; x < kVecs; ++x) {
          const Vec<T> between = all<T>(v[k * kRows]) - o[x];
          sums[k * kVecs + x] += between * between;
        }
    }
    for (int n = 0; n < some * kVecs; ++n) store<T>(apart + n * lanes, sums[n]);
  }

  void distances_of(int64_t some, const Packed<T>& packed, int64_t j, T* apart) const {
    for (int64_t k = 0; k < some; ++k) distances<1>(packed, j + k, apart + k * panel);
  }

  const Call& call_;
  const SoughtByKey& want_;
  const int64_t b_, h_;
  bool spoiled_ = false;
  Kept weighted_, most_, removal_;
  Buffer<T> output_;  // [feature][query of a panel]
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
