// Scores of one panel of queries against some keys, transposed: s[key][query]. Product, scale, softcap, bias, mask.
#pragma once
#include "micro.h"
#include "pack.h"
#include "pause.h"
#include "sight.h"
#include "tiles.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;
// keys in a tile, whole blocks of them: its scores stay in the first cache, its keys and values in the second
constexpr int64_t kTile = 512 / kRows * kRows;
constexpr int64_t kReach = kTile + 5 * kMaskStep;  // keys of several tiles, of each a few, that are weighed together
constexpr int64_t kPanels = 8;      // panels of queries that share a tile while it is in the cache
constexpr int64_t kFewPanels = 4;   // whose queries read a key, for which packing it takes longer than it saves, where it can lie
constexpr int64_t kSparsePanels = 24;  // the same of keys alone, under sparse masks: half of a line of values would be of no use
// keys are packed by blocks of kRows: what starts anywhere else reads other keys than it means
static_assert(kTile % kMaskStep == 0 && kMaskStep % kRows == 0 && kMaskStep > kRows);
static_assert(!kTiled || (kTile % kTileGrain == 0 && kMaskStep % kTileGrain == 0));

// How scores are kept until the exponential. Where a score is only a scaled product it stays unscaled, and the scale is
// part of the one multiply-add before 2^x; else it is in nats.
template <class T> struct Units {
  bool raw;
  T factor;    // to base-2 exponents
  T to_score;  // to nats
  explicit Units(const Call& call)
      : raw(call.softcap == 0 && !call.bias && call.scale > 0),
        factor(T(raw ? call.scale * kLog2e : kLog2e)),
        to_score(T(raw ? call.scale : 1.0)) {}
};

// For each tile of keys, whether a query of one of the heads that read it may see some of it.
inline std::vector<uint8_t> tiles_seen(const Call& call, int64_t b, int64_t head) {
  std::vector<uint8_t> seen((call.keys + kTile - 1) / kTile);
  for (int64_t h = head * call.group(); call.queries && h < (head + 1) * call.group(); ++h) {
    const Mask mask(call, b, h);
    const Span span = mask.span(0, call.queries);
    for (int64_t j = span.low / kTile * kTile; j < span.high; j += kTile) {
      // of many queries some see it, most likely, and looking takes longer than packing
      const bool few = call.queries <= call.features + call.width;
      if (!few || mask.decide(0, call.queries, j, std::min(j + kTile, call.keys)) != kNone) seen[j / kTile] = 1;
    }
  }
  return seen;
}

