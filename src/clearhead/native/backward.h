// Gradients, the weights recomputed by tile: dq, dk and dv of the queries of one key head and some of its keys.
//
//   weights  = 2^(scores − peak) / total          dvalue = weightsᵀ · dout
//   dweights = dout · vᵀ                          dscore = weights · (dweights − spread), spread = Σ dout · output
//   dq = scale · dscore · k                       dk = scale · dscoreᵀ · q
//
// Everything is transposed, as in the forward pass: a tile is [key][query]. Four of the products read it so; the two that
// sum over queries (dk, dv) read it turned.
#pragma once
#include "forward.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kBackTile = 128;  // keys in a tile

// One block of keys and what is gathered for them.
template <class T> class Backward {
 public:
  static constexpr int panel = kPanel<T>;

  Backward(const Call& call)
      : call_(call), features_(rounded(call.features, kRows)), width_(rounded(call.width, kRows)), work_(call) {
    const int64_t rows = rounded(kBackTile, panel);
    for (auto* tile : {&weights_, &dweights_, &raw_}) tile->resize((kBackTile + kRows) * panel);
    dout_.resize(panel * call.width);
    dq_.resize(panel * features_);
    turned_.resize(rounded(panel, kRows) * rows * 2);
    scratch_.resize(panel * std::max(call.features, call.width) + features_ + width_);
    q_rows_.resize(panel * rounded(call.features, panel));
    dout_rows_.resize(panel * rounded(call.width, panel));
  }

  // Keys [first, last) of one key head against all queries of its group. `dq` (heads of the group, T, features) is added
  // to; it belongs to this call alone.
  void keys(int64_t b, int64_t head, int64_t first, int64_t last, T* dq) {
    pack_keys(b, head, first, last);
    const int64_t count = last - first;
    dk_.assign(rounded(count, kRows) * rounded(call_.features, panel), T(0));
    dv_.assign(rounded(count, kRows) * rounded(call_.width, panel), T(0));
    for (int64_t g = 0; g < call_.group(); ++g) {
      const int64_t h = head * call_.group() + g;
      Scorer<T> scorer(call_, b, h);
      scorer.remember = any_odd_;
      for (int64_t i0 = 0; i0 < call_.queries; i0 += panel)
        queries(scorer, b, h, i0, std::min(i0 + panel, call_.queries), first, last, dq + g * call_.queries * call_.features);
    }
    write_rows(dk_.data(), call_.features, count, T(call_.scale), call_.dk, b, head, first);
    write_rows(dv_.data(), call_.width, count, T(1), call_.dv, b, head, first);
  }

 private:
  void pack_keys(int64_t b, int64_t head, int64_t first, int64_t last) {
    const int64_t count = last - first, padded = rounded(count, kRows);
    odd_.assign(count, 0);
    k_.resize(padded * call_.features);       // [key block][feature][kRows]: for scores
    v_.resize(padded * call_.width);          // [key block][width][kRows]: for dweights
    k_columns_.resize(features_ * count);     // [feature block][key][kRows]: for dq
    pack_rows<T>(call_.k, b, head, first, count, call_.features, kRows, work_.scratch.data(), k_.data(), odd_.data());
    pack_rows<T>(call_.v, b, head, first, count, call_.width, kRows, work_.scratch.data(), v_.data(), odd_.data());
    pack_columns<T>(call_.k, b, head, first, count, call_.features, count * kRows, work_.scratch.data(), k_columns_.data());
    any_odd_ = std::any_of(odd_.begin(), odd_.end(), [](uint8_t x) { return x; });
  }

  void queries(Scorer<T>& scorer, int64_t b, int64_t h, int64_t i0, int64_t i1, int64_t first, int64_t last, T* dq) {
    const Span span = scorer.mask.span(i0, i1);
    if (span.low >= last || span.high <= first) return;
    if (!load_queries(b, h, i0, i1)) return;
    std::fill(dq_.begin(), dq_.end(), T(0));
    bool some = false;
    for (int64_t j0 = first; j0 < last; j0 += kBackTile) {
      const int64_t j1 = std::min({j0 + kBackTile, last, span.high});
      if (j0 >= j1 || span.low >= j0 + kBackTile) continue;
      some = tile(scorer, i0, i1, first, j0, j1) || some;
    }
    if (!some) return;
    const T scale = T(call_.scale);
    for (int64_t i = i0; i < i1; ++i)
      for (int64_t c = 0; c < call_.features; ++c) dq[i * call_.features + c] += scale * dq_[c * panel + (i - i0)];
  }

  // The panel's queries and output gradients, zero for rows that attend to nothing; false where that is all of them.
  bool load_queries(int64_t b, int64_t h, int64_t i0, int64_t i1) {
    const int64_t at = call_.row_of(b, h);
    bool alive = false;
    pack_rows<T>(call_.q, b, h, i0, i1 - i0, call_.features, panel, work_.scratch.data(), work_.q.data());
    pack_rows<T>(call_.dout, b, h, i0, i1 - i0, call_.width, panel, work_.scratch.data(), dout_.data());
    std::vector<T>& output = scratch_;
    rows_ = Rows<T>();
    for (int lane = 0; lane < panel; ++lane) {
      const int64_t i = i0 + lane;
      spread_[lane] = 0;
      const bool here = i < i1 && static_cast<const T*>(call_.total)[at + i] != 0;
      rows_.largest[lane] = here ? static_cast<const T*>(call_.peak)[at + i] : Rows<T>::none;
      rows_.total[lane] = here ? static_cast<const T*>(call_.total)[at + i] : T(0);
      alive = alive || here;
      if (i < i1 && !here) {
        for (int64_t c = 0; c < call_.features; ++c) work_.q[c * panel + lane] = 0;
        for (int64_t c = 0; c < call_.width; ++c) dout_[c * panel + lane] = 0;
      }
      if (!here) continue;
      read_row<T>(call_.out.at(b, h) + i * call_.out.row, call_.out.type, call_.out.col, call_.width, output.data());
      for (int64_t c = 0; c < call_.width; ++c) spread_[lane] += output[c] * dout_[c * panel + lane];
    }
    if (alive) {
      untangle(work_.q.data(), call_.features, q_rows_.data());
      untangle(dout_.data(), call_.width, dout_rows_.data());
    }
    return alive;
  }

  // [column][query] to panels of columns: [column panel][query][column in panel], columns past the end zero.
  void untangle(const T* in, int64_t columns, T* out) {
    std::fill(out, out + rounded(columns, panel) * panel, T(0));
    const T* rows[kPanel<T>];
    for (int64_t c = 0; c < columns; c += panel) {
      const int64_t count = std::min<int64_t>(panel, columns - c);
      for (int64_t x = 0; x < count; ++x) rows[x] = in + (c + x) * panel;
      turn<T>(rows, count, panel, out + c * panel, panel);
    }
  }

  bool tile(Scorer<T>& scorer, int64_t i0, int64_t i1, int64_t first, int64_t j0, int64_t j1) {
    const int64_t count = j1 - j0, blocks = (count + kRows - 1) / kRows, at = j0 - first;
    const T* k = k_.data() + at * call_.features;
    if (!scorer.score(work_.q.data(), k, i0, i1, j0, j1, weights_.data())) return false;
    if (call_.softcap != 0)
      product<T, false>(k, blocks, work_.q.data(), call_.features, call_.features * kRows, raw_.data());
    rows_.weigh(weights_.data(), count, scorer.units.factor);
    product<T, false>(v_.data() + at * call_.width, blocks, dout_.data(), call_.width, call_.width * kRows, dweights_.data());
    const bool clean = scorer.mixed && any_odd_;
    differentiate(scorer, count, clean);

    // dq[feature][query] += k[key][feature] · dscore[key][query]
    const T* columns = clean ? blanked(scorer, at, count) : k_columns_.data() + at * kRows;
    const int64_t stride = clean ? kBackTile * kRows : int64_t(odd_.size()) * kRows;
    product<T, true>(columns, features_ / kRows, dweights_.data(), count, stride, dq_.data());

    // dv[key][value] += weights[key][query] · dout[query][value], dk likewise: sums over the panel's queries
    gather(weights_.data(), count, dout_rows_.data(), call_.width, dv_.data(), at);
    gather(dweights_.data(), count, q_rows_.data(), call_.features, dk_.data(), at);
    return true;
  }

  // dweights become dscores.
  void differentiate(const Scorer<T>& scorer, int64_t count, bool clean) {
    for (int64_t k = 0; k < count; ++k)
      for (int x = 0; x < panel; x += kLanes<T>) {
        T* d = &dweights_[k * panel + x];
        store<T>(d, load<T>(&weights_[k * panel + x]) * (load<T>(d) - load<T>(spread_ + x)));
      }
    if (clean)  // a masked weight is 0, and 0 times NaN is not
      for (int64_t x = 0; x < count * panel; ++x)
        if (!scorer.allowed()[x]) weights_[x] = dweights_[x] = 0;
    if (call_.softcap != 0) scorer.uncap(raw_.data(), count, dweights_.data());
  }

  // The keys of a tile with zeros for those that no query of the panel may see.
  const T* blanked(const Scorer<T>& scorer, int64_t at, int64_t count) {
    clean_.resize(features_ * kBackTile);
    const int64_t all_keys = int64_t(odd_.size());
    for (int64_t j = 0; j < count; ++j) {
      const uint8_t* allowed = scorer.allowed() + j * panel;
      const bool seen = std::any_of(allowed, allowed + panel, [](uint8_t a) { return a; });
      for (int64_t i = 0; i < features_ / kRows; ++i)
        for (int c = 0; c < kRows; ++c)
          clean_[(i * kBackTile + j) * kRows + c] = seen ? k_columns_[(i * all_keys + at + j) * kRows + c] : T(0);
    }
    return clean_.data();
  }

  // sums[key][column] += tile[key][query] · rows[query][column]; sums are [column panel][key][column in panel].
  void gather(const T* tile, int64_t count, const T* rows, int64_t columns, T* sums, int64_t at) {
    // the tile turned: [key block][query][kRows]
    const int64_t blocks = (count + kRows - 1) / kRows, all_keys = rounded(int64_t(odd_.size()), kRows);
    const T* lines[kRows];
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t real = std::min<int64_t>(kRows, count - i * kRows);
      T* out = turned_.data() + i * kRows * panel;
      if (real < kRows) std::fill(out, out + kRows * panel, T(0));
      for (int64_t r = 0; r < real; ++r) lines[r] = tile + (i * kRows + r) * panel;
      turn<T>(lines, real, panel, out, kRows);
    }
    for (int64_t c = 0; c * panel < columns; ++c)
      product<T, true>(turned_.data(), blocks, rows + c * panel * panel, panel, panel * kRows,
                       sums + (c * all_keys + at) * panel);
  }

  void write_rows(const T* sums, int64_t columns, int64_t count, T factor, const View& view, int64_t b, int64_t head,
                  int64_t first) {
    const int64_t all_keys = rounded(count, kRows);
    for (int64_t j = 0; j < count; ++j) {
      char* out = view.at(b, head) + (first + j) * view.row;
      for (int64_t c = 0; c < columns; ++c)
        write<T>(out + c * view.col, view.type, factor * sums[(c / panel * all_keys + j) * panel + c % panel]);
    }
  }

  const Call& call_;
  const int64_t features_, width_;
  Workspace<T> work_;
  Rows<T> rows_;
  alignas(64) T spread_[kPanel<T>];
  std::vector<T> k_, v_, k_columns_, weights_, dweights_, raw_, dout_, dq_, dk_, dv_, turned_, scratch_, q_rows_, dout_rows_,
      clean_;
  std::vector<uint8_t> odd_;
  bool any_odd_ = false;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
