// Products of bfloat16 by BFMMLA: 2 × 2 sums in float32 in a register, of which one instruction adds four products to each.
//
// A tile is 8 rows × 4 numbers, four registers; the right factor is 12 queries × 4 numbers, six. Two rows and two queries are a
// register of sums, so that 24 of them are a block of the panel. The instruction rounds to odd, which is off by up to a unit of the
// last place and not by half of one, twice for each pair of products; it takes what is too small for a normal number as zero, and
// infinity is what is too large. Without the instruction, by hand, it is for tests.
#pragma once
#include "pack.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kTileRows = 8, kTileDepth = 4, kTileGroup = 4, kTileSize = kTileRows * kTileDepth;
constexpr int64_t kTileGrain = 32;  // keys whose values lie feature block after feature block
constexpr int64_t kTileKeys = 128, kTileWide = kPanel<float>;  // keys and queries whose weights go together
static_assert(kLanes<float> == 4 && kVecs == 3 && kRows == kTileRows);
struct TileUnit {};  // there is nothing to set up

typedef uint16_t EightHalves __attribute__((vector_size(16), aligned(4), may_alias));

// sums[row][query] += Σ left[row][·] · right[query][·], two of each, four numbers long.
CLEARHEAD_INLINE Vec<float> multiply_add(Vec<float> sums, EightHalves left, EightHalves right) {
#if defined(CLEARHEAD_TILES_BY_HAND)
  for (int row = 0; row < 2; ++row)
    for (int query = 0; query < 2; ++query)
      for (int x = 0; x < 4; ++x)
        sums[2 * row + query] += bfloat_to_float(left[4 * row + x]) * bfloat_to_float(right[4 * query + x]);
  return sums;
#else
  return vbfmmlaq_f32(sums, (bfloat16x8_t)left, (bfloat16x8_t)right);
#endif
}

// The sums of eight rows and `vecs` vectors of queries while they are added to.
template <int vecs> struct TileSums {
  Vec<float> sums[4][2 * vecs];  // two rows, two queries

  CLEARHEAD_INLINE void zero() {
    for (auto& two_rows : sums)
      for (auto& two_queries : two_rows) two_queries = Vec<float>{};
  }

  // From and to rows of the panel: two queries of one row are half a vector.
  CLEARHEAD_INLINE void load_rows(const float* rows) {
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < vecs; ++j) {
        const Vec<float> upper = load<float>(rows + 2 * i * kPanel<float> + 4 * j);
        const Vec<float> lower = load<float>(rows + (2 * i + 1) * kPanel<float> + 4 * j);
        sums[i][2 * j] = CLEARHEAD_PICK(upper, lower, 0, 1, 4, 5);
        sums[i][2 * j + 1] = CLEARHEAD_PICK(upper, lower, 2, 3, 6, 7);
      }
  }
  CLEARHEAD_INLINE void store_rows(float* rows) const {
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < vecs; ++j) {
        const Vec<float> left = sums[i][2 * j], right = sums[i][2 * j + 1];
        store<float>(rows + 2 * i * kPanel<float> + 4 * j, CLEARHEAD_PICK(left, right, 0, 1, 4, 5));
        store<float>(rows + (2 * i + 1) * kPanel<float> + 4 * j, CLEARHEAD_PICK(left, right, 2, 3, 6, 7));
      }
  }

  // One tile of the left factor, times four numbers of each query.
  CLEARHEAD_INLINE void add(const EightHalves* left, const EightHalves* right) {
    for (int j = 0; j < 2 * vecs; ++j)
      for (int i = 0; i < 4; ++i) sums[i][j] = multiply_add(sums[i][j], left[i], right[j]);
  }
};

template <int vecs> inline void score_tiles_of(const uint16_t* keys, int64_t blocks, const uint32_t* q, int64_t depth, float* s) {
  constexpr int64_t panel = kPanel<float>;
  for (int64_t block = 0; block < blocks; ++block, s += kTileRows * panel) {
    TileSums<vecs> sums;
    sums.zero();
    const EightHalves* right = reinterpret_cast<const EightHalves*>(q);
    for (int64_t d = 0; d < depth; ++d, keys += kTileSize, right += panel / 2)
      sums.add(reinterpret_cast<const EightHalves*>(keys), right);
    sums.store_rows(s);
  }
}

