// Gradients, the weights recomputed by tile: dq, dk and dv of the queries of one key head and some of its keys.
//
//   weights  = 2^(scores − peak) / total          dvalue = weightsᵀ · dout
//   dweights = dout · vᵀ                          dscore = weights · (dweights − spread), spread = Σ dout · output − dlse
//   dq = scale · dscore · k                       dk = scale · dscoreᵀ · q
//
// A tile is [key][query], as in the forward pass, and dq is [feature][query]; dk and dv are gathered by `KeySums`.
#pragma once
#include "asking.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// Keys of a tile that a panel of queries sees.
struct Run { int64_t start, first, last; bool mixed; };  // it is seen from `start` on, and computed from a whole block on

// One range of keys and what is gathered for them.
template <class T> class Backward {
 public:
  static constexpr int panel = kPanel<T>;
  static_assert(kTogether <= 8);  // a bit of a byte for each panel

  // Room for a call; what an earlier one left is used again. `asked`, where it is given, are all blocks of queries of all heads.
  void begin(const Call& call, const Sights& sights, const BackwardPanels<T>& panels, const Together<T>* asked) {
    call_ = &call, sights_ = &sights, panels_ = &panels, asked_ = asked;
    features_ = rounded(call.features, kRows);
    seen_.resize(kTogether);
    for (auto* tiles : {&weights_, &dweights_}) tiles->resize(kTogether * kBackTile * panel);
    if (call.softcap != 0) raw_.resize(kBackTile * panel);
    scratch_.resize(std::max(panel, kRows) * std::max(call.features, call.width));
    output_.resize(panel * call.width);
    if (!asked) room_.resize(Together<T>::numbers(call));
  }

  // The memory that grows with the keys: packed keys (twice) and values, and their gradients; and dq where it was kept here.
  int64_t bytes() const {
    return int64_t((k_.size() + v_.size() + k_columns_.size() + dq_.size()) * sizeof(T)) + dk_.bytes() + dv_.bytes();
  }

  // A block of queries of a head, by its number.
  void ask(Together<T>& block, int64_t b, int64_t h, int64_t number) {
    for (int64_t p = 0, n = number * kTogether; p < kTogether && n < panels_->count(); ++p, ++n)
      block.take(p, b, h, panels_->first(n), panels_->last(n), scratch_.data(), output_.data());
  }

  // All keys of one key head, and the dq of its group written too.
  void head(int64_t b, int64_t head) {
    const int64_t group = call_->group(), size = panels_->room(*call_);
    dq_.resize(group * size);
    keys(b, head, 0, call_->keys, dq_.data(), nullptr);
    for (int64_t g = 0; g < group; ++g) write_queries(dq_.data() + g * size, b, head * group + g, 0, panels_->count());
  }

  // The finished dq of some panels of queries of a head.
  void write_queries(const T* dq, int64_t b, int64_t h, int64_t first, int64_t last) {
    T factors[kPanel<T>];
    std::fill(factors, factors + panel, T(call_->scale));
    for (int64_t n = first; n < last; ++n) {
      if ((n - first) % kTogether == 0) call_->stop.check();
      unpack_rows<T>(dq + (n - first) * panel * features_, panel, panels_->length(n), call_->features, factors, scratch_.data(),
                     call_->dq, b, h, panels_->first(n));
    }
  }

  // Keys [first, last), whole tiles, of one key head against all queries of its group. `dq` has room for each head of the
  // group, and belongs to this call alone. `touched`, if given, learns for each kTogether panels of queries whether they see any
  // of the keys: only then they have a dq here.
  void keys(int64_t b, int64_t head, int64_t first, int64_t last, T* dq, uint8_t* touched) {
    pack_keys(b, head, first, last);
    dk_.begin(last - first, call_->features);
    dv_.begin(last - first, call_->width);
    for (int64_t g = 0; g < call_->group(); ++g) {
      const int64_t h = head * call_->group() + g;
      Scorer<T> scorer(*call_, b, h);
      for (int64_t n = 0; n < panels_->blocks(); ++n)
        queries(scorer, b, h, n, first, last, dq + g * panels_->room(*call_), touched ? touched++ : nullptr);
    }
    call_->stop.check();
    dk_.write(T(call_->scale), last - first, call_->features, scratch_.data(), call_->dk, b, head, first);
    dv_.write(T(1), last - first, call_->width, scratch_.data(), call_->dv, b, head, first);
  }

 private:
  // What a panel of queries sees of all keys, and of a tile.
  struct Seen {
    Stretches keys;
    std::vector<Run> runs;
    bool alive = false;
  };

  void pack_keys(int64_t b, int64_t head, int64_t first, int64_t last) {
    const int64_t count = last - first, padded = rounded(count, kRows);
    odd_.assign(count, 0);
    k_.resize(padded * call_->features);       // [key block][feature][kRows]: for scores
    v_.resize(padded * call_->width);          // [key block][width][kRows]: for dweights
    k_columns_.resize(features_ * count);     // [feature block][key][kRows]: for dq
    for (int64_t at = 0; at < count; at += kBackTile) {
      const int64_t many = std::min(kBackTile, count - at);
      uint8_t* const odd = odd_.data() + at;
      T *const k = k_.data() + at * call_->features, *const v = v_.data() + at * call_->width, *const scratch = scratch_.data();
      call_->stop.check();
      pack_rows<T>(call_->k, b, head, first + at, many, call_->features, kRows, scratch, k, odd);
      pack_rows<T>(call_->v, b, head, first + at, many, call_->width, kRows, scratch, v, odd);
      pack_columns<T>(call_->k, b, head, first + at, many, call_->features, count * kRows, scratch, k_columns_.data() + at * kRows);
    }
  }

  // A block of panels of queries, by its number, against keys [first, last).
  void queries(Scorer<T>& scorer, int64_t b, int64_t h, int64_t number, int64_t first, int64_t last, T* dq, uint8_t* touched) {
    const int64_t begin = number * kTogether, panels = std::min(kTogether, panels_->count() - begin);
    T* const here = dq + begin * panel * features_;
    bool alive = false;
    for (int64_t p = 0; p < panels; ++p) {
      Seen& seen = seen_[p];
      sights_->see(b, h, panels_->first(begin + p), panels_->last(begin + p), seen.keys);
      seen.alive = seen.keys.next(first) < last;
      alive = alive || seen.alive;
    }
    if (touched) *touched = alive;
    if (!alive && touched) return;
    if (!alive) return void(std::fill_n(here, panels * panel * features_, T(0)));
    std::fill_n(begun_, kTogether, false);
    Together<T> own(*call_, room_.data());
    if (!asked_) ask(own, b, h, number);
    const Together<T>& block = asked_ ? asked_[call_->head_of(b, h) * panels_->blocks() + number] : own;
    for (int64_t j0 = first; j0 < last; j0 += kBackTile) {
      call_->stop.check();
      tile(scorer, block, panels, first, j0, std::min(j0 + kBackTile, last), here);
    }
    for (int64_t p = 0; p < panels; ++p)
      if (!begun_[p]) std::fill_n(here + p * panel * features_, panel * features_, T(0));
  }

  // Keys [j0, j1) against the panels: dq for each, dk and dv for all together. Each panel has only the keys it may see.
  void tile(Scorer<T>& scorer, const Together<T>& block, int64_t panels, int64_t first, int64_t j0, int64_t j1, T* dq) {
    std::fill_n(who_, kBackTile / kSumRows, uint8_t(0));
    bool some = false;
    for (int64_t p = 0; p < panels; ++p) {
      const Asking<T>& ask = block.panels[p];
      if (!seen_[p].alive || !ask.alive || !find_runs(seen_[p], j0, j1)) continue;
      some = true;
      differentiate(scorer, block, p, first, j0, dq + p * panel * features_);
      for (const Run& run : seen_[p].runs) {
        if (ask.spoiled) add_odd(scorer, block, p, run, first, j0);
        for (int64_t n = (run.start - j0) / kSumRows; n * kSumRows < run.last - j0; ++n) who_[n] |= uint8_t(1 << p);
      }
    }
    if (!some) return;
    const int64_t before = (j0 - first) / kSumRows, blocks = (j1 - j0 + kSumRows - 1) / kSumRows;
    gather(block, weights_.data(), block.dout_columns(), before, blocks, dv_);
    gather(block, dweights_.data(), block.q_columns(), before, blocks, dk_);
  }

  // What a panel sees of keys [j0, j1), where a tile starts; false for nothing.
  static bool find_runs(Seen& seen, int64_t j0, int64_t j1) {
    seen.runs.clear();
    seen.keys.each(j0, j1, [&](int64_t start, int64_t last) {
      seen.runs.push_back({start, j0 + (start - j0) / kRows * kRows, last, false});
    });
    return !seen.runs.empty();
  }

  // weights and dscores (in dweights_) of what one panel sees of a tile, and its dq. `first` is the first key here, j0 the tile's.
  void differentiate(Scorer<T>& scorer, const Together<T>& block, int64_t p, int64_t first, int64_t j0, T* dq) {
    const Asking<T>& ask = block.panels[p];
    const int vecs = ask.vecs();
    T *const weights = weights_.data() + p * kBackTile * panel, *const dweights = dweights_.data() + p * kBackTile * panel;
    for (Run& run : seen_[p].runs) {
      const int64_t at = run.first - first, count = run.last - run.first, blocks = (count + kRows - 1) / kRows;
      const int64_t row = run.first - j0, place = row * panel;
      const bool odd = std::any_of(odd_.begin() + at, odd_.begin() + at + count, [](uint8_t x) { return x; });
      const T *const k = k_.data() + at * call_->features, *const v = v_.data() + at * call_->width;
      scorer.remember = odd || ask.spoiled;
      scorer.score(block.q(p), k, ask.first, ask.last, run.first, run.last, seen_[p].keys, weights + place, vecs, row);
      run.mixed = scorer.mixed;
      if (call_->softcap != 0)
        product<T, false>(k, blocks, block.q(p), call_->features, call_->features * kRows, raw_.data(), vecs);
      product<T, false>(v, blocks, block.dout(p), call_->width, call_->width * kRows, dweights + place, vecs);
      ask.rows.weigh(weights + place, count, scorer.units.factor, dweights + place, ask.spread);
      if (call_->softcap != 0) scorer.uncap(raw_.data(), count, dweights + place);
      if (run.mixed && scorer.remember)  // last: a masked weight is 0, and 0 times NaN is not
        for (T* const pairs : {weights + place, dweights + place}) scorer.clear(count, pairs, row);
      gather_queries(scorer, ask, run, at, row, odd, dweights + place, begun_[p], dq);
      begun_[p] = true;
      // keys of the same blocks that are not seen
      const int64_t before = row / kSumRows * kSumRows * panel, last = place + count * panel;
      const int64_t end = (row + count + kSumRows - 1) / kSumRows * kSumRows * panel;
      for (T* const pairs : {weights, dweights})
        std::fill(pairs + before, pairs + place, T(0)), std::fill(pairs + last, pairs + end, T(0));
    }
  }

  // dq[feature][query] = k[key][feature] · dscore[key][query], or with `add` that much more, for the keys of a run, which are those
  // from `at` on here and from `row` on in their tile.
  void gather_queries(const Scorer<T>& scorer, const Asking<T>& ask, const Run& run, int64_t at, int64_t row, bool odd,
                      const T* dscores, bool add, T* dq) {
    const int64_t count = run.last - run.first, stride = int64_t(odd_.size()) * kRows, queries = ask.count();
    const T* columns = k_columns_.data() + at * kRows;
    const auto multiply = [&](const T* keys, int64_t stride) {
      if (add) product<T, true>(keys, features_ / kRows, dscores, count, stride, dq, ask.vecs());
      else product<T, false>(keys, features_ / kRows, dscores, count, stride, dq, ask.vecs());
    };
    if (!run.mixed || !odd) return multiply(columns, stride);
    const uint8_t* const allow = scorer.allowed(row);
    multiply(blanked(allow, queries, at, count), kBackTile * kRows);
    for (int64_t j = 0; j < count; ++j) {  // keys that were left out go to those who see them, one by one
      const uint8_t* allowed = allow + j * panel;
      if (!odd_[at + j] || all_set(allowed, queries)) continue;
      for (int64_t x = 0; x < queries; ++x)
        for (int64_t c = 0; allowed[x] && c < call_->features; ++c)
          dq[c * panel + x] += columns[c / kRows * stride + j * kRows + c % kRows] * dscores[j * panel + x];
    }
  }

  // What queries that are not finite add to dk and dv: only to keys that they see.
  void add_odd(const Scorer<T>& scorer, const Together<T>& block, int64_t p, const Run& run, int64_t first, int64_t j0) {
    const Asking<T>& ask = block.panels[p];
    const int64_t tile = p * kBackTile * panel;
    for (int64_t j = run.start; j < run.last; ++j)
      for (int64_t x = 0, place = (j - j0) * panel; x < ask.count(); ++x) {
        if (!ask.odd[x] || (run.mixed && !scorer.allowed()[place + x])) continue;
        const T weight = weights_[tile + place + x], dscore = dweights_[tile + place + x];
        for (int64_t c = 0; c < call_->features; ++c) dk_.at(j - first, c) += dscore * block.q(p)[c * panel + x];
        for (int64_t c = 0; c < call_->width; ++c) dv_.at(j - first, c) += weight * block.dout(p)[c * panel + x];
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

  // What a tile's blocks of keys, which are those from `before` on here, are given by the panels of queries that saw any of them.
  void gather(const Together<T>& block, const T* tiles, const T* columns, int64_t before, int64_t blocks, KeySums<T>& sums) {
    const auto whole = [&](int64_t p) { return block.panels[p].count() == panel; };
    for (int64_t n = 0; n < blocks; ++n)
      for (int64_t from = 0, to; from < kTogether; from = to) {
        const auto sees = [&](int64_t p) { return p < kTogether && (who_[n] >> p & 1); };
        to = from + 1;
        if (!sees(from)) continue;
        while (whole(to - 1) && sees(to)) ++to;
        sums.add(before + n, tiles + (from * kBackTile + n * kSumRows) * panel, columns + from * panel * kSumColumns<T>, to - from,
                 block.panels[to - 1].count());
      }
  }

  const Call* call_ = nullptr;
  const Sights* sights_ = nullptr;
  const BackwardPanels<T>* panels_ = nullptr;
  const Together<T>* asked_ = nullptr;
  int64_t features_ = 0;  // rounded up to whole blocks
  std::vector<Seen> seen_;
  bool begun_[kTogether];  // which panels of queries have a dq by now: what comes first is stored, and the rest added to it
  uint8_t who_[kBackTile / kSumRows];  // for each block of a tile's keys: a bit for each panel of queries that sees some of them
  Buffer<T> k_, v_, k_columns_, dq_, raw_, scratch_, output_, clean_, room_;
  Buffer<T> weights_, dweights_;  // of a tile: [panel of queries][key][query]
  KeySums<T> dk_, dv_;
  std::vector<uint8_t> odd_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
