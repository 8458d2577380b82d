// Products of bfloat16 by AMX: tiles of 16 × 16 sums in float32, of which one instruction adds 32 products to each.
//
// Tiles without the instruction, by hand, are for tests, and stand for what instruction sets without tiles never run.
#pragma once
#include "pack.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kTileRows = 16, kTileDepth = 32, kTileGroup = 2, kTileGrain = kTileDepth, kTileSize = kTileRows * kTileDepth;
#if defined(CLEARHEAD_AMX)
static_assert(kLanes<float> == kTileRows && kVecs == 3);
#endif

#if !defined(CLEARHEAD_AMX) || defined(CLEARHEAD_TILES_BY_HAND)
struct ByHand {
  static inline thread_local float sums[3][16][16];
  static inline thread_local uint16_t factors[8][16][32];
  static void zero(int n) { std::memset(sums[n], 0, sizeof sums[n]); }
  static void load(int n, const void* at, int64_t stride) {
    for (int i = 0; i < 16; ++i) std::memcpy(n < 3 ? (void*)sums[n][i] : factors[n][i], (const char*)at + i * stride, 64);
  }
  static void store(int n, void* at, int64_t stride) {
    for (int i = 0; i < 16; ++i) std::memcpy((char*)at + i * stride, sums[n][i], 64);
  }
  static void dot(int c, int a, int b) {
    for (int i = 0; i < 16; ++i)
      for (int k = 0; k < 32; ++k)
        for (int j = 0; j < 16; ++j)
          sums[c][i][j] += bfloat_to_float(factors[a][i][k]) * bfloat_to_float(factors[b][k / 2][2 * j + k % 2]);
  }
};
#define CLEARHEAD_TILE_ZERO ByHand::zero
#define CLEARHEAD_TILE_LOAD ByHand::load
#define CLEARHEAD_TILE_STORE ByHand::store
#define CLEARHEAD_TILE_DOT ByHand::dot
struct TileUnit {};
#else
#define CLEARHEAD_TILE_ZERO _tile_zero
#define CLEARHEAD_TILE_LOAD _tile_loadd
#define CLEARHEAD_TILE_STORE _tile_stored
#define CLEARHEAD_TILE_DOT _tile_dpbf16ps
// While there is one, this thread's tiles are 16 rows of 64 bytes.
struct TileUnit {
  TileUnit() {
    struct alignas(64) { uint8_t palette = 1, start = 0, reserved[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } shape;
    for (int i = 0; i < 8; ++i) shape.bytes[i] = 64, shape.rows[i] = 16;
    asm volatile("" : : "r"(&shape) : "memory");  // it is in memory before it is read
    _tile_loadconfig(&shape);
  }
  ~TileUnit() { _tile_release(); }
  TileUnit(const TileUnit&) = delete;
};
#endif

// Tile 3 times a row of tiles of the right factor, as many as `vecs`, added to sums 0 to 2. Tiles are numbered in the instructions
// themselves, so that no loop can count them.
#define CLEARHEAD_TILES_ACROSS(right, row, vecs)        \
  do {                                                  \
    CLEARHEAD_TILE_LOAD(4, (right), row);               \
    CLEARHEAD_TILE_DOT(0, 3, 4);                        \
    if ((vecs) > 1) {                                   \
      CLEARHEAD_TILE_LOAD(5, (right) + kTileRows, row); \
      CLEARHEAD_TILE_DOT(1, 3, 5);                      \
    }                                                   \
    if ((vecs) > 2) {                                   \
      CLEARHEAD_TILE_LOAD(6, (right) + 2 * kTileRows, row); \
      CLEARHEAD_TILE_DOT(2, 3, 6);                      \
    }                                                   \
  } while (false)

// s[key][query] for blocks of 16 keys; `depth` tiles of features.
inline void score_tiles(const uint16_t* keys, int64_t blocks, const uint32_t* q, int64_t depth, float* s, int vecs) {
  constexpr int64_t panel = kPanel<float>, row = panel * 4;
  asm volatile("" : : : "memory");
  for (int64_t block = 0; block < blocks; ++block, s += kTileRows * panel) {
    CLEARHEAD_TILE_ZERO(0);
    CLEARHEAD_TILE_ZERO(1);
    CLEARHEAD_TILE_ZERO(2);
    const uint32_t* pairs = q;
    for (int64_t d = 0; d < depth; ++d, keys += kTileSize, pairs += kTileRows * panel) {
      CLEARHEAD_TILE_LOAD(3, keys, 64);
      CLEARHEAD_TILES_ACROSS(pairs, row, vecs);
    }
    CLEARHEAD_TILE_STORE(0, s, row);
    if (vecs > 1) CLEARHEAD_TILE_STORE(1, s + kTileRows, row);
    if (vecs > 2) CLEARHEAD_TILE_STORE(2, s + 2 * kTileRows, row);
  }
}

// values[feature][query] += v · weights, the weights in two parts, for some keys and blocks of 16 features.
inline void value_tiles(const uint16_t* v, int64_t blocks, const uint32_t* weights, const uint32_t* rest, int64_t keys,
                        float* values, int vecs) {
  constexpr int64_t panel = kPanel<float>, row = panel * 4;
  const int64_t steps = rounded(keys, kTileDepth) / kTileDepth;
  asm volatile("" : : : "memory");
  for (int64_t block = 0; block < blocks; ++block, v += kTileSize, values += kTileRows * panel) {
    CLEARHEAD_TILE_LOAD(0, values, row);
    CLEARHEAD_TILE_LOAD(1, values + kTileRows, row);
    CLEARHEAD_TILE_LOAD(2, values + 2 * kTileRows, row);
    for (int64_t step = 0; step < steps; ++step) {
      CLEARHEAD_TILE_LOAD(3, v + step * blocks * kTileSize, 64);
      CLEARHEAD_TILES_ACROSS(weights + step * kTileRows * panel, row, vecs);
      CLEARHEAD_TILES_ACROSS(rest + step * kTileRows * panel, row, vecs);
    }
    CLEARHEAD_TILE_STORE(0, values, row);
    CLEARHEAD_TILE_STORE(1, values + kTileRows, row);
    CLEARHEAD_TILE_STORE(2, values + 2 * kTileRows, row);
  }
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
