// Products of bfloat16 by AMX: tiles of 16 × 16 sums in float32, of which one instruction adds 32 products to each.
//
// The layout is that of the other products: scores lie as [key][query] and values as [feature][query], a panel of queries wide,
// so that a vector of the panel is a tile. Keys are the left factor as they lie, in tiles of 16 keys × 32 features; queries the
// right one, in pairs of features; values, turned, are the left factor of the second product, in tiles of 16 features × 32 keys,
// and weights the right one, in pairs of keys. A weight has 24 digits, bfloat16 8: it goes as the sum of two, so that what is
// lost is less than float32 sums lose over some hundred keys. Tiles without the instruction, by hand, are for tests.
#pragma once
#include "pack.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kTileRows = 16, kTileDepth = 32, kTileSize = kTileRows * kTileDepth;
constexpr int64_t kTileKeys = 128;  // keys whose weights, in two parts, stay in the first cache while all features are summed
static_assert(kTileKeys % kTileDepth == 0);
#if defined(CLEARHEAD_AMX)
constexpr bool kTiled = true;
static_assert(kLanes<float> == kTileRows && kVecs == 3);
#else
constexpr bool kTiled = false;  // nothing of this is used
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

// values[feature][query] += v · weights, the weights in two parts, for `steps` of 32 keys and blocks of 16 features.
inline void value_tiles(const uint16_t* v, int64_t blocks, const uint32_t* weights, const uint32_t* rest, int64_t steps,
                        float* values, int vecs) {
  constexpr int64_t panel = kPanel<float>, row = panel * 4;
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

// The weights of `count` keys as pairs of keys, in two parts whose sum they are; zeros up to whole tiles.
inline void split_weights(const float* s, int64_t count, uint32_t* weights, uint32_t* rest) {
  constexpr int64_t panel = kPanel<float>, lanes = kLanes<float>;
  constexpr uint32_t half = 0x8000, upper = 0xffff0000;
  const auto part = [](Vec<float> x, Vec<float>& left) {
    const WordVec bits = ((WordVec)x + half) & upper;
    left = x - (Vec<float>)bits;
    return bits;
  };
  for (int64_t k = 0; k < rounded(count, kTileDepth); k += 2)
    for (int64_t x = 0; x < panel; x += lanes) {
      Vec<float> even{}, odd{}, left;
      if (k < count) even = load<float>(s + k * panel + x);
      if (k + 1 < count) odd = load<float>(s + (k + 1) * panel + x);
      const WordVec e = part(even, even), o = part(odd, odd);
      const WordVec less_e = part(even, left), less_o = part(odd, left);
      *reinterpret_cast<WordVec*>(weights + k / 2 * panel + x) = e >> 16 | o;
      *reinterpret_cast<WordVec*>(rest + k / 2 * panel + x) = less_e >> 16 | less_o;
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
  bool found = false;
  for (int64_t c = 0; c < count; ++c) found |= (row[c] & 0x7f80) == 0x7f80;
  return found;
}

// Eight rows of eight numbers, turned: three times, the first half of the rows laid between the second half.
inline void turn8(const uint16_t* in, int64_t stride, uint16_t* out, int64_t apart) {
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
  for (int i = 0; i < 8; ++i) *reinterpret_cast<Eight*>(out + i * apart) = rows[i];
}

// The keys and values of one head in tiles. A key with numbers that are not finite has zeros for values: they are added to
// those who see it, one by one.
struct TilePacked {
  bool used = false;
  Buffer<uint16_t> k;  // [16 keys][32 features][key][feature]
  Buffer<uint16_t> v;  // [32 keys][16 features][feature][key]
  int64_t depth = 0, blocks = 0;

  static bool takes(const Call& call) {
    const auto reads_values = [](const Asked& one) { return one.name == "removal"; };  // and they lie otherwise here
    return kTiled && !call.wide && call.q.type == kBFloat16 && call.k.type == kBFloat16 && call.v.type == kBFloat16 &&
           std::none_of(call.wanted.of_weights.begin(), call.wanted.of_weights.end(), reads_values);
  }

  void resize(const Call& call, int64_t count) {
    used = takes(call);
    if (!used) return;
    depth = rounded(call.features, kTileDepth) / kTileDepth;
    blocks = rounded(call.width, kTileRows) / kTileRows;
    k.resize(rounded(count, kTileDepth) / kTileRows * depth * kTileSize);
    v.resize(rounded(count, kTileDepth) / kTileDepth * blocks * kTileSize);
  }

  const uint16_t* keys(int64_t at) const { return k.data() + at / kTileRows * depth * kTileSize; }
  const uint16_t* values(int64_t at) const { return v.data() + at / kTileDepth * blocks * kTileSize; }
  int64_t bytes() const { return int64_t(2 * (k.size() + v.size())); }

  // Keys [first, first + count), whose place is `at`, a multiple of 32; `odd` is that of the first.
  void pack(const Call& call, int64_t b, int64_t head, int64_t first, int64_t count, int64_t at, uint8_t* odd) {
    Buffer<uint16_t> row(depth * kTileDepth), rows(kTileDepth * blocks * kTileRows);
    for (int64_t j = 0; j < count; ++j) {
      copy_row(call.k.at(b, head) + (first + j) * call.k.row, call.k.col, call.features, int64_t(row.size()), row.data());
      odd[j] |= is_odd(row.data(), call.features);
      uint16_t* out = k.data() + (at + j) / kTileRows * depth * kTileSize + (at + j) % kTileRows * kTileDepth;
      for (int64_t d = 0; d < depth; ++d) std::memcpy(out + d * kTileSize, row.data() + d * kTileDepth, 2 * kTileDepth);
    }
    const int64_t across = blocks * kTileRows;
    for (int64_t j0 = 0; j0 < count; j0 += kTileDepth) {
      for (int64_t j = 0; j < kTileDepth; ++j) {
        uint16_t* const here = rows.data() + j * across;
        if (j0 + j < count) copy_row(call.v.at(b, head) + (first + j0 + j) * call.v.row, call.v.col, call.width, across, here);
        if (j0 + j < count) odd[j0 + j] |= is_odd(here, call.width);
        if (j0 + j >= count || odd[j0 + j]) std::fill_n(here, across, uint16_t(0));
      }
      uint16_t* out = v.data() + (at + j0) / kTileDepth * blocks * kTileSize;
      for (int64_t c = 0; c < across; c += 8)
        for (int64_t j = 0; j < kTileDepth; j += 8) turn8(rows.data() + j * across + c, across, out + c * kTileDepth + j, kTileDepth);
    }
  }
};

// Queries [first, last) as panels of pairs of features: out[panel][pair][query], those past the end zero.
inline void pack_pairs(const Call& call, int64_t b, int64_t h, int64_t first, int64_t last, int64_t depth, uint32_t* out) {
  constexpr int64_t panel = kPanel<float>;
  const int64_t pairs = depth * kTileRows;
  Buffer<float> rows(panel * pairs);  // pairs of numbers, which are only moved
  const float* lines[panel];
  for (int64_t x = 0; x < panel; ++x) lines[x] = rows.data() + x * pairs;
  for (int64_t i0 = first; i0 < last; i0 += panel, out += panel * pairs) {
    std::fill(rows.begin(), rows.end(), 0.0f);
    for (int64_t i = i0; i < std::min(i0 + panel, last); ++i)
      copy_row(call.q.at(b, h) + i * call.q.row, call.q.col, call.features, 2 * pairs,
               reinterpret_cast<uint16_t*>(rows.data() + (i - i0) * pairs));
    turn<float>(lines, panel, pairs, reinterpret_cast<float*>(out), panel);
  }
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
