// The tiled kernel: score, softmax, accumulate, tile after tile, for a block of queries; then divide and write.
#pragma once
#include <optional>

#include "cuts.h"
#include "observe.h"
#include "score.h"
#include "softmax.h"
#include "stash.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

inline bool all_set(const uint8_t* flags, int64_t count) {
  return std::all_of(flags, flags + count, [](uint8_t x) { return x; });
}

// What a thread needs for one block of queries; what an earlier call left is used again.
template <class T> struct Workspace {
  Buffer<T> q, s, values, clean, scratch;
  Buffer<uint32_t> pairs, weights, rest;  // where products go by tiles
  std::vector<Rows<T>> rows;
  std::vector<Stretches> seen;    // by each panel
  std::vector<Scored> scored;
  std::vector<Strip<T>> strips;
  Stash<T> stash;

  // Room for a call's blocks of so many panels, at most.
  void begin(const Call& call, int64_t panels) {
    constexpr int panel = kPanel<T>;
    q.resize(panels * panel * call.features);
    s.resize((kReach + kDepth) * panel);
    values.resize(panels * panel * rounded(call.width, kDepth));
    scratch.resize(std::max(panel, kRows) * std::max(call.features, call.width));
    rows.resize(panels);
    seen.resize(panels);
    if (!TilePacked::takes(call)) return;
    pairs.resize(panels * panel * rounded(call.features, kTileDepth) / 2);
    weights.resize(kTileKeys / 2 * kTileWide);
    rest.resize(kTileKeys / 2 * kTileWide);
  }

  int64_t bytes() const {
    return int64_t((q.size() + s.size() + values.size() + clean.size() + scratch.size()) * sizeof(T) +
                   (pairs.size() + weights.size() + rest.size()) * 4);
  }

  // The values of keys [j0, j1) with zeros for those that are not finite and not for all queries of the panel to see: zero
  // weight times NaN is NaN.
  const T* blanked(const Call& call, const Packed<T>& packed, const uint8_t* allowed, int64_t queries, int64_t j0, int64_t j1) {
    constexpr int panel = kPanel<T>;
    const int64_t blocks = rounded(call.width, kRows) / kRows, count = j1 - j0;
    clean.resize(blocks * kTile * kRows);
    for (int64_t j = 0; j < count; ++j) {
      const bool safe = !packed.odd[j0 + j] || all_set(allowed + j * panel, queries);
      for (int64_t i = 0; i < blocks; ++i)
        for (int c = 0; c < kRows; ++c)
          clean[i * kTile * kRows + j * kRows + c] = safe && i * kRows + c < call.width ? packed.value(j0 + j, i * kRows + c) : T(0);
    }
    return clean.data();
  }
};

// values[feature][query] += weights[key][query] · v[key][feature], for one panel of `queries`; `allowed`: some pairs are not, and
// of the values some are not finite.
template <class T>
inline void accumulate(const Call& call, const Packed<T>& packed, Workspace<T>& work, const uint8_t* allowed,
                       const T* weights, int64_t queries, int vecs, int64_t j0, int64_t j1, T* values) {
  constexpr int panel = kPanel<T>;
  const int64_t blocks = rounded(call.width, kRows) / kRows;
  const Strip<T> strip{packed.values_at(j0), j1 - j0};
  if (!allowed) return strips_product<T>(&strip, &strip + 1, packed.values_lying(), blocks, weights, true, values, vecs);
  product<T, true>(work.blanked(call, packed, allowed, queries, j0, j1), blocks, weights, j1 - j0, kTile * kRows, values, vecs);
  for (int64_t j = 0; j < j1 - j0; ++j) {  // what was left out goes to those who see it, one by one
    if (!packed.odd[j0 + j] || all_set(allowed + j * panel, queries)) continue;
    for (int64_t x = 0; x < queries; ++x)
      for (int64_t c = 0; allowed[j * panel + x] && c < call.width; ++c)
        values[c * panel + x] += weights[j * panel + x] * packed.value(j0 + j, c);
  }
}

