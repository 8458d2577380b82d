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
constexpr int64_t kTogether = 4;    // panels of queries over which dk and dv are summed at once

// A panel of queries: packed, with what the softmax knows of each.
template <class T> struct Asking {
  std::vector<T> q, dout, dq;  // [feature][query]
  Rows<T> rows;
  alignas(64) T spread[kPanel<T>];
  int64_t first = 0, last = 0;
  bool some = false;  // dq holds something
};

// One range of keys and what is gathered for them.
template <class T> class Backward {
 public:
  static constexpr int panel = kPanel<T>;

  Backward(const Call& call) : call_(call), features_(rounded(call.features, kRows)), asking_(kTogether) {
    for (auto* tile : {&weights_, &dweights_, &raw_}) tile->resize((kBackTile + kRows) * panel);
    for (auto& panel_of : asking_) {
      panel_of.q.resize(panel * call.features);
      panel_of.dout.resize(panel * call.width);
      panel_of.dq.resize(panel * features_);
    }
    for (auto* turned : {&turned_weights_, &turned_dscores_}) turned->resize(rounded(kBackTile, kRows) * kTogether * panel);
    scratch_.resize(panel * std::max(call.features, call.width));
    q_rows_.resize(kTogether * panel * rounded(call.features, panel));
    dout_rows_.resize(kTogether * panel * rounded(call.width, panel));
  }

  // The memory for one range of keys: packed keys (twice) and values, and their gradients.
  static int64_t bytes(const Call& call, int64_t keys) {
    return (3 * rounded(call.features, panel) + 2 * rounded(call.width, panel)) * std::min(keys, call.keys) * int64_t(sizeof(T));
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
      for (int64_t i0 = 0; i0 < call_.queries; i0 += kTogether * panel)
        queries(scorer, b, h, i0, first, last, dq + g * call_.queries * call_.features);
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
    pack_rows<T>(call_.k, b, head, first, count, call_.features, kRows, scratch_.data(), k_.data(), odd_.data());
    pack_rows<T>(call_.v, b, head, first, count, call_.width, kRows, scratch_.data(), v_.data(), odd_.data());
    pack_columns<T>(call_.k, b, head, first, count, call_.features, count * kRows, scratch_.data(), k_columns_.data());
    any_odd_ = std::any_of(odd_.begin(), odd_.end(), [](uint8_t x) { return x; });
  }

  // Some panels of queries from i0 on, against keys [first, last).
  void queries(Scorer<T>& scorer, int64_t b, int64_t h, int64_t i0, int64_t first, int64_t last, T* dq) {
    const int64_t i1 = std::min(i0 + kTogether * panel, call_.queries);
    const Span span = scorer.mask.span(i0, i1);
    if (span.low >= last || span.high <= first) return;
    const int64_t panels = (i1 - i0 + panel - 1) / panel;
    bool alive = false;
    for (int64_t p = 0; p < panels; ++p)
      alive = load_queries(b, h, i0 + p * panel, std::min(i0 + (p + 1) * panel, i1), p) || alive;
    if (!alive) return;
    for (int64_t j0 = first; j0 < last; j0 += kBackTile) {
      const int64_t j1 = std::min({j0 + kBackTile, last, span.high});
      if (j0 < j1 && span.low < j0 + kBackTile) tile(scorer, panels, first, j0, j1);
    }
    const T scale = T(call_.scale);
    for (int64_t p = 0; p < panels; ++p) {
      const Asking<T>& ask = asking_[p];
      if (!ask.some) continue;
      for (int64_t i = ask.first; i < ask.last; ++i)
        for (int64_t c = 0; c < call_.features; ++c) dq[i * call_.features + c] += scale * ask.dq[c * panel + (i - ask.first)];
    }
  }

  // Queries [i0, i1) and their output gradients, zero for rows that attend to nothing; false where that is all of them.
  bool load_queries(int64_t b, int64_t h, int64_t i0, int64_t i1, int64_t place) {
    Asking<T>& ask = asking_[place];
    const int64_t at = call_.row_of(b, h);
    bool alive = false;
    pack_rows<T>(call_.q, b, h, i0, i1 - i0, call_.features, panel, scratch_.data(), ask.q.data());
    pack_rows<T>(call_.dout, b, h, i0, i1 - i0, call_.width, panel, scratch_.data(), ask.dout.data());
    ask.rows = Rows<T>();
    ask.first = i0, ask.last = i1, ask.some = false;
    std::fill(ask.dq.begin(), ask.dq.end(), T(0));
    for (int lane = 0; lane < panel; ++lane) {
      const int64_t i = i0 + lane;
      ask.spread[lane] = 0;
      const bool here = i < i1 && static_cast<const T*>(call_.total)[at + i] != 0;
      ask.rows.largest[lane] = here ? static_cast<const T*>(call_.peak)[at + i] : Rows<T>::none;
      ask.rows.total[lane] = here ? static_cast<const T*>(call_.total)[at + i] : T(0);
      alive = alive || here;
      if (i < i1 && !here) {
        for (int64_t c = 0; c < call_.features; ++c) ask.q[c * panel + lane] = 0;
        for (int64_t c = 0; c < call_.width; ++c) ask.dout[c * panel + lane] = 0;
      }
      if (!here) continue;
      const T* output;
      point_to_rows<T>(call_.out, b, h, i, 1, call_.width, scratch_.data(), &output);
      for (int64_t c = 0; c < call_.width; ++c) ask.spread[lane] += output[c] * ask.dout[c * panel + lane];
    }
    untangle(ask.q.data(), call_.features, place, q_rows_.data());
    untangle(ask.dout.data(), call_.width, place, dout_rows_.data());
    return alive;
  }

  // [column][query] to [column panel][query of all panels][column in panel], columns past the end zero.
  void untangle(const T* in, int64_t columns, int64_t place, T* out) {
    const T* rows[kPanel<T>];
    for (int64_t c = 0; c < columns; c += panel) {
      const int64_t count = std::min<int64_t>(panel, columns - c);
      T* at = out + (c * kTogether + place * panel) * panel;
      if (count < panel) std::fill(at, at + panel * panel, T(0));
      for (int64_t x = 0; x < count; ++x) rows[x] = in + (c + x) * panel;
      turn<T>(rows, count, panel, at, panel);
    }
  }

  // Keys [j0, j1) against the panels: dq for each, dk and dv for all together.
  void tile(Scorer<T>& scorer, int64_t panels, int64_t first, int64_t j0, int64_t j1) {
    const int64_t count = j1 - j0, at = j0 - first;
    bool some = false;
    for (int64_t p = 0; p < panels; ++p) {
      const bool seen = differentiate(scorer, asking_[p], first, j0, j1);
      some = some || seen;
      turned(seen ? weights_.data() : nullptr, count, p, turned_weights_.data());
      turned(seen ? dweights_.data() : nullptr, count, p, turned_dscores_.data());
    }
    if (!some) return;
    gather(turned_weights_.data(), count, panels, dout_rows_.data(), call_.width, dv_.data(), at);
    gather(turned_dscores_.data(), count, panels, q_rows_.data(), call_.features, dk_.data(), at);
  }

  // weights and dscores (in dweights_) of one panel, and its dq; false where it may see none of the keys.
  bool differentiate(Scorer<T>& scorer, Asking<T>& ask, int64_t first, int64_t j0, int64_t j1) {
    const int64_t count = j1 - j0, blocks = (count + kRows - 1) / kRows, at = j0 - first;
    const T* k = k_.data() + at * call_.features;
    if (!scorer.score(ask.q.data(), k, ask.first, ask.last, j0, j1, weights_.data())) return false;
    if (call_.softcap != 0)
      product<T, false>(k, blocks, ask.q.data(), call_.features, call_.features * kRows, raw_.data());
    ask.rows.weigh(weights_.data(), count, scorer.units.factor);
    product<T, false>(v_.data() + at * call_.width, blocks, ask.dout.data(), call_.width, call_.width * kRows,
                      dweights_.data());
    const bool clean = scorer.mixed && any_odd_;
    dscores(scorer, ask, count, clean);
    // dq[feature][query] += k[key][feature] · dscore[key][query]
    const T* columns = clean ? blanked(scorer, at, count) : k_columns_.data() + at * kRows;
    const int64_t stride = clean ? kBackTile * kRows : int64_t(odd_.size()) * kRows;
    product<T, true>(columns, features_ / kRows, dweights_.data(), count, stride, ask.dq.data());
    ask.some = true;
    return true;
  }

  // dweights become dscores.
  void dscores(const Scorer<T>& scorer, const Asking<T>& ask, int64_t count, bool clean) {
    for (int64_t k = 0; k < count; ++k)
      for (int x = 0; x < panel; x += kLanes<T>) {
        T* d = dweights_.data() + k * panel + x;
        store<T>(d, load<T>(weights_.data() + k * panel + x) * (load<T>(d) - load<T>(ask.spread + x)));
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

  // A tile [key][query] as [key block][query of all panels][kRows], the place of one panel in it; zeros for no tile.
  void turned(const T* tile, int64_t count, int64_t place, T* out) {
    const T* lines[kRows];
    for (int64_t i = 0; i * kRows < count; ++i) {
      const int64_t real = std::min<int64_t>(kRows, count - i * kRows);
      T* at = out + (i * kTogether + place) * panel * kRows;
      if (!tile || real < kRows) std::fill(at, at + kRows * panel, T(0));
      if (!tile) continue;
      for (int64_t r = 0; r < real; ++r) lines[r] = tile + (i * kRows + r) * panel;
      turn<T>(lines, real, panel, at, kRows);
    }
  }

  // sums[key][column] += tile[key][query] · rows[query][column], over the queries of all panels; sums are
  // [column panel][key][column in panel].
  void gather(const T* tile, int64_t count, int64_t panels, const T* rows, int64_t columns, T* sums, int64_t at) {
    const int64_t blocks = (count + kRows - 1) / kRows, all_keys = rounded(int64_t(odd_.size()), kRows);
    for (int64_t c = 0; c * panel < columns; ++c)
      product<T, true>(tile, blocks, rows + c * panel * kTogether * panel, panels * panel, kTogether * panel * kRows,
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
  const int64_t features_;
  std::vector<Asking<T>> asking_;
  std::vector<T> k_, v_, k_columns_, weights_, dweights_, raw_, dk_, dv_, turned_weights_, turned_dscores_, scratch_, q_rows_,
      dout_rows_, clean_;
  std::vector<uint8_t> odd_;
  bool any_odd_ = false;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