template <int vecs>
inline void value_tiles_of(const uint16_t* v, int64_t blocks, const uint32_t* weights, const uint32_t* rest, int64_t keys,
                           float* values) {
  constexpr int64_t panel = kPanel<float>;
  for (int64_t block = 0; block < blocks; ++block, v += kTileRows * kTileGrain, values += kTileRows * panel) {
    TileSums<vecs> sums;
    sums.load_rows(values);
    const EightHalves *right = reinterpret_cast<const EightHalves*>(weights), *less = reinterpret_cast<const EightHalves*>(rest);
    for (int64_t k0 = 0; k0 < keys; k0 += kTileGrain) {
      const EightHalves* left = reinterpret_cast<const EightHalves*>(v + k0 * blocks * kTileRows);
      for (int64_t k = k0; k < std::min(k0 + kTileGrain, keys); k += 4, left += 4, right += panel / 2, less += panel / 2) {
        sums.add(left, right);
        sums.add(left, less);
      }
    }
    sums.store_rows(values);
  }
}

#if !defined(CLEARHEAD_TILES_BY_HAND)
// The same for a whole panel with the registers named, as in micro.h: compilers copy sums around these loops, which takes as long
// as the products do. v8–v31 hold the sums, six registers for two rows; v0–v3 a tile of the left factor, v4–v7 queries.
#define CLEARHEAD_DOWN(x, y, z, w, right)             \
  "bfmmla v" #x ".4s, v0.8h, v" #right ".8h\n"       \
  "bfmmla v" #y ".4s, v1.8h, v" #right ".8h\n"       \
  "bfmmla v" #z ".4s, v2.8h, v" #right ".8h\n"       \
  "bfmmla v" #w ".4s, v3.8h, v" #right ".8h\n"
#define CLEARHEAD_TILE_LEFT "ldp q0, q1, [%[a]], #32\nldp q2, q3, [%[a]], #32\nprfm pldl1keep, [%[a], #384]\n"
#define CLEARHEAD_TILE_STEP(right)                                                       \
  "ldp q4, q5, [%[" right "]], #32\nldp q6, q7, [%[" right "]], #32\n"                   \
  CLEARHEAD_DOWN(8, 14, 20, 26, 4) CLEARHEAD_DOWN(9, 15, 21, 27, 5)                      \
  "ldp q4, q5, [%[" right "]], #32\n"                                                    \
  CLEARHEAD_DOWN(10, 16, 22, 28, 6) CLEARHEAD_DOWN(11, 17, 23, 29, 7)                    \
  CLEARHEAD_DOWN(12, 18, 24, 30, 4) CLEARHEAD_DOWN(13, 19, 25, 31, 5)
// Two rows of the panel, 96 bytes, are six registers of sums.
#define CLEARHEAD_TWO_ROWS(op, at) op " q0, q1, [%[c], #" #at "]\n" op " q2, q3, [%[c], #" #at " + 32]\n" op " q4, q5, [%[c], #" #at " + 64]\n"
#define CLEARHEAD_ZIPS(to, from, other) "zip1 v" #to ".2d, v" #from ".2d, v" #other ".2d\n"
#define CLEARHEAD_ZIPS2(to, from, other) "zip2 v" #to ".2d, v" #from ".2d, v" #other ".2d\n"
#define CLEARHEAD_ROWS_IN(at, s, t, u, v, w, x)                                          \
  CLEARHEAD_TWO_ROWS("ldp", at)                                                          \
  CLEARHEAD_ZIPS(s, 0, 3) CLEARHEAD_ZIPS2(t, 0, 3) CLEARHEAD_ZIPS(u, 1, 4)               \
  CLEARHEAD_ZIPS2(v, 1, 4) CLEARHEAD_ZIPS(w, 2, 5) CLEARHEAD_ZIPS2(x, 2, 5)
#define CLEARHEAD_ROWS_OUT(at, s, t, u, v, w, x)                                         \
  CLEARHEAD_ZIPS(0, s, t) CLEARHEAD_ZIPS(1, u, v) CLEARHEAD_ZIPS(2, w, x)                \
  CLEARHEAD_ZIPS2(3, s, t) CLEARHEAD_ZIPS2(4, u, v) CLEARHEAD_ZIPS2(5, w, x)             \
  CLEARHEAD_TWO_ROWS("stp", at)