// The same by tiles; `odd`: some of the values are not finite.
template <class T>
inline void accumulate_tiles(const Call& call, const Packed<T>& packed, Workspace<T>& work, const uint8_t* allowed, const T* weights,
                             int64_t b, int64_t head, bool odd, int64_t queries, int vecs, int64_t j0, int64_t j1, T* values) {
  if constexpr (sizeof(T) == 4 && kTiledValues) {
    constexpr int panel = kPanel<T>;
    for (int64_t j = j0; j < j1; j += kTileKeys) {
      const int64_t some = std::min(kTileKeys, j1 - j);
      for (int64_t x = 0; x < vecs * kLanes<T>; x += kTileWide) {
        split_weights(weights + (j - j0) * panel + x, some, work.weights.data(), work.rest.data());
        value_tiles(packed.tiles.values(packed.at(j)), packed.tiles.blocks, work.weights.data(), work.rest.data(), some,
                    values + x, vecs);
      }
    }
    for (int64_t j = j0; odd && j < j1; ++j) {  // what was left out goes to those who see it, one by one
      if (!packed.odd[j]) continue;
      const char* const row = call.v.at(b, head) + j * call.v.row;
      for (int64_t x = 0; x < queries; ++x)
        for (int64_t c = 0, at = (j - j0) * panel + x; (!allowed || allowed[at]) && c < call.width; ++c)
          values[c * panel + x] += weights[at] * read<T>(row + c * call.v.col, call.v.type);
    }
  }
}

// Divide by the denominator, and write output, log-sum-exp and the rest of what each row has one of.
template <class T>
inline void finish(const Call& call, Rows<T>& rows, const Units<T>& units, const T* values, T* scratch, int64_t b,
                   int64_t h, int64_t i0, int64_t i1) {
  constexpr int panel = kPanel<T>;
  T share[panel];
  for (int64_t i = i0; i < i1; ++i) {
    const int lane = int(i - i0);
    const Ending<T> end =
        ending<T>(rows.largest[lane], rows.total[lane], rows.weighted[lane], units, sink_of(call, h), told(call));
    write_ending<T>(call, units, call.row_of(b, h) + i, end);
    share[lane] = end.share;
    rows.largest[lane] = end.peak;
    rows.total[lane] = end.total;
  }
  unpack_rows<T>(values, panel, i1 - i0, call.width, share, scratch, call.out, b, h, i0);
  // the panel's rows past the last query have no weights
  for (int lane = int(i1 - i0); lane < panel; ++lane) rows.largest[lane] = Rows<T>::none, rows.total[lane] = 0;
}

// What a panel's rows ended with elsewhere.
template <class T> inline void recall(const Call& call, Rows<T>& rows, int64_t b, int64_t h, int64_t i0, int64_t i1) {
  const int64_t at = call.row_of(b, h);
  std::copy(static_cast<T*>(call.peak) + at + i0, static_cast<T*>(call.peak) + at + i1, rows.largest);
  std::copy(static_cast<T*>(call.total) + at + i0, static_cast<T*>(call.total) + at + i1, rows.total);
}

// An observer is told which rows of a panel are NaN.
template <class T> inline void say_spoiled(const Rows<T>& rows, int64_t i0, int64_t i1, Observer<T>* observer) {
  for (int64_t i = i0; observer && i < i1; ++i)
    if (const T total = rows.total[i - i0]; total != total) observer->spoil(i, total);
}

