// Products of bfloat16 as it is, in tiles, where the CPU has an instruction for them: how keys, values, queries and weights lie.
//
// The layout is that of the other products: scores lie as [key][query] and values as [feature][query], a panel of queries wide.
// Keys are the left factor as they lie, in tiles of kTileRows keys × kTileDepth features; queries the right one, kTileGroup
// features of each side by side; values, turned, are the left factor of the second product, in tiles of kTileRows features ×
// kTileDepth keys, and weights the right one, kTileGroup keys side by side. A weight has 24 digits, bfloat16 8: it goes as the sum
// of two, so that what is lost is less than float32 sums lose over some hundred keys.
#pragma once
#if defined(CLEARHEAD_NEON_BF16)
#include "tiles_neon.h"
#elif defined(CLEARHEAD_AVX512_BF16)
#include "tiles_avx512.h"
#elif defined(CLEARHEAD_AMX)
#include "few_tiles_amx.h"
#else
#include "tiles_amx.h"
#endif

namespace clearhead {
namespace CLEARHEAD_ISA {

#if defined(CLEARHEAD_AMX) || defined(CLEARHEAD_NEON_BF16)
constexpr bool kTiled = true, kTiledValues = true;
#elif defined(CLEARHEAD_AVX512_BF16)
constexpr bool kTiled = true, kTiledValues = false;  // values are those of float32
#else
constexpr bool kTiled = false, kTiledValues = false;  // nothing of this is used
#endif
#if defined(CLEARHEAD_AMX)
constexpr bool kFewTiled = true;
#else
constexpr bool kFewTiled = false;
struct FewTiles {  // keys and values as they lie are for AMX alone
  static bool takes(const Call&, int64_t) { return false; }
};
constexpr int64_t kTileStretch = 0;
#endif
// kTileKeys × kTileWide weights, in two parts, stay in the first cache while they are multiplied with all features.
static_assert(!kTiled || (kTileGrain % kTileRows == 0 && kTileGrain % kRows == 0));
static_assert(!kTiledValues || (kTileKeys % kTileGrain == 0 && kTileGrain % kTileDepth == 0 && kTileGrain % 8 == 0));

// Two bfloat16 numbers a lane, or four in two lanes, of as many keys, for the queries of one vector.
inline void lay_side_by_side(const WordVec* numbers, uint32_t* out) {
  const WordVec first = numbers[0] >> 16 | numbers[1];
#if defined(CLEARHEAD_NEON_BF16)
  const WordVec second = numbers[2] >> 16 | numbers[3];
  *reinterpret_cast<WordVec*>(out) = CLEARHEAD_PICK(first, second, 0, 4, 1, 5);
  *reinterpret_cast<WordVec*>(out + kLanes<float>) = CLEARHEAD_PICK(first, second, 2, 6, 3, 7);
#else
  *reinterpret_cast<WordVec*>(out) = first;
#endif
}

// The weights of `count` keys for kTileWide queries, kTileGroup keys side by side, in two parts whose sum they are; zeros
// up to whole tiles.
inline void split_weights(const float* s, int64_t count, uint32_t* weights, uint32_t* rest) {
  constexpr int64_t panel = kPanel<float>, lanes = kLanes<float>, group = kTileGroup;
  constexpr uint32_t half = 0x8000, upper = 0xffff0000;
  const auto part = [](Vec<float> x, Vec<float>& left) {
    const WordVec bits = ((WordVec)x + half) & upper;
    left = x - (Vec<float>)bits;
    return bits;
  };
  for (int64_t k = 0; k < rounded(count, kTileDepth); k += group)
    for (int64_t x = 0; x < kTileWide; x += lanes) {
      WordVec more[group], less[group];
      for (int64_t i = 0; i < group; ++i) {
        Vec<float> weight{}, left;
        if (k + i < count) weight = load<float>(s + (k + i) * panel + x);
        more[i] = part(weight, weight);
        less[i] = part(weight, left);
      }
      const int64_t at = (k * kTileWide + x * group) / 2;
      lay_side_by_side(more, weights + at);
      lay_side_by_side(less, rest + at);
    }
}

// A row of bfloat16 numbers, as they are, and zeros up to `room`.
inline void copy_row(const char* p, int64_t stride, int64_t count, int64_t room, uint16_t* out) {
  if (stride == 2) std::memcpy(out, p, 2 * count);
  else
    for (int64_t i = 0; i < count; ++i) std::memcpy(out + i, p + i * stride, 2);
  std::fill(out + count, out + room, uint16_t(0));
}

inline bool is_odd(const uint16_t* row, int64_t count) {
  uint16_t found = 0;  // as wide as the numbers: of a bool the compiler makes no vectors
  for (int64_t c = 0; c < count; ++c) found |= (row[c] & 0x7f80) == 0x7f80;
  return found != 0;
}

// Eight rows of eight numbers, turned: three times, the first half of the rows laid between the second half.
inline void turn8(const uint16_t* in, int64_t stride, uint16_t* out) {
  typedef uint16_t Eight __attribute__((vector_size(16), aligned(2), may_alias));
#if defined(__clang__)
#define CLEARHEAD_BETWEEN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CLEARHEAD_BETWEEN(a, b, ...) __builtin_shuffle(a, b, Eight{__VA_ARGS__})
#endif
  Eight rows[8], next[8];
  for (int i = 0; i < 8; ++i) rows[i] = *reinterpret_cast<const Eight*>(in + i * stride);
  for (int time = 0; time < 3; ++time) {
    for (int i = 0; i < 4; ++i) {
      next[2 * i] = CLEARHEAD_BETWEEN(rows[i], rows[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      next[2 * i + 1] = CLEARHEAD_BETWEEN(rows[i], rows[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; ++i) rows[i] = next[i];
  }
  for (int i = 0; i < 8; ++i) *reinterpret_cast<Eight*>(out + i * 8) = rows[i];
}

// The keys and values of one head in tiles. A key with numbers that are not finite has zeros for values: they are added to
// those who see it, one by one.
struct TilePacked {
  bool used = false;
  Buffer<uint16_t> k;  // [kTileRows keys][kTileDepth features][key][feature]
  Buffer<uint16_t> v;  // [kTileGrain keys][kTileRows features][kTileDepth keys][feature][key]
  int64_t depth = 0, blocks = 0;

  static bool takes(const Call& call) {
    const auto removes = [](const Asked& one) { return one.name == "removal"; };
    const auto& wanted = call.wanted.of_weights;
    const bool reads_values = call.reads_values || std::any_of(wanted.begin(), wanted.end(), removes);  // which lie otherwise here
    return kTiled && !call.wide && call.q.type == kBFloat16 && call.k.type == kBFloat16 &&
           (!kTiledValues || (call.v.type == kBFloat16 && !reads_values));
  }

  void resize(const Call& call, int64_t count) {
    used = takes(call);
    if (!used) return;
    depth = rounded(call.features, kTileDepth) / kTileDepth;
    blocks = rounded(call.width, kTileRows) / kTileRows;
    k.resize(rounded(count, kTileGrain) / kTileRows * depth * kTileSize);
    if (kTiledValues) v.resize(rounded(count, kTileGrain) / kTileDepth * blocks * kTileSize);
  }

  const uint16_t* keys(int64_t at) const { return k.data() + at / kTileRows * depth * kTileSize; }
  const uint16_t* values(int64_t at) const { return v.data() + at / kTileDepth * blocks * kTileSize; }  // of whole grains
  int64_t bytes() const { return int64_t(2 * (k.size() + v.size())); }

  // Keys [first, first + count), whose place is `at`, a multiple of kTileGrain; `odd` is that of the first.
  void pack(const Call& call, int64_t b, int64_t head, int64_t first, int64_t count, int64_t at, uint8_t* odd) {
    Buffer<uint16_t> row(depth * kTileDepth), rows(kTileGrain * blocks * kTileRows);
    for (int64_t j = 0; j < count; ++j) {
      copy_row(call.k.at(b, head) + (first + j) * call.k.row, call.k.col, call.features, int64_t(row.size()), row.data());
      odd[j] |= is_odd(row.data(), call.features);
      uint16_t* out = k.data() + (at + j) / kTileRows * depth * kTileSize + (at + j) % kTileRows * kTileDepth;
      for (int64_t d = 0; d < depth; ++d) std::memcpy(out + d * kTileSize, row.data() + d * kTileDepth, 2 * kTileDepth);
    }
    const int64_t across = blocks * kTileRows;
    for (int64_t j0 = 0; kTiledValues && j0 < count; j0 += kTileGrain) {
      for (int64_t j = 0; j < kTileGrain; ++j) {
        uint16_t* const here = rows.data() + j * across;
        if (j0 + j < count) copy_row(call.v.at(b, head) + (first + j0 + j) * call.v.row, call.v.col, call.width, across, here);
        if (j0 + j < count) odd[j0 + j] |= is_odd(here, call.width);
        if (j0 + j >= count || odd[j0 + j]) std::fill_n(here, across, uint16_t(0));
      }
      uint16_t* const out = v.data() + (at + j0) / kTileDepth * blocks * kTileSize;
      for (int64_t c = 0; c < across; c += 8)
        for (int64_t j = 0; j < kTileGrain; j += 8) lay_turned(rows.data() + j * across + c, across, c, j, out);
    }
  }

 private:
  // Eight keys of eight features, turned, from key `j` and feature `c` of a grain on.
  static void lay_turned(const uint16_t* rows, int64_t across, int64_t c, int64_t j, uint16_t* out) {
    constexpr int64_t run = std::min<int64_t>(kTileDepth, 8);  // keys that lie side by side in one tile
    uint16_t turned[64];
    turn8(rows, across, turned);
    out += c / kTileRows * kTileRows * kTileGrain + c % kTileRows * kTileDepth;
    for (int64_t i = 0; i < 8; ++i)
      for (int64_t x = 0; x < 8; x += run)
        std::memcpy(out + (j + x) / kTileDepth * kTileSize + i * kTileDepth + (j + x) % kTileDepth, turned + i * 8 + x, 2 * run);
  }
};

// Queries [first, last) as panels, kTileGroup features side by side: out[panel][group][query][feature], those past the end zero.
inline void pack_groups(const Call& call, int64_t b, int64_t h, int64_t first, int64_t last, int64_t depth, uint32_t* out) {
  using Group = std::conditional_t<kTileGroup == 4, double, float>;  // numbers that are only moved
  static_assert(sizeof(Group) == 2 * kTileGroup);
  constexpr int64_t panel = kPanel<float>;
  const int64_t groups = depth * kTileDepth / kTileGroup;
  Buffer<Group> rows(panel * groups);
  const Group* lines[panel];
  for (int64_t x = 0; x < panel; ++x) lines[x] = rows.data() + x * groups;
  for (int64_t i0 = first; i0 < last; i0 += panel, out += panel * depth * kTileDepth / 2) {
    std::fill(rows.begin(), rows.end(), Group(0));
    for (int64_t i = i0; i < std::min(i0 + panel, last); ++i)
      copy_row(call.q.at(b, h) + i * call.q.row, call.q.col, call.features, kTileGroup * groups,
               reinterpret_cast<uint16_t*>(rows.data() + (i - i0) * groups));
    turn<Group>(lines, panel, groups, reinterpret_cast<Group*>(out), panel);
  }
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
