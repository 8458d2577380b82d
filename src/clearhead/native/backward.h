// Gradients, the weights recomputed by tile: dq, dk and dv of the queries of one key head and some of its keys.
//
//   weights  = 2^(scores − peak) / total          dvalue = weightsᵀ · dout
//   dweights = dout · vᵀ                          dscore = weights · (dweights − spread), spread = Σ dout · output − dlse
//   dq = scale · dscore · k                       dk = scale · dscoreᵀ · q
//
// Everything is transposed, as in the forward pass: a tile is [key][query], gradients are [feature][query] and
// [feature][key]. Three of the products read the tile so; the two that sum over queries (dk, dv) read it turned.
#pragma once
#include "asking.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// One range of keys and what is gathered for them.
template <class T> class Backward {
 public:
  static constexpr int panel = kPanel<T>;
  static_assert(kBackTile % kRows == 0);
  static_assert(kTogether <= 8);  // a bit of a byte for each panel

  // Room for a call; what an earlier one left is used again.
  void begin(const Call& call, const Sights& sights, const BackwardPanels<T>& panels) {
    call_ = &call, sights_ = &sights, panels_ = &panels;
    features_ = rounded(call.features, kRows);
    width_ = rounded(call.width, kRows);
    asking_.resize(kTogether);
    for (auto* tile : {&weights_, &dweights_, &raw_}) tile->resize((kBackTile + kRows) * panel);
    for (auto& panel_of : asking_) {
      panel_of.q.resize(panel * call.features);
      panel_of.dout.resize(panel * call.width);
    }
    who_.resize(panels.most);
    for (auto* turned : {&turned_weights_, &turned_dscores_}) turned->resize(panels.most * kTogether * panel * panel);
    scratch_.resize(std::max(panel, kRows) * std::max(call.features, call.width));
    output_.resize(panel * call.width);
    q_columns_.resize(kTogether * panel * features_);
    dout_columns_.resize(kTogether * panel * width_);
  }

  // The memory that grows with the keys: packed keys (twice) and values, and their gradients; and dq where it was kept here.
  int64_t bytes() const {
    return int64_t((k_.size() + v_.size() + k_columns_.size() + dk_.size() + dv_.size() + dq_.size()) * sizeof(T));
  }

  // All keys of one key head, and the dq of its group written too.
  void head(int64_t b, int64_t head) {
    const int64_t group = call_->group(), size = panels_->room(*call_);
    dq_.assign(group * size, T(0));
    keys(b, head, 0, call_->keys, dq_.data(), nullptr);
    for (int64_t g = 0; g < group; ++g) write_queries(dq_.data() + g * size, b, head * group + g, 0, panels_->queries.count());
  }

  // The finished dq of some panels of queries of a head.
  void write_queries(const T* dq, int64_t b, int64_t h, int64_t first, int64_t last) {
    write(dq, features_, call_->features, T(call_->scale), call_->dq, b, h, panels_->queries, first, last);
  }

  // Keys [first, last), whole tiles, of one key head against all queries of its group. `dq` has room for each head of the
  // group; it is added to, and belongs to this call alone. `touched`, if given, learns for each kTogether panels of queries
  // whether they see any of the keys: only then they have a dq here, zero before.
  void keys(int64_t b, int64_t head, int64_t first, int64_t last, T* dq, uint8_t* touched) {
    pack_keys(b, head, first, last);
    const Panels& all = panels_->keys;
    const int64_t begin = all.from(first), end = all.from(last), queries_of = panels_->queries.count();
    dk_.assign((end - begin) * panel * features_, T(0));
    dv_.assign((end - begin) * panel * width_, T(0));
    for (int64_t g = 0; g < call_->group(); ++g) {
      const int64_t h = head * call_->group() + g;
      Scorer<T> scorer(*call_, b, h);
      for (int64_t p = 0; p < queries_of; p += kTogether)
        queries(scorer, b, h, p, std::min(p + kTogether, queries_of), first, last, dq + g * panels_->room(*call_),
                touched ? touched++ : nullptr);
    }
    write(dk_.data(), features_, call_->features, T(call_->scale), call_->dk, b, head, all, begin, end);
    write(dv_.data(), width_, call_->width, T(1), call_->dv, b, head, all, begin, end);
  }

  // [panel][column][row] times a factor, into the rows of those panels of a view.
  void write(const T* sums, int64_t padded, int64_t columns, T factor, const View& view, int64_t b, int64_t head,
             const Panels& panels, int64_t first, int64_t last) {
    T factors[kPanel<T>];
    std::fill(factors, factors + panel, factor);
    for (int64_t n = first; n < last; ++n) {
      if ((n - first) % kTogether == 0) call_->stop.check();
      unpack_rows<T>(sums + (n - first) * panel * padded, panel, panels.length(n), columns, factors, scratch_.data(), view, b,
                     head, panels.first(n));
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

  // Some panels of queries, by their numbers, against keys [first, last).
  void queries(Scorer<T>& scorer, int64_t b, int64_t h, int64_t begin, int64_t end, int64_t first, int64_t last, T* dq,
               uint8_t* touched) {
    const int64_t panels = end - begin;
    T* const here = dq + begin * panel * features_;
    bool alive = false;
    for (int64_t p = 0, at = 0; p < panels; ++p) {
      Asking<T>& ask = asking_[p];
      ask.first = panels_->queries.first(begin + p), ask.last = panels_->queries.last(begin + p), ask.at = at;
      sights_->see(b, h, ask.first, ask.last, ask.seen);
      ask.alive = ask.seen.next(first) < last && load_queries(b, h, ask);
      alive = alive || ask.alive;
      at += ask.count();
    }
    if (touched) *touched = alive;
    if (!alive) return;
    if (touched) std::fill_n(here, panels * panel * features_, T(0));
    for (int64_t j0 = first; j0 < last; j0 += kBackTile) {
      call_->stop.check();
      tile(scorer, panels, first, j0, std::min(j0 + kBackTile, last), here);
    }
  }

  // A panel's queries and their output gradients, zero for rows that attend to nothing; false where that is all of them.
  bool load_queries(int64_t b, int64_t h, Asking<T>& ask) {
    const int64_t at = call_->row_of(b, h), i0 = ask.first, count = ask.count(), stride = kTogether * panel * kRows;
    T* const q_columns = q_columns_.data() + ask.at * kRows;
    T* const dout_columns = dout_columns_.data() + ask.at * kRows;
    std::fill_n(ask.odd, panel, uint8_t(0));
    pack_rows<T>(call_->q, b, h, i0, count, call_->features, panel, scratch_.data(), ask.q.data(), ask.odd);
    pack_rows<T>(call_->dout, b, h, i0, count, call_->width, panel, scratch_.data(), ask.dout.data(), ask.odd);
    pack_rows<T>(call_->out, b, h, i0, count, call_->width, panel, scratch_.data(), output_.data());
    pack_columns<T>(call_->q, b, h, i0, count, call_->features, stride, scratch_.data(), q_columns);
    pack_columns<T>(call_->dout, b, h, i0, count, call_->width, stride, scratch_.data(), dout_columns);
    ask.rows = Rows<T>();
    bool alive = false;
    for (int lane = 0; lane < count; ++lane) {
      const T total = static_cast<const T*>(call_->total)[at + i0 + lane];
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
    for (int lane = 0; lane < count; ++lane) {
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
    const int64_t begin = panels_->keys.from(j0), end = panels_->keys.from(j1), before = panels_->keys.from(first);
    std::fill_n(who_.begin(), end - begin, uint8_t(0));
    bool some = false;
    for (int64_t p = 0; p < panels; ++p) {
      Asking<T>& ask = asking_[p];
      if (!ask.alive || !find_runs(ask, j0, j1)) continue;
      some = true;
      differentiate(scorer, ask, first, dq + p * panel * features_);
      if (ask.spoiled)
        for (const Run& run : ask.runs) add_odd(scorer, ask, run, before);
      turn_runs(ask, uint8_t(1 << p), begin, end);
    }
    if (!some) return;
    gather(turned_weights_.data(), begin, end, dout_columns_.data(), width_, dv_.data() + (begin - before) * panel * width_);
    gather(turned_dscores_.data(), begin, end, q_columns_.data(), features_, dk_.data() + (begin - before) * panel * features_);
  }

  // What a panel sees of keys [j0, j1), where a tile starts; false for nothing.
  static bool find_runs(Asking<T>& ask, int64_t j0, int64_t j1) {
    ask.runs.clear();
    int64_t place = 0;
    ask.seen.each(j0, j1, [&](int64_t start, int64_t last) {
      const int64_t first = j0 + (start - j0) / kRows * kRows;
      ask.runs.push_back({start, first, last, place, false});
      place += last - first;
    });
    return place > 0;
  }

  // weights and dscores (in dweights_) of what one panel sees of a tile, run after run, and its dq.
  void differentiate(Scorer<T>& scorer, Asking<T>& ask, int64_t first, T* dq) {
    const int vecs = ask.vecs();
    const auto holds_odd = [&](const Run& run) {
      const auto from = odd_.begin();
      return std::any_of(from + (run.first - first), from + (run.last - first), [](uint8_t x) { return x; });
    };
    const bool odd = std::any_of(ask.runs.begin(), ask.runs.end(), holds_odd);
    scorer.remember = odd || ask.spoiled;
    for (Run& run : ask.runs) {
      const int64_t at = run.first - first, blocks = (run.last - run.first + kRows - 1) / kRows, place = run.place * panel;
      const T* k = k_.data() + at * call_->features;
      scorer.score(ask.q.data(), k, ask.first, ask.last, run.first, run.last, ask.seen, weights_.data() + place, vecs, run.place);
      run.mixed = scorer.mixed;
      if (call_->softcap != 0)
        product<T, false>(k, blocks, ask.q.data(), call_->features, call_->features * kRows, raw_.data() + place, vecs);
      product<T, false>(v_.data() + at * call_->width, blocks, ask.dout.data(), call_->width, call_->width * kRows,
                        dweights_.data() + place, vecs);
    }
    const int64_t count = ask.runs.back().place + ask.runs.back().last - ask.runs.back().first;
    ask.rows.weigh(weights_.data(), count, scorer.units.factor);
    dscores(scorer, ask, count);
    for (const Run& run : ask.runs) gather_queries(scorer, ask, run, run.first - first, odd && holds_odd(run), dq);
  }

  // dq[feature][query] += k[key][feature] · dscore[key][query], for the keys of a run, which are those from `at` on here.
  void gather_queries(const Scorer<T>& scorer, const Asking<T>& ask, const Run& run, int64_t at, bool odd, T* dq) {
    const int64_t count = run.last - run.first, stride = int64_t(odd_.size()) * kRows, queries = ask.count();
    const T* columns = k_columns_.data() + at * kRows;
    const T* const dscores = dweights_.data() + run.place * panel;
    if (!run.mixed || !odd) return product<T, true>(columns, features_ / kRows, dscores, count, stride, dq, ask.vecs());
    const uint8_t* const allow = scorer.allowed(run.place);
    product<T, true>(blanked(allow, queries, at, count), features_ / kRows, dscores, count, kBackTile * kRows, dq, ask.vecs());
    for (int64_t j = 0; j < count; ++j) {  // keys that were left out go to those who see them, one by one
      const uint8_t* allowed = allow + j * panel;
      if (!odd_[at + j] || all_set(allowed, queries)) continue;
      for (int64_t x = 0; x < queries; ++x)
        for (int64_t c = 0; allowed[x] && c < call_->features; ++c)
          dq[c * panel + x] += columns[c / kRows * stride + j * kRows + c % kRows] * dscores[j * panel + x];
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
    for (const Run& run : ask.runs) {
      if (!run.mixed || !scorer.remember) continue;
      for (T* pairs : {weights_.data(), dweights_.data()})  // last: a masked weight is 0, and 0 times NaN is not
        scorer.clear(run.last - run.first, pairs + run.place * panel, run.place);
    }
  }

  // What queries that are not finite add to dk and dv: only to keys that they see. `before` is the number of the first
  // panel of keys here.
  void add_odd(const Scorer<T>& scorer, const Asking<T>& ask, const Run& run, int64_t before) {
    const Panels& keys = panels_->keys;
    for (int64_t j = run.start, n = keys.from(run.start + 1) - 1; j < run.last; ++j) {
      while (keys.last(n) <= j) ++n;
      const int64_t place = (run.place + j - run.first) * panel, lane = j - keys.first(n);
      T* const dk = dk_.data() + (n - before) * panel * features_ + lane;
      T* const dv = dv_.data() + (n - before) * panel * width_ + lane;
      for (int64_t x = 0; x < ask.count(); ++x) {
        if (!ask.odd[x] || (run.mixed && !scorer.allowed()[place + x])) continue;
        for (int64_t c = 0; c < call_->features; ++c) dk[c * panel] += dweights_[place + x] * ask.q[c * panel + x];
        for (int64_t c = 0; c < call_->width; ++c) dv[c * panel] += weights_[place + x] * ask.dout[c * panel + x];
      }
    }
  }

  // The keys of a tile with zeros for those that are not finite and not for all queries of the panel to see.
  const T* blanked(const uint8_t* allowed, int64_t queries, int64_t at, int64_t count) {
    clean_.resize(features_ * kBackTile);
    const int64_t all_keys = int64_t(odd_.size());
    for (int64_t j = 0; j < count; ++j) {
      const bool safe = !odd_[at + j] || all_set(allowed + j * panel, queries);
      for (int64_t i = 0; i < features_ / kRows; ++i)
        for (int c = 0; c < kRows; ++c)
          clean_[(i * kBackTile + j) * kRows + c] = safe ? k_columns_[(i * all_keys + at + j) * kRows + c] : T(0);
    }
    return clean_.data();
  }

  // What a panel of queries saw of a tile, [key][query] side by side, as [key panel][query of all panels][key]; `bit` tells of
  // which panels of keys [begin, end) that was something, and zeros stand for their other keys.
  void turn_runs(const Asking<T>& ask, uint8_t bit, int64_t begin, int64_t end) {
    alignas(64) static constexpr T zeros[kPanel<T>] = {};
    const T *weights[kPanel<T>], *dscores[kPanel<T>];
    auto run = ask.runs.begin();
    for (int64_t n = begin; n < end; ++n) {
      const int64_t first = panels_->keys.first(n), last = panels_->keys.last(n);
      while (run != ask.runs.end() && run->last <= first) ++run;
      if (run == ask.runs.end()) return;
      if (run->start >= last) continue;
      who_[n - begin] |= bit;
      const int64_t lines = std::min<int64_t>(rounded(last - first, 4), panel);  // they are turned four by four
      std::fill_n(weights, lines, zeros), std::fill_n(dscores, lines, zeros);
      for (auto here = run; here != ask.runs.end() && here->start < last; ++here)
        for (int64_t j = std::max(first, here->start); j < std::min(last, here->last); ++j) {
          const int64_t place = (here->place + j - here->first) * panel;
          weights[j - first] = weights_.data() + place, dscores[j - first] = dweights_.data() + place;
        }
      const int64_t out = ((n - begin) * kTogether * panel + ask.at) * panel;
      turn<T>(weights, lines, ask.count(), turned_weights_.data() + out, panel);
      turn<T>(dscores, lines, ask.count(), turned_dscores_.data() + out, panel);
    }
  }

  // sums[feature][key] += columns[feature][query] · tile[query][key] for panels of keys [begin, end), over the panels of queries
  // that saw any of them.
  void gather(const T* tile, int64_t begin, int64_t end, const T* columns, int64_t padded, T* sums) {
    for (int64_t n = 0; n < end - begin; ++n, sums += panel * padded, tile += kTogether * panel * panel) {
      const int vecs = int((panels_->keys.length(begin + n) + kLanes<T> - 1) / kLanes<T>);
      for (int64_t from = 0, to; from < kTogether; from = to) {
        const auto sees = [&](int64_t p) { return p < kTogether && (who_[n] >> p & 1); };
        for (to = from + 1; sees(from) && sees(to);) ++to;
        if (!sees(from)) continue;
        const int64_t at = asking_[from].at, depth = asking_[to - 1].at + asking_[to - 1].count() - at;
        product<T, true>(columns + at * kRows, padded / kRows, tile + at * panel, depth, kTogether * panel * kRows, sums, vecs);
      }
    }
  }

  const Call* call_ = nullptr;
  const Sights* sights_ = nullptr;
  const BackwardPanels<T>* panels_ = nullptr;
  int64_t features_ = 0, width_ = 0;  // rounded up to whole blocks
  std::vector<Asking<T>> asking_;
  std::vector<uint8_t> who_;  // for each panel of a tile's keys: a bit for each panel of queries that sees some of them
  Buffer<T> k_, v_, k_columns_, dq_, weights_, dweights_, raw_, dk_, dv_, turned_weights_, turned_dscores_, scratch_,
      output_, q_columns_, dout_columns_, clean_;
  std::vector<uint8_t> odd_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