// The panels of queries from `begin` on of one head, at most kPanels of them; `known`: what each panel sees, or nothing; `bring`: keys
// and values are packed as they are needed.
template <class T>
void forward_block(const Call& call, const Sights& sights, const Panels& queries, const std::vector<Stretches>& known,
                   Packed<T>& packed, bool bring, int64_t b, int64_t h, int64_t begin, int64_t behind, Workspace<T>& work,
                   Observer<T>* observer) {
  constexpr int panel = kPanel<T>;
  const int64_t many = behind - begin;
  Scorer<T> scorer(call, b, h);
  const int64_t depth = rounded(call.width, kDepth) * panel;
  std::optional<TileUnit> unit;
  if constexpr (sizeof(T) == 4)
    if (packed.tiles.used) {
      unit.emplace();
      for (int64_t place = 0; place < many; ++place)
        pack_groups(call, b, h, queries.first(begin + place), queries.last(begin + place), packed.tiles.depth,
                    work.pairs.data() + place * panel * packed.tiles.depth * kTileDepth / 2);
    }
  for (int64_t place = 0; place < many && !packed.tiles.used; ++place)
    pack_rows<T>(call.q, b, h, queries.first(begin + place), queries.length(begin + place), call.features, panel,
                 work.scratch.data(), work.q.data() + place * panel * call.features);
  const auto multiply = [&](int64_t place, int64_t j0, int64_t j1, T* s, int vecs, int64_t after) {
    if constexpr (sizeof(T) == 4)
      if (const TilePacked& tiles = packed.tiles; tiles.used)
        return score_tiles(tiles.keys(packed.at(j0)), rounded(j1 - j0, kTileRows) / kTileRows,
                           work.pairs.data() + place * panel * tiles.depth * kTileDepth / 2, tiles.depth, s, vecs);
    if (const auto& lie = packed.keys_lie; kAsItLies && lie.at)
      return rows_product<T>(lie.at + j0 * lie.stride, j1 - j0, work.q.data() + place * panel * call.features, call.features,
                             lie.stride, s, vecs, after < 0 ? nullptr : lie.at + after * lie.stride);
    product<T, false>(packed.k.data() + packed.at(j0) * call.features, rounded(j1 - j0, kRows) / kRows,
                      work.q.data() + place * panel * call.features, call.features, call.features * kRows, s, vecs,
                      after < 0 ? nullptr : packed.k.data() + packed.at(after) * call.features);
  };
  // a panel's first products are stored and not added: zeros would have to be written, and read, by then from far away
  bool begun[kPanels] = {};
  const auto values_of = [&](int64_t place) {
    T* const values = work.values.data() + place * depth;
    if (!begun[place]) std::fill_n(values, depth, T(0));
    begun[place] = true;
    return values;
  };
  for (auto& rows : work.rows) rows = Rows<T>();
  const bool entropy = call.wanted.entropy != nullptr;
  const int64_t width = rounded(call.width, kRows) / kRows;
  for (int64_t place = 0; place < many; ++place) {
    const int64_t i0 = queries.first(begin + place), i1 = queries.last(begin + place);
    if (known.empty()) sights.see(b, h, i0, i1, work.seen[place]);
    else work.seen[place] = known[begin + place];
    if (bring) packed.bring(call, b, h / call.group(), work.seen[place], work.scratch.data());
    if (!call.known) continue;
    recall(call, work.rows[place], b, h, i0, i1);
    say_spoiled(work.rows[place], i0, i1, observer);
  }
  const bool stashed = observer && !call.known && work.stash.begin(work.seen, many);

  for (int look = call.known; look < (observer ? 2 : 1); ++look) {
    const Stretches *const sights_of = work.seen.data(), *const last = sights_of + many;
    for (int64_t tile = 0, end; tile < call.keys; tile = end) {
      call.stop.check();
      // on to what any of the panels sees, and where that is little, several tiles at once
      int64_t next = call.keys, reach = call.keys;
      for (auto seen = sights_of; seen < last; ++seen) next = std::min(next, seen->next(tile));
      if (next == call.keys) break;
      tile = next / kTile * kTile;
      for (auto seen = sights_of; seen < last && !observer; ++seen) reach = std::min(reach, seen->reach(tile, kReach));
      end = std::min(observer ? tile + kTile : std::max(tile + kTile, reach / kTile * kTile), call.keys);
      if (reach == call.keys && !observer) end = call.keys;
      for (int64_t place = 0; place < many; ++place) {
        const int64_t i0 = queries.first(begin + place), i1 = queries.last(begin + place);
        T* const s = stashed && look == 0 ? work.stash.room(place) : work.s.data();
        // an observer adds up whole panels, in which those who are no queries have weight 0
        const int vecs = observer ? kVecs : int((i1 - i0 + kLanes<T> - 1) / kLanes<T>);
        Rows<T>& rows = work.rows[place];
        const bool spoiled = look == 1 && rows.spoiled();
        if (look == 1 && stashed && !spoiled) {
          work.stash.show(place, tile, rows, scorer.units.factor, [&](const T* weights, const Scored& part) {
            observer->see(weights, packed, i0, i1, part.first, part.last);
          });
          continue;
        }
        const bool odd = packed.any_odd(work.seen[place], tile, end);
        scorer.remember = odd || spoiled;
        // what is seen of the tile is scored part after part, side by side, and then weighed together; what part comes next is
        // known before, so that its keys can be asked for
        int64_t count = 0;
        work.scored.clear();
        Stretches& seen = work.seen[place];
        const size_t mark = seen.mark();
        for (int64_t here = tile; here < end; here += kTile) {
          if (!packed.holds(here)) continue;
          seen.each(here, std::min(here + kTile, end), [&](int64_t start, int64_t j1) {
            const int64_t j0 = start / packed.grain() * packed.grain();
            work.scored.push_back({j0, j1, count, false});
            count += j1 - j0;
          });
        }
        seen.back(mark);
        for (size_t n = 0; n < work.scored.size(); ++n) {
          auto& [j0, j1, at, mixed] = work.scored[n];
          multiply(place, j0, j1, s + at * panel, vecs, n + 1 < work.scored.size() ? work.scored[n + 1].first : -1);
          seen.on_to(j0);
          scorer.scored(i0, i1, j0, j1, seen, s + at * panel, at);
          mixed = scorer.mixed;
        }
        if (!count) continue;
        if (look == 0) {
          T* values = work.values.data() + place * depth;
          if (seen.next(end) == call.keys) ask_rows(call.out, b, h, i0, i1, call.width);
          rows.exponentiate(s, count, scorer.units.factor, entropy, values, call.width, vecs);
          if (stashed) work.stash.keep(place, tile, count, work.scored, rows.largest);
          if (!packed.tiled_values() && !scorer.remember) {
            work.strips.clear();
            for (const Scored& part : work.scored) work.strips.push_back({packed.values_at(part.first), part.last - part.first});
            const auto* const first = work.strips.data();
            strips_product<T>(first, first + work.strips.size(), packed.values_lying(), width, s, begun[place], values, vecs);
            begun[place] = true;
            continue;
          }
          values_of(place);
          for (const auto& [j0, j1, at, mixed] : work.scored) {
            const uint8_t* const allowed = mixed && scorer.remember ? scorer.allowed(at) : nullptr;
            const T* const weights = s + at * panel;
            if (packed.tiled_values())
              accumulate_tiles(call, packed, work, allowed, weights, b, h / call.group(), odd, i1 - i0, vecs, j0, j1, values);
            else accumulate(call, packed, work, allowed, weights, i1 - i0, vecs, j0, j1, values);
          }
        } else {
          rows.weigh(s, count, scorer.units.factor);
          for (const auto& [j0, j1, at, mixed] : work.scored) {
            if (spoiled && mixed) scorer.clear(j1 - j0, s + at * panel, at);
            observer->see(s + at * panel, packed, i0, i1, j0, j1);
          }
        }
      }
      if (look == 1) observer->end_tile(tile, end);
    }
    for (auto& seen : work.seen) seen.again();
    if (look == 0)
      for (int64_t place = 0; place < many; ++place) {
        const int64_t i0 = queries.first(begin + place), i1 = queries.last(begin + place);
        finish(call, work.rows[place], scorer.units, values_of(place), work.scratch.data(), b, h, i0, i1);
        say_spoiled(work.rows[place], i0, i1, observer);
      }
  }
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
