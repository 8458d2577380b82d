// Products of bfloat16 by AMX: tiles of 16 × 16 sums in float32, of which one instruction adds 32 products to each.
//
// Tiles without the instruction, by hand, are for tests, and stand for what instruction sets without tiles never run.
#pragma once
#include "pack.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kTileRows = 16, kTileDepth = 32, kTileGroup = 2, kTileGrain = kTileDepth, kTileSize = kTileRows * kTileDepth;
constexpr int64_t kTileKeys = 512, kTileWide = kTileRows;  // keys and queries whose weights go together
#if defined(CLEARHEAD_AMX)
static_assert(kLanes<float> == kTileRows && kVecs == 3);
#endif

#if !defined(CLEARHEAD_AMX) || defined(CLEARHEAD_TILES_BY_HAND)
struct ByHand {
  static inline thread_local struct { alignas(64) char bytes[16][64]; } tiles[8];
  static void zero(int n) { std::memset(tiles[n].bytes, 0, sizeof tiles[n].bytes); }
  static void load(int n, const void* at, int64_t stride) {
    for (int i = 0; i < 16; ++i) std::memcpy(tiles[n].bytes[i], (const char*)at + i * stride, 64);
  }
  static void store(int n, void* at, int64_t stride) {
    for (int i = 0; i < 16; ++i) std::memcpy((char*)at + i * stride, tiles[n].bytes[i], 64);
  }
  static void dot(int c, int a, int b) {
    float sums[16][16];
    uint16_t left[16][32], right[16][32];
    std::memcpy(sums, tiles[c].bytes, sizeof sums);
    std::memcpy(left, tiles[a].bytes, sizeof left);
    std::memcpy(right, tiles[b].bytes, sizeof right);
    for (int i = 0; i < 16; ++i)
      for (int k = 0; k < 32; ++k)
        for (int j = 0; j < 16; ++j) sums[i][j] += bfloat_to_float(left[i][k]) * bfloat_to_float(right[k / 2][2 * j + k % 2]);
    std::memcpy(tiles[c].bytes, sums, sizeof sums);
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
// While there is one, this thread's tiles are 16 rows of 64 bytes; then they are what they were before: who handles a signal in
// the midst of a call may make one of its own.
class TileUnit {
 public:
  TileUnit() {
    _tile_storeconfig(&before_);
    Shape shape;
    shape.palette = 1;
    for (int i = 0; i < 8; ++i) shape.bytes[i] = 64, shape.rows[i] = 16;
    asm volatile("" : : "r"(&shape), "r"(&before_) : "memory");  // both are in memory, whatever the compiler knows of them
    _tile_loadconfig(&shape);
  }
  ~TileUnit() {
    asm volatile("" : : "r"(&before_) : "memory");
    if (before_.palette) _tile_loadconfig(&before_);
    else _tile_release();
  }
  TileUnit(const TileUnit&) = delete;

 private:
  struct alignas(64) Shape { uint8_t palette = 0, start = 0, reserved[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; };
  Shape before_;
};
#endif

// s[key][query] for blocks of 16 keys; `depth` tiles of features. Tiles are numbered in the instructions themselves, so that no loop
// can count them. Sums are tiles 0 to 2, keys 3, queries' first features stay in 4 to 6, and the others go by in 7:
// loading a tile takes about as long as multiplying it.
inline void score_tiles(const uint16_t* keys, int64_t blocks, const uint32_t* q, int64_t depth, float* s, int vecs) {
  constexpr int64_t panel = kPanel<float>, row = panel * 4;
  asm volatile("" : : : "memory");
  CLEARHEAD_TILE_LOAD(4, q, row);
  if (vecs > 1) CLEARHEAD_TILE_LOAD(5, q + kTileRows, row);
  if (vecs > 2) CLEARHEAD_TILE_LOAD(6, q + 2 * kTileRows, row);
  for (int64_t block = 0; block < blocks; ++block, s += kTileRows * panel) {
    CLEARHEAD_TILE_ZERO(0);
    CLEARHEAD_TILE_ZERO(1);
    CLEARHEAD_TILE_ZERO(2);
    CLEARHEAD_TILE_LOAD(3, keys, 64);
    CLEARHEAD_TILE_DOT(0, 3, 4);
    if (vecs > 1) CLEARHEAD_TILE_DOT(1, 3, 5);
    if (vecs > 2) CLEARHEAD_TILE_DOT(2, 3, 6);
    keys += kTileSize;
    const uint32_t* pairs = q + kTileRows * panel;
    for (int64_t d = 1; d < depth; ++d, keys += kTileSize, pairs += kTileRows * panel) {
      CLEARHEAD_TILE_LOAD(3, keys, 64);
      CLEARHEAD_TILE_LOAD(7, pairs, row);
      CLEARHEAD_TILE_DOT(0, 3, 7);
      if (vecs > 1) {
        CLEARHEAD_TILE_LOAD(7, pairs + kTileRows, row);
        CLEARHEAD_TILE_DOT(1, 3, 7);
      }
      if (vecs > 2) {
        CLEARHEAD_TILE_LOAD(7, pairs + 2 * kTileRows, row);
        CLEARHEAD_TILE_DOT(2, 3, 7);
      }
    }
    CLEARHEAD_TILE_STORE(0, s, row);
    if (vecs > 1) CLEARHEAD_TILE_STORE(1, s + kTileRows, row);
    if (vecs > 2) CLEARHEAD_TILE_STORE(2, s + 2 * kTileRows, row);
  }
}

// A tile of values, brought to tile `into`, times both parts of the weights, which are in 5 and 6, added to the sums of tile `sum`.
#define CLEARHEAD_TILE_BOTH(sum, into, at) \
  do {                                     \
    CLEARHEAD_TILE_LOAD(into, (at), 64);   \
    CLEARHEAD_TILE_DOT(sum, into, 5);      \
    CLEARHEAD_TILE_DOT(sum, into, 6);      \
  } while (false)

// values[feature][query] += v · weights, the weights in two parts, for 16 queries, `many` blocks of 16 features and `steps` of 32
// keys, whose values are `stride` apart: sums are tiles 0 to 3, and the weights are loaded once for all blocks.
template <int many>
inline void value_tiles(const uint16_t* v, int64_t stride, const uint32_t* weights, const uint32_t* rest, int64_t steps,
                        float* values) {
  constexpr int64_t panel = kPanel<float>, row = panel * 4, next = kTileRows * panel, tile = kTileRows * kTileRows;
  asm volatile("" : : : "memory");
  CLEARHEAD_TILE_LOAD(0, values, row);
  if (many > 1) CLEARHEAD_TILE_LOAD(1, values + next, row);
  if (many > 2) CLEARHEAD_TILE_LOAD(2, values + 2 * next, row);
  if (many > 3) CLEARHEAD_TILE_LOAD(3, values + 3 * next, row);
  for (int64_t step = 0; step < steps; ++step, v += stride, weights += tile, rest += tile) {
    CLEARHEAD_TILE_LOAD(5, weights, 64);
    CLEARHEAD_TILE_LOAD(6, rest, 64);
    CLEARHEAD_TILE_BOTH(0, 4, v);
    if (many > 1) CLEARHEAD_TILE_BOTH(1, 7, v + kTileSize);
    if (many > 2) CLEARHEAD_TILE_BOTH(2, 4, v + 2 * kTileSize);
    if (many > 3) CLEARHEAD_TILE_BOTH(3, 7, v + 3 * kTileSize);
  }
  CLEARHEAD_TILE_STORE(0, values, row);
  if (many > 1) CLEARHEAD_TILE_STORE(1, values + next, row);
  if (many > 2) CLEARHEAD_TILE_STORE(2, values + 2 * next, row);
  if (many > 3) CLEARHEAD_TILE_STORE(3, values + 3 * next, row);
}

// The same for some keys and all blocks of features; of kTileWide queries there is one vector, however many a panel has.
inline void value_tiles(const uint16_t* v, int64_t blocks, const uint32_t* weights, const uint32_t* rest, int64_t keys,
                        float* values, int) {
  constexpr int64_t panel = kPanel<float>;
  const int64_t steps = rounded(keys, kTileDepth) / kTileDepth, stride = blocks * kTileSize;
  int64_t block = 0;
  for (; block + 4 <= blocks; block += 4)
    value_tiles<4>(v + block * kTileSize, stride, weights, rest, steps, values + block * kTileRows * panel);
  v += block * kTileSize, values += block * kTileRows * panel;
  if (blocks - block == 3) value_tiles<3>(v, stride, weights, rest, steps, values);
  if (blocks - block == 2) value_tiles<2>(v, stride, weights, rest, steps, values);
  if (blocks - block == 1) value_tiles<1>(v, stride, weights, rest, steps, values);
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