#define CLEARHEAD_NOTHING(at, s, t, u, v, w, x)                                          \
  "movi v" #s ".2d, #0\nmovi v" #t ".2d, #0\nmovi v" #u ".2d, #0\n"                      \
  "movi v" #v ".2d, #0\nmovi v" #w ".2d, #0\nmovi v" #x ".2d, #0\n"
#define CLEARHEAD_ALL_ROWS(f)                                                            \
  f(0, 8, 9, 10, 11, 12, 13) f(96, 14, 15, 16, 17, 18, 19) f(192, 20, 21, 22, 23, 24, 25) f(288, 26, 27, 28, 29, 30, 31)
#define CLEARHEAD_ALL_SUMS                                                                                      \
  "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", \
      "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"

template <> inline void score_tiles_of<3>(const uint16_t* keys, int64_t blocks, const uint32_t* q, int64_t depth, float* s) {
  for (int64_t block = 0; block < blocks; ++block, s += kTileRows * kPanel<float>) {
    const uint32_t* right = q;
    int64_t left = depth;  // there is one feature, at least
    asm volatile(CLEARHEAD_ALL_ROWS(CLEARHEAD_NOTHING) "1:\n" CLEARHEAD_TILE_LEFT CLEARHEAD_TILE_STEP("b")
                 "subs %[d], %[d], #1\nb.ne 1b\n" CLEARHEAD_ALL_ROWS(CLEARHEAD_ROWS_OUT)
                 : [a] "+r"(keys), [b] "+r"(right), [d] "+r"(left)
                 : [c] "r"(s)
                 : "cc", "memory", CLEARHEAD_ALL_SUMS);
  }
}

template <>
inline void value_tiles_of<3>(const uint16_t* v, int64_t blocks, const uint32_t* weights, const uint32_t* rest, int64_t keys,
                              float* values) {
  const int64_t grain = kTileGrain / kTileDepth, apart = (blocks - 1) * kTileRows * kTileGrain * 2;  // steps, and bytes between grains
  for (int64_t block = 0; block < blocks; ++block, v += kTileRows * kTileGrain, values += kTileRows * kPanel<float>) {
    const uint16_t* at = v;
    const uint32_t *right = weights, *less = rest;
    int64_t steps = (keys + kTileDepth - 1) / kTileDepth, some;
    asm volatile(CLEARHEAD_ALL_ROWS(CLEARHEAD_ROWS_IN)
                 "1:\ncmp %[d], %[g]\ncsel %[n], %[d], %[g], lt\nsub %[d], %[d], %[n]\n"
                 "2:\n" CLEARHEAD_TILE_LEFT CLEARHEAD_TILE_STEP("b") CLEARHEAD_TILE_STEP("r")
                 "subs %[n], %[n], #1\nb.ne 2b\nadd %[a], %[a], %[j]\ncbnz %[d], 1b\n" CLEARHEAD_ALL_ROWS(CLEARHEAD_ROWS_OUT)
                 : [a] "+r"(at), [b] "+r"(right), [r] "+r"(less), [d] "+r"(steps), [n] "=&r"(some)
                 : [c] "r"(values), [g] "r"(grain), [j] "r"(apart)
                 : "cc", "memory", CLEARHEAD_ALL_SUMS);
  }
}
#endif

// s[key][query] for blocks of eight keys; `depth` tiles of features.
inline void score_tiles(const uint16_t* keys, int64_t blocks, const uint32_t* q, int64_t depth, float* s, int vecs) {
  if (vecs == 3) return score_tiles_of<3>(keys, blocks, q, depth, s);
  if (vecs == 2) return score_tiles_of<2>(keys, blocks, q, depth, s);
  score_tiles_of<1>(keys, blocks, q, depth, s);
}

// values[feature][query] += v · weights, the weights in two parts, for some keys and blocks of eight features.
inline void value_tiles(const uint16_t* v, int64_t blocks, const uint32_t* weights, const uint32_t* rest, int64_t keys,
                        float* values, int vecs) {
  if (vecs == 3) return value_tiles_of<3>(v, blocks, weights, rest, keys, values);
  if (vecs == 2) return value_tiles_of<2>(v, blocks, weights, rest, keys, values);
  value_tiles_of<1>(v, blocks, weights, rest, keys, values);
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
