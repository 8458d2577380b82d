// Gradients, the weights recomputed by tile: dq, dk and dv of the queries of one key head and some of its keys.
//
//   weights  = 2^(scores − peak) / total          dvalue = weightsᵀ · dout
//   dweights = dout · vᵀ                          dscore = weights · (dweights − spread), spread = Σ dout · output − dlse
//   dq = scale · dscore · k                       dk = scale · dscoreᵀ · q
//
// Everything is transposed, as in the forward pass: a tile is [key][query], gradients are [feature][query] and
// [feature][key]. Three of the products read the tile so; the two that sum over queries (dk, dv) read it turned.
#pragma once
#include "forward.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kBackTile = 192;  // keys in a tile: whole blocks and whole panels, in every instruction set
constexpr int64_t kTogether = 8;    // panels of queries over which dk and dv are summed at once
static_assert(kBackTile <= kTile);  // the scorer remembers what was allowed in a tile of at most that many keys

// A panel of queries: packed, with what the softmax knows of each.
template <class T> struct Asking {
  Buffer<T> q, dout;  // [feature][query]
  Rows<T> rows;
  alignas(64) T spread[kPanel<T>];
  int64_t first = 0, last = 0;
  Stretches seen;            // the keys that any of them may see
  uint8_t odd[kPanel<T>];    // for each: the query or its gradient holds a number that is not finite
  bool spoiled = false;      // something of some query is not finite
};