// The keys and values of one batch row and key head, packed.
//
// Of tiles of keys that no query sees nothing is read, and for them there is no room here.
template <class T> struct Packed {
  Buffer<T> k;        // [key block][feature][kRows]
  Buffer<T> v;        // [value block][key][kRows]
  std::vector<uint8_t> odd;    // for each key: holds a number that is not finite
  std::vector<uint8_t> odd_tiles;  // for each tile of keys: one of them does
  std::vector<uint8_t> held;       // for each tile of keys that is packed when it is needed: kTaken by somebody, then kHeld
  std::vector<int64_t> place;  // for each tile of keys: the place of its first; −1 for a tile that nobody sees
  int64_t value_stride = 0;
  TilePacked tiles;   // instead of k, and maybe v, where their products go by tiles
  struct Lying { const T* at = nullptr; int64_t stride = 0; };
  Lying keys_lie, values_lie;  // instead of k and v, where they are read as they lie

  bool tiled_values() const { return tiles.used && kTiledValues; }

  // A number of the values of a key that is held.
  T value(int64_t j, int64_t c) const {
    if (values_lie.at) return values_lie.at[j * values_lie.stride + c];
    return v[c / kRows * value_stride + at(j) * kRows + c % kRows];
  }

  // Keys are read from a multiple of this on.
  int64_t grain() const { return tiles.used ? kTileGrain : kRows; }

  // The place of a key; its tile is one that somebody sees.
  int64_t at(int64_t j) const { return place[j / kTile] + j % kTile; }
  bool holds(int64_t j) const { return place[j / kTile] >= 0; }

  // In a tile of which some keys in [j0, j1) are seen: others may not be packed yet.
  bool any_odd(const Stretches& seen, int64_t j0, int64_t j1) const {
    bool found = false;
    seen.each_tile(j0, j1, kTile, [&](int64_t tile) { found |= odd_tiles[tile]; });
    return found;
  }

  int64_t bytes() const { return int64_t((k.size() + v.size()) * sizeof(T) + odd.size()) + tiles.bytes(); }

  // Where the values of a key begin, and how they lie.
  const T* values_at(int64_t j) const { return values_lie.at ? values_lie.at + j * values_lie.stride : v.data() + at(j) * kRows; }
  Lain values_lying() const { return values_lie.at ? Lain{values_lie.stride, kRows} : Lain{kRows, value_stride}; }

  // `seen`: the tiles of keys that a query may see; `readers`: how many queries read a key, on average; `sparse`: few of them all.
  void resize(const Call& call, int64_t b, int64_t head, const std::vector<uint8_t>& seen, int64_t readers, bool sparse) {
    const int64_t count = find_places(call, seen);
    odd.assign(call.keys, 0);
    odd_tiles.assign(place.size(), 0);
    held.assign(place.size(), 0);
    tiles.resize(call, count);
    const bool can = kAsItLies && !tiles.used && !call.wanted.second_look(), few = can && readers <= kFewPanels * kPanel<T>;
    const bool keys_alone = can && sparse && readers <= kSparsePanels * kPanel<T>;
    keys_lie = few || keys_alone ? lying(call.k, b, head, call.features) : Lying();
    values_lie = few && call.width % kRows == 0 ? lying(call.v, b, head, call.width) : Lying();
    // what an earlier call packed is not counted where nothing is
    k.resize(tiles.used || keys_lie.at ? 0 : rounded(count, kRows) * call.features);
    if (values_lie.at) v.clear();
    if (tiled_values() || values_lie.at) return;
    // blocks whole pages apart would all be written to the same few lines of the cache
    constexpr int64_t page = 4096 / int64_t(sizeof(T)), line = 64 / int64_t(sizeof(T));
    value_stride = count * kRows + (count * kRows % page ? 0 : line);
    v.resize(rounded(call.width, kRows) / kRows * value_stride);
  }

  // Packs the tiles of which some keys are seen and which nobody has packed before: by whoever needs one first, and soon enough for
  // it to be in the cache still. Those that somebody else is at are waited for, last.
  void bring(const Call& call, int64_t b, int64_t head, const Stretches& seen, T* scratch) {
    bool late = false;
    seen.each_tile(0, call.keys, kTile, [&](int64_t tile) {
      uint8_t state = __atomic_load_n(&held[tile], __ATOMIC_ACQUIRE);
      if (!state && __atomic_compare_exchange_n(&held[tile], &state, kTaken, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
        pack(call, b, head, tile * kTile, std::min((tile + 1) * kTile, call.keys), scratch);
        __atomic_store_n(&held[tile], kHeld, __ATOMIC_RELEASE);
      } else late |= state != kHeld;
    });
    if (!late) return;
    seen.each_tile(0, call.keys, kTile, [&](int64_t tile) {
      for (Patience patience; __atomic_load_n(&held[tile], __ATOMIC_ACQUIRE) != kHeld; patience.wait()) call.stop.check();
    });
  }

  // Keys [first, last), either of one tile or of whole ones; `first` is a multiple of kMaskStep.
  void pack(const Call& call, int64_t b, int64_t head, int64_t first, int64_t last, T* scratch) {
    for (int64_t j = first; j < last; j += kTile) {
      if (!holds(j)) continue;
      call.stop.check();
      const int64_t some = std::min(kTile, last - j);
      uint8_t* const here = odd.data() + j;
      if (keys_lie.at) look(call, keys_lie, call.features, j, some, here);
      else if (tiles.used) tiles.pack(call, b, head, j, some, at(j), here);
      else pack_rows<T>(call.k, b, head, j, some, call.features, kRows, scratch, k.data() + at(j) * call.features, here);
      if (values_lie.at) look(call, values_lie, call.width, j, some, here);
      else if (!tiled_values())
        pack_columns<T>(call.v, b, head, j, some, call.width, value_stride, scratch, v.data() + at(j) * kRows, here);
      // others may be packing more of this tile
      if (std::any_of(here, here + some, [](uint8_t x) { return x; })) __atomic_store_n(&odd_tiles[j / kTile], 1, __ATOMIC_RELAXED);
    }
  }

 private:
  static constexpr uint8_t kTaken = 1, kHeld = 2;

  // Where a head's rows lie, if they can be read as they do. Rows far apart would all come into the same few lines of the cache.
  static Lying lying(const View& view, int64_t b, int64_t head, int64_t columns) {
    constexpr int64_t size = sizeof(T);
    if (view.type != kOwn<T> || view.col != size || view.row % size || std::abs(view.row) > 2 * columns * size) return {};
    return {reinterpret_cast<const T*>(view.at(b, head)), view.row / size};
  }

  // Which rows are not finite, where a mask may hide them.
  static void look(const Call& call, const Lying& rows, int64_t columns, int64_t first, int64_t count, uint8_t* odd) {
    for (int64_t r = 0; !call.mask.empty() && r < count; ++r) odd[r] |= is_odd<T>(rows.at + (first + r) * rows.stride, columns);
  }

  // How many keys lie in tiles that are seen.
  int64_t find_places(const Call& call, const std::vector<uint8_t>& seen) {
    place.assign(seen.size(), -1);
    int64_t count = 0;
    for (size_t tile = 0; tile < seen.size(); ++tile)
      if (seen[tile]) {
        place[tile] = count;
        count += std::min(kTile, call.keys - int64_t(tile) * kTile);
      }
    return count;
  }
};

template <class T> class Scorer {
 public:
  static constexpr int panel = kPanel<T>;

  Scorer(const Call& call, int64_t b, int64_t h)
      : call_(call), units(call), mask(call, b, h), b_(b), h_(h) {}

  // s[key − j0][query − i0] for keys [j0, j1) and queries [i0, i1), j0 a multiple of kRows, of which `seen` tells. `q` is the
  // packed panel, `keys` the packed keys from j0 on. `mixed` says that some pairs are masked: also those of lanes that are no
  // queries, where `remember` says that keys may hold anything. Vectors past `vecs` are left as they are. `place` counts keys
  // of the same tile that were scored before these.
  void score(const T* q, const T* keys, int64_t i0, int64_t i1, int64_t j0, int64_t j1, const Stretches& seen, T* s,
             int vecs = kVecs, int64_t place = 0) {
    const int64_t blocks = (j1 - j0 + kRows - 1) / kRows;
    product<T, false>(keys, blocks, q, call_.features, call_.features * kRows, s, vecs);
    scored(i0, i1, j0, j1, seen, s, place);
  }

  // The rest of it, where `s` holds the products.
  void scored(int64_t i0, int64_t i1, int64_t j0, int64_t j1, const Stretches& seen, T* s, int64_t place = 0) {
    mixed = seen.over(j0, j1) != kAll || (remember && i1 - i0 < panel);
    if (!units.raw) shape(i0, i1, j0, j1, s);
    if (!mixed) return;
    if (allowed_.empty()) allowed_.resize(kReach * panel);  // not before: most calls have no mask
    hide(i0, i1, j0, j1, seen, s, allowed_.data() + place * panel);
  }

  // Which pairs of a mixed tile were allowed, in the layout of the scores.
  const uint8_t* allowed(int64_t place = 0) const { return allowed_.data() + place * panel; }

  // Zeros for the pairs of a mixed tile that were not allowed, also in rows that are NaN; where `remember` was set.
  void clear(int64_t count, T* pairs, int64_t place = 0) const {
    const uint8_t* allow = allowed(place);
    for (int64_t x = 0; x < count * panel; ++x) pairs[x] = allow[x] ? pairs[x] : T(0);
  }

  // The derivative of the softcap at each score of a tile, times what is there already.
  void uncap(const T* raw, int64_t count, T* gradient) const {
    if (call_.softcap == 0) return;
    for (int64_t x = 0; x < count * panel; ++x) {
      const T slope = std::tanh(T(call_.scale) * raw[x] / T(call_.softcap));
      gradient[x] *= T(1) - slope * slope;
    }
  }

 private:
  void shape(int64_t i0, int64_t i1, int64_t j0, int64_t j1, T* s) const {
    const int64_t count = (j1 - j0) * panel;
    const T scale = T(call_.scale), cap = T(call_.softcap);
    for (int64_t x = 0; x < count; ++x) s[x] *= scale;
    if (cap != 0)
      for (int64_t x = 0; x < count; ++x) s[x] = cap * std::tanh(s[x] / cap);
    const Bias& bias = call_.bias;
    if (bias.length > 0) {
      const double* table = bias.by_distance.data() + h_ * bias.length + bias.centre + bias.offset[b_];
      for (int64_t j = j0; j < j1; ++j)
        for (int64_t i = i0; i < i1; ++i) s[(j - j0) * panel + (i - i0)] += T(table[i - j]);
    } else if (bias.array) {
      const char* base = bias.array.at(b_, h_);
      for (int64_t i = i0; i < i1; ++i)
        for (int64_t j = j0; j < j1; ++j)
          s[(j - j0) * panel + (i - i0)] += read<T>(base + i * bias.array.row + j * bias.array.col, bias.array.type);
    }
  }

  void hide(int64_t i0, int64_t i1, int64_t j0, int64_t j1, const Stretches& seen, T* s, uint8_t* allowed) {
    const T nothing = -std::numeric_limits<T>::infinity();
    for (int64_t j = j0; j < j1; j += kMaskStep, allowed += kMaskStep * panel) {
      const int64_t end = std::min(j + kMaskStep, j1), count = (end - j) * panel;
      T* scores = s + (j - j0) * panel;
      const Verdict verdict = seen.over(j, end);
      const bool whole = i1 - i0 == panel;
      if (verdict == kNone || !whole) std::fill(allowed, allowed + count, uint8_t(0));
      if (verdict == kAll && remember)
        for (int64_t k = 0; k < end - j; ++k) std::fill_n(allowed + k * panel, i1 - i0, uint8_t(1));
      if (verdict == kAll && (whole || !remember)) continue;
      if (verdict == kSome) mask.tile(i0, i1, j, end, panel, allowed);
      for (int64_t x = 0; x < count; ++x) scores[x] = allowed[x] ? scores[x] : nothing;
    }
  }

  const Call& call_;

 public:
  const Units<T> units;
  const Mask mask;
  bool mixed = false;
  bool remember = false;  // `allowed` is wanted

 private:
  const int64_t b_, h_;
  Buffer<uint8_t> allowed_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