// One range of keys and what is gathered for them.
template <class T> class Backward {
 public:
  static constexpr int panel = kPanel<T>;
  static constexpr int64_t kGrain = std::lcm(kRows, panel);  // whole blocks and whole panels
  static_assert(kBackTile % kGrain == 0);

  // Room for a call; what an earlier one left is used again.
  void begin(const Call& call, const Sights& sights) {
    call_ = &call, sights_ = &sights;
    features_ = rounded(call.features, kRows);
    width_ = rounded(call.width, kRows);
    asking_.resize(kTogether);
    for (auto* tile : {&weights_, &dweights_, &raw_}) tile->resize((kBackTile + kRows) * panel);
    for (auto& panel_of : asking_) {
      panel_of.q.resize(panel * call.features);
      panel_of.dout.resize(panel * call.width);
    }
    for (auto* turned : {&turned_weights_, &turned_dscores_}) turned->resize(kBackTile * kTogether * panel);
    scratch_.resize(std::max(panel, kRows) * std::max(call.features, call.width));
    output_.resize(panel * call.width);
    q_columns_.resize(kTogether * panel * features_);
    dout_columns_.resize(kTogether * panel * width_);
  }

  // Room for dq of one head: [query panel][feature][query].
  static int64_t room(const Call& call) { return rounded(call.queries, panel) * rounded(call.features, kRows); }

  // The memory that grows with the keys: packed keys (twice) and values, and their gradients; and dq where it was kept here.
  int64_t bytes() const {
    return int64_t((k_.size() + v_.size() + k_columns_.size() + dk_.size() + dv_.size() + dq_.size()) * sizeof(T));
  }

  // All keys of one key head, and the dq of its group written too.
  void head(int64_t b, int64_t head) {
    const int64_t group = call_->group(), size = room(*call_);
    dq_.assign(group * size, T(0));
    keys(b, head, 0, call_->keys, dq_.data());
    for (int64_t g = 0; g < group; ++g) write_queries(dq_.data() + g * size, b, head * group + g, 0, call_->queries);
  }

  // The finished dq of queries [first, last) of a head.
  void write_queries(const T* dq, int64_t b, int64_t h, int64_t first, int64_t last) {
    write(dq, features_, call_->features, T(call_->scale), call_->dq, b, h, first, last);
  }

  // Keys [first, last) of one key head against all queries of its group. `dq` has room for each head of the group; it is
  // added to, and belongs to this call alone.
  void keys(int64_t b, int64_t head, int64_t first, int64_t last, T* dq) {
    pack_keys(b, head, first, last);
    const int64_t count = last - first;
    dk_.assign(rounded(count, panel) * features_, T(0));
    dv_.assign(rounded(count, panel) * width_, T(0));
    for (int64_t g = 0; g < call_->group(); ++g) {
      const int64_t h = head * call_->group() + g;
      Scorer<T> scorer(*call_, b, h);
      for (int64_t i0 = 0; i0 < call_->queries; i0 += kTogether * panel)
        queries(scorer, b, h, i0, first, last, dq + g * room(*call_));
    }
    write(dk_.data(), features_, call_->features, T(call_->scale), call_->dk, b, head, first, last);
    write(dv_.data(), width_, call_->width, T(1), call_->dv, b, head, first, last);
  }

  // [panel][column][row] times a factor, into the rows [first, last) of a view.
  void write(const T* sums, int64_t padded, int64_t columns, T factor, const View& view, int64_t b, int64_t head,
             int64_t first, int64_t last) {
    T factors[kPanel<T>];
    std::fill(factors, factors + panel, factor);
    for (int64_t i = first; i < last; i += panel) {
      if ((i - first) % kBackTile == 0) call_->stop.check();
      unpack_rows<T>(sums + (i - first) * padded, panel, std::min<int64_t>(panel, last - i), columns, factors,
                     scratch_.data(), view, b, head, i);
    }
  }

 private:
  void pack_keys(int64_t b, int64_t head, int64_t first, int64_t last) {
    const int64_t count = last - first, padded = rounded(count, kRows);
    odd_.assign(count, 0);
    k_.resize(padded * call_->features);       // [key block][feature][kRows]: for scores
    v_.resize(padded * call_->width);          // [key block][width][kRows]: for dweights
    k_columns_.resize(features_ * count);     // [feature block][key][kRows]: for dq
    for (int64_t at = 0; at < count; at += kBackTile) {
      const int64_t many = std::min(kBackTile, count - at);
      uint8_t* odd = odd_.data() + at;
      call_->stop.check();
      pack_rows<T>(call_->k, b, head, first + at, many, call_->features, kRows, scratch_.data(), k_.data() + at * call_->features, odd);
      pack_rows<T>(call_->v, b, head, first + at, many, call_->width, kRows, scratch_.data(), v_.data() + at * call_->width, odd);
      pack_columns<T>(call_->k, b, head, first + at, many, call_->features, count * kRows, scratch_.data(), k_columns_.data() + at * kRows);
    }
  }

  // Some panels of queries from i0 on, against keys [first, last).
  void queries(Scorer<T>& scorer, int64_t b, int64_t h, int64_t i0, int64_t first, int64_t last, T* dq) {
    const int64_t i1 = std::min(i0 + kTogether * panel, call_->queries);
    const int64_t panels = (i1 - i0 + panel - 1) / panel;
    bool some = false;
    for (int64_t p = 0; p < panels; ++p) {
      Stretches& seen = asking_[p].seen;
      sights_->see(b, h, i0 + p * panel, std::min(i0 + (p + 1) * panel, i1), seen);
      seen.each(first, last, [&](int64_t, int64_t) { some = true; });
    }
    if (!some) return;
    bool alive = false;
    for (int64_t p = 0; p < panels; ++p)
      alive = load_queries(b, h, i0 + p * panel, std::min(i0 + (p + 1) * panel, i1), p) || alive;
    if (!alive) return;
    for (int64_t j0 = first; j0 < last; j0 += kBackTile) {
      call_->stop.check();
      tile(scorer, panels, first, j0, std::min(j0 + kBackTile, last), dq + i0 * features_);
    }
  }

  // Queries [i0, i1) and their output gradients, zero for rows that attend to nothing; false where that is all of them.
  bool load_queries(int64_t b, int64_t h, int64_t i0, int64_t i1, int64_t place) {
    Asking<T>& ask = asking_[place];
    const int64_t at = call_->row_of(b, h), count = i1 - i0, stride = kTogether * panel * kRows;
    T* const q_columns = q_columns_.data() + place * panel * kRows;
    T* const dout_columns = dout_columns_.data() + place * panel * kRows;
    std::fill_n(ask.odd, panel, uint8_t(0));
    pack_rows<T>(call_->q, b, h, i0, count, call_->features, panel, scratch_.data(), ask.q.data(), ask.odd);
    pack_rows<T>(call_->dout, b, h, i0, count, call_->width, panel, scratch_.data(), ask.dout.data(), ask.odd);
    pack_rows<T>(call_->out, b, h, i0, count, call_->width, panel, scratch_.data(), output_.data());
    pack_columns<T>(call_->q, b, h, i0, count, call_->features, stride, scratch_.data(), q_columns);
    pack_columns<T>(call_->dout, b, h, i0, count, call_->width, stride, scratch_.data(), dout_columns);
    ask.rows = Rows<T>();
    ask.first = i0, ask.last = i1;
    bool alive = false;
    for (int lane = 0; lane < panel; ++lane) {
      const T total = lane < count ? static_cast<const T*>(call_->total)[at + i0 + lane] : T(0);
      if (total == 0) {
        blank(ask.q.data(), call_->features, q_columns, features_, lane);
        blank(ask.dout.data(), call_->width, dout_columns, width_, lane);
        for (int64_t c = 0; c < call_->width; ++c) output_[c * panel + lane] = 0;
        ask.odd[lane] = 0;
        continue;
      }
      ask.rows.largest[lane] = static_cast<const T*>(call_->peak)[at + i0 + lane];
      ask.rows.total[lane] = total;
      alive = true;
    }
    for (int x = 0; x < panel; x += kLanes<T>) {
      Vec<T> spread{};
      for (int64_t c = 0; c < call_->width; ++c)
        spread += load<T>(output_.data() + c * panel + x) * load<T>(ask.dout.data() + c * panel + x);
      store<T>(ask.spread + x, spread);
    }
    if (call_->dlse)
      for (int64_t lane = 0; lane < count; ++lane)
        if (ask.rows.total[lane] != 0) ask.spread[lane] -= static_cast<const T*>(call_->dlse)[at + i0 + lane];
    ask.spoiled = ask.rows.spoiled();
    for (int lane = 0; lane < panel; ++lane) {
      ask.spoiled = ask.spoiled || ask.odd[lane] || is_odd(ask.spread + lane, 1);
      if (!ask.odd[lane]) continue;  // those that are not finite are added to dk and dv by `add_odd`, key by key
      blank_columns(q_columns, features_, lane);
      blank_columns(dout_columns, width_, lane);
    }
    return alive;
  }

  // Zeros for one query of a panel, in both layouts.
  static void blank(T* rows, int64_t count, T* columns, int64_t padded, int lane) {
    for (int64_t c = 0; c < count; ++c) rows[c * panel + lane] = 0;
    blank_columns(columns, padded, lane);
  }

  static void blank_columns(T* columns, int64_t padded, int lane) {
    for (int64_t i = 0; i < padded / kRows; ++i)
      std::fill_n(columns + (i * kTogether * panel + lane) * kRows, kRows, T(0));
  }

  // Keys [j0, j1) against the panels: dq for each, dk and dv for all together. Each panel has only the keys it may see.
  void tile(Scorer<T>& scorer, int64_t panels, int64_t first, int64_t j0, int64_t j1, T* dq) {
    const int64_t count = j1 - j0, at = j0 - first;
    bool some = false;
    for (int64_t p = 0; p < panels; ++p) {
      Span& part = seen_[p] = {count, 0};  // from the first to the last key that it sees
      asking_[p].seen.each(j0, j1, [&](int64_t start, int64_t stop) {
        part = {std::min(part.low, (start - j0) / kGrain * kGrain), stop - j0};
      });
      some = some || part.low < part.high;
    }
    if (!some) return;
    for (int64_t p = 0; p < panels; ++p) {
      const auto [low, high] = seen_[p];
      if (low < high) {
        differentiate(scorer, asking_[p], first, j0 + low, j0 + high, dq + p * panel * features_);
        if (asking_[p].spoiled) add_odd(scorer, asking_[p], at + low, high - low);
      }
      turned(weights_.data(), count, p, turned_weights_.data());
      turned(dweights_.data(), count, p, turned_dscores_.data());
    }
    gather(turned_weights_.data(), count, panels, dout_columns_.data(), width_, dv_.data() + at * width_);
    gather(turned_dscores_.data(), count, panels, q_columns_.data(), features_, dk_.data() + at * features_);
  }

  // weights and dscores (in dweights_) of one panel, and its dq.
  void differentiate(Scorer<T>& scorer, const Asking<T>& ask, int64_t first, int64_t j0, int64_t j1, T* dq) {
    const int64_t count = j1 - j0, blocks = (count + kRows - 1) / kRows, at = j0 - first;
    const T* k = k_.data() + at * call_->features;
    const bool odd = std::any_of(odd_.begin() + at, odd_.begin() + at + count, [](uint8_t x) { return x; });
    scorer.remember = odd || ask.spoiled;
    scorer.score(ask.q.data(), k, ask.first, ask.last, j0, j1, ask.seen, weights_.data());
    if (call_->softcap != 0)
      product<T, false>(k, blocks, ask.q.data(), call_->features, call_->features * kRows, raw_.data());
    ask.rows.weigh(weights_.data(), count, scorer.units.factor);
    product<T, false>(v_.data() + at * call_->width, blocks, ask.dout.data(), call_->width, call_->width * kRows,
                      dweights_.data());
    dscores(scorer, ask, count);
    // dq[feature][query] += k[key][feature] · dscore[key][query]
    const int64_t queries = ask.last - ask.first, stride = int64_t(odd_.size()) * kRows;
    const T* columns = k_columns_.data() + at * kRows;
    if (!scorer.mixed || !odd) {
      product<T, true>(columns, features_ / kRows, dweights_.data(), count, stride, dq);
      return;
    }
    product<T, true>(blanked(scorer, queries, at, count), features_ / kRows, dweights_.data(), count, kBackTile * kRows, dq);
    for (int64_t j = 0; j < count; ++j) {  // keys that were left out go to those who see them, one by one
      const uint8_t* allowed = scorer.allowed() + j * panel;
      if (!odd_[at + j] || all_set(allowed, queries)) continue;
      for (int64_t x = 0; x < queries; ++x)
        for (int64_t c = 0; allowed[x] && c < call_->features; ++c)
          dq[c * panel + x] += columns[c / kRows * stride + j * kRows + c % kRows] * dweights_[j * panel + x];
    }
  }

  // dweights become dscores.
  void dscores(const Scorer<T>& scorer, const Asking<T>& ask, int64_t count) {
    for (int64_t k = 0; k < count; ++k)
      for (int x = 0; x < panel; x += kLanes<T>) {
        T* d = dweights_.data() + k * panel + x;
        store<T>(d, load<T>(weights_.data() + k * panel + x) * (load<T>(d) - load<T>(ask.spread + x)));
      }
    if (call_->softcap != 0) scorer.uncap(raw_.data(), count, dweights_.data());
    if (!scorer.mixed || !scorer.remember) return;
    scorer.clear(count, weights_.data());  // last: a masked weight is 0, and 0 times NaN is not
    scorer.clear(count, dweights_.data());
  }

  // What queries that are not finite add to dk and dv: only to keys that they see. Keys `at` … at + count of this range.
  void add_odd(const Scorer<T>& scorer, const Asking<T>& ask, int64_t at, int64_t count) {
    for (int64_t x = 0; x < ask.last - ask.first; ++x)
      for (int64_t k = 0; ask.odd[x] && k < count; ++k) {
        if (scorer.mixed && !scorer.allowed()[k * panel + x]) continue;
        const int64_t whole = (at + k) / panel * panel, lane = (at + k) % panel;
        for (int64_t c = 0; c < call_->features; ++c)
          dk_[whole * features_ + c * panel + lane] += dweights_[k * panel + x] * ask.q[c * panel + x];
        for (int64_t c = 0; c < call_->width; ++c)
          dv_[whole * width_ + c * panel + lane] += weights_[k * panel + x] * ask.dout[c * panel + x];
      }
  }

  // The keys of a tile with zeros for those that are not finite and not for all queries of the panel to see.
  const T* blanked(const Scorer<T>& scorer, int64_t queries, int64_t at, int64_t count) {
    clean_.resize(features_ * kBackTile);
    const int64_t all_keys = int64_t(odd_.size());
    for (int64_t j = 0; j < count; ++j) {
      const bool safe = !odd_[at + j] || all_set(scorer.allowed() + j * panel, queries);
      for (int64_t i = 0; i < features_ / kRows; ++i)
        for (int c = 0; c < kRows; ++c)
          clean_[(i * kBackTile + j) * kRows + c] = safe ? k_columns_[(i * all_keys + at + j) * kRows + c] : T(0);
    }
    return clean_.data();
  }

  // What a panel saw of a tile, [key][query] from `low` on, as [key panel][query of all panels][key] in its place; zeros for
  // the rest of the tile.
  void turned(const T* tile, int64_t count, int64_t place, T* out) {
    const auto [low, high] = seen_[place];
    const T* lines[kPanel<T>];
    for (int64_t j = 0; j < count; j += panel) {
      const int64_t real = j < low ? 0 : std::clamp<int64_t>(high - j, 0, panel);
      T* at = out + (j * kTogether + place * panel) * panel;
      if (real < panel) std::fill(at, at + panel * panel, T(0));
      for (int64_t r = 0; r < real; ++r) lines[r] = tile + (j - low + r) * panel;
      turn<T>(lines, real, panel, at, panel);
    }
  }

  // sums[feature][key] += columns[feature][query] · tile[query][key], over the panels that saw any of the keys.
  void gather(const T* tile, int64_t count, int64_t panels, const T* columns, int64_t padded, T* sums) {
    for (int64_t j = 0; j < count; j += panel) {
      int64_t from = panels, to = 0;
      for (int64_t p = 0; p < panels; ++p)
        if (seen_[p].low < j + panel && j < seen_[p].high) from = std::min(from, p), to = p + 1;
      if (from < to)
        product<T, true>(columns + from * panel * kRows, padded / kRows, tile + (j * kTogether + from * panel) * panel,
                         (to - from) * panel, kTogether * panel * kRows, sums + j * padded);
    }
  }

  const Call* call_ = nullptr;
  const Sights* sights_ = nullptr;
  int64_t features_ = 0, width_ = 0;  // rounded up to whole blocks
  std::vector<Asking<T>> asking_;
  Span seen_[kTogether];  // by each panel, of the tile
  Buffer<T> k_, v_, k_columns_, dq_, weights_, dweights_, raw_, dk_, dv_, turned_weights_, turned_dscores_, scratch_,
      output_, q_columns_, dout_columns_, clean_;
  std::vector<uint8_t> odd_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
