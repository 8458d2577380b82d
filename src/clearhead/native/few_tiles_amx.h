// Few queries of bfloat16 that share keys, by AMX: keys and values are read as they lie.
#pragma once
#include "tiles_amx.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kTileStretch = 4 * kTileRows;  // rows that are asked for before they are read, and that go together
constexpr int64_t kTileFew = kTileRows / 4;      // queries whose weights are in one tile

// Rows of bfloat16 as they lie, in tiles of 16 of them × 32 columns, a stretch at a time. What does not fill a tile is copied and
// filled up with zeros: nothing behind a row's end is read, and nothing behind the last row.
class LyingTiles {
 public:
  void begin(int64_t columns) {
    columns_ = columns;
    whole_ = columns / kTileDepth;
    depth_ = rounded(columns, kTileDepth) / kTileDepth;
    filled_.resize(kTileStretch * depth_ * kTileDepth);
  }

  int64_t depth() const { return depth_; }  // tiles across

  // Rows of a stretch, at most kTileStretch, and what will be read after them.
  void take(const char* rows, int64_t stride, int64_t count, const char* next, int64_t next_stride) {
    rows_ = rows, stride_ = stride, next_ = next, next_stride_ = next_stride;
    blocks_ = count / kTileRows;
    for (int64_t r = whole_ < depth_ ? 0 : blocks_ * kTileRows; r < rounded(count, kTileRows); ++r)
      for (int64_t d = r < blocks_ * kTileRows ? whole_ : 0; d < depth_; ++d)
        fill(rows + (r < count ? r : 0) * stride + d * 2 * kTileDepth, r < count ? columns_ - d * kTileDepth : 0,
             filled_.data() + (r * depth_ + d) * kTileDepth);
    asm volatile("" : : : "memory");  // it is in memory before it is read
  }

  struct Place { const char* at; int64_t stride; };
  Place place(int64_t block, int64_t d) const {
    if (block < blocks_ && d < whole_) return {rows_ + block * kTileRows * stride_ + d * 2 * kTileDepth, stride_};
    return {reinterpret_cast<const char*>(filled_.data() + (block * kTileRows * depth_ + d) * kTileDepth), depth_ * 2 * kTileDepth};
  }

  // The same tile of what will be read is asked for.
  void ask(int64_t block, int64_t d) const {
    if (!next_) return;
    const char* const at = next_ + block * kTileRows * next_stride_ + d * 2 * kTileDepth;
    for (int64_t i = 0; i < kTileRows; ++i) __builtin_prefetch(at + i * next_stride_);
  }

 private:
  static void fill(const char* row, int64_t count, uint16_t* out) {
#if defined(CLEARHEAD_AVX512)
    const __mmask32 some = count < kTileDepth ? (uint32_t(1) << count) - 1 : ~uint32_t(0);
    _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(some, row));
#else
    count = std::min(count, kTileDepth);
    std::memcpy(out, row, 2 * count);
    std::fill(out + count, out + kTileDepth, uint16_t(0));
#endif
  }

  int64_t columns_ = 0, whole_ = 0, depth_ = 0, stride_ = 0, next_stride_ = 0;
  int64_t blocks_ = 0;  // that are whole
  const char *rows_ = nullptr, *next_ = nullptr;
  Buffer<uint16_t> filled_;
};

// A tile of rows as they lie, times another or the other times it, added to sums.
#define CLEARHEAD_TILE_LYING(n, rows, block, d)            \
  do {                                                     \
    const LyingTiles::Place here = (rows).place(block, d); \
    CLEARHEAD_TILE_LOAD(n, here.at, here.stride);          \
    (rows).ask(block, d);                                  \
  } while (false)
#define CLEARHEAD_TILE_KEYS(sums, n, block)            \
  do {                                                 \
    CLEARHEAD_TILE_LYING(n, keys_, block, d);          \
    CLEARHEAD_TILE_DOT(sums, n, 7);                    \
  } while (false)
#define CLEARHEAD_TILE_VALUES(sums, n, block, d)       \
  do {                                                 \
    CLEARHEAD_TILE_LYING(n, values_, block, d);        \
    CLEARHEAD_TILE_DOT(sums, 4, n);                    \
  } while (false)

// Few queries over keys and values as they lie.
//
// Keys are the left factor and queries the right one, as above. Values are the right factor, a key in each row of a tile: side by
// side lie features 2n and 2n + 1 of one key, whose products would be added up. So a query has four rows of weights: each weight
// beside a zero, which leaves the even features, a zero beside each weight, which leaves the odd ones, and both of what is left of
// the weights. Where a value is not finite the zeros spoil its neighbour, too: such sums are refused.
class FewTiles {
 public:
  static constexpr int64_t kLeast = 2;  // queries that share keys: one alone waits for memory more than for arithmetic

  // True where a call's products go this way; `rows` are the queries that share keys.
  static bool takes(const Call& call, int64_t rows) {
    if (call.wide || call.q.type != kBFloat16 || call.k.type != kBFloat16 || call.v.type != kBFloat16) return false;
    return rows >= kLeast && call.k.col == 2 && call.v.col == 2 && call.features && call.width;
  }

  void begin(const Call& call, int64_t rows) {
    count_ = rows, width_ = call.width;
    keys_.begin(call.features);
    values_.begin(call.width);
    q_.assign(rounded(rows, kTileRows) * keys_.depth() * kTileDepth / 2, uint32_t(0));
    row_.assign(keys_.depth() * kTileDepth, uint16_t(0));
    products_.resize(kTileStretch * kTileRows);
    weights_.resize(kTileStretch * kTileRows);
  }

  // Query r of those that follow, from where it lies.
  void ask(int64_t r, const char* at, int64_t stride, int64_t features) {
    if (stride == 2) std::memcpy(row_.data(), at, 2 * features);
    else
      for (int64_t c = 0; c < features; ++c) std::memcpy(row_.data() + c, at + c * stride, 2);
    uint32_t* const out = q_.data() + r / kTileRows * keys_.depth() * kTileSize / 2 + r % kTileRows;
    for (int64_t pair = 0; pair < int64_t(row_.size()) / 2; ++pair) std::memcpy(out + pair * kTileRows, row_.data() + 2 * pair, 4);
  }

  // s[query][key], `step` apart, for whole blocks of 16 keys and four queries; `next` are the rows that will be read after these.
  void scores(const char* rows, int64_t stride, int64_t count, const char* next, int64_t next_stride, float* s, int64_t step) {
    for (int64_t from = 0; from < count; from += kTileStretch)
      for (int64_t r = 0; r < count_; r += kTileRows) {
        const int64_t some = blocks_of(from, count);
        stretch(keys_, rows, stride, from, count, r == 0, next, next_stride);
        score(r / kTileRows, some);
        for (int64_t k = 0; k < some * kTileRows; k += 4)
          for (int64_t i = 0; i < std::min(kTileRows, count_ - r); i += 4) {
            const float* const at = products_.data() + k * kTileRows + i;
            turn4(four(at), four(at + kTileRows), four(at + 2 * kTileRows), four(at + 3 * kTileRows), s + (r + i) * step + from + k,
                  step);
          }
      }
  }

  // sums[query][feature], `room` apart, of weights that lie as scores do, zero past the last key; false where some are not finite.
  bool values(const float* s, int64_t step, const char* rows, int64_t stride, int64_t count, const char* next, int64_t next_stride,
              float* sums, int64_t room) {
    bool finite = true;
    for (int64_t r = 0; r < count_; r += kTileFew)
      for (int64_t d = 0; d < values_.depth(); d += kTileFew) {
        const int64_t across = std::min(kTileFew, values_.depth() - d);
        zero();
        for (int64_t from = 0; from < count; from += kTileStretch) {
          const int64_t some = blocks_of(from, count);
          split(s + r * step + from, step, std::min(kTileFew, count_ - r), some);
          stretch(values_, rows, stride, from, count, r == 0, next, next_stride);
          if (across > 2) weigh_wide(d, across, some);
          else weigh(d, across, some);
        }
        finite = add_up(r, d, across, sums, room) && finite;
      }
    return finite;
  }

 private:
  // Of a stretch, of which the last may not be full.
  static int64_t blocks_of(int64_t from, int64_t count) {
    return rounded(std::min(kTileStretch, count - from), kTileRows) / kTileRows;
  }

  // Rows are asked for by those that come `first`; the others find them in a cache.
  static void stretch(LyingTiles& tiles, const char* rows, int64_t stride, int64_t from, int64_t count, bool first,
                      const char* next, int64_t next_stride) {
    const int64_t some = std::min(kTileStretch, count - from), after = from + kTileStretch;
    if (after < count) next = rows + after * stride, next_stride = stride;
    tiles.take(rows + from * stride, stride, some, first ? next : nullptr, next_stride);
  }

  // products[key][query] of a stretch, for 16 queries.
  void score(int64_t group, int64_t blocks) {
    zero();
    const uint32_t* q = q_.data() + group * keys_.depth() * kTileSize / 2;
    for (int64_t d = 0; d < keys_.depth(); ++d, q += kTileSize / 2) {
      CLEARHEAD_TILE_LOAD(7, q, 64);
      CLEARHEAD_TILE_KEYS(0, 4, 0);
      if (blocks > 1) CLEARHEAD_TILE_KEYS(1, 5, 1);
      if (blocks > 2) CLEARHEAD_TILE_KEYS(2, 6, 2);
      if (blocks > 3) CLEARHEAD_TILE_KEYS(3, 4, 3);
    }
    keep();
  }

  // The weights of a stretch, for each of its blocks the four rows of each query; those past the last query zero.
  void split(const float* s, int64_t step, int64_t queries, int64_t blocks) {
    constexpr uint32_t half = 0x8000, upper = 0xffff0000;
    for (int64_t k = 0; k < blocks * kTileRows; k += kTileRows)
      for (int64_t i = 0; i < kTileFew; ++i) {
        Vec<float> weight{};
        if (i < queries) weight = load<float>(s + i * step + k);
        const WordVec more = ((WordVec)weight + half) & upper;
        const WordVec less = ((WordVec)(weight - (Vec<float>)more) + half) & upper;
        WordVec* const out = reinterpret_cast<WordVec*>(weights_.data() + (k + 4 * i) * kTileRows);
        out[0] = more >> 16, out[1] = more;
        out[2] = less >> 16, out[3] = less;
      }
  }

  const uint32_t* weights(int64_t block) const { return weights_.data() + block * kTileRows * kTileRows; }

  // Up to four tiles of features, each with its sums.
  void weigh_wide(int64_t d, int64_t across, int64_t blocks) {
    for (int64_t block = 0; block < blocks; ++block) {
      CLEARHEAD_TILE_LOAD(4, weights(block), 64);
      CLEARHEAD_TILE_VALUES(0, 5, block, d);
      CLEARHEAD_TILE_VALUES(1, 6, block, d + 1);
      CLEARHEAD_TILE_VALUES(2, 7, block, d + 2);
      if (across > 3) CLEARHEAD_TILE_VALUES(3, 5, block, d + 3);
    }
  }

  // Up to two; every other block has sums of its own, so that fewer wait for the one before.
  void weigh(int64_t d, int64_t across, int64_t blocks) {
    for (int64_t block = 0; block < blocks; block += 2) {
      CLEARHEAD_TILE_LOAD(4, weights(block), 64);
      CLEARHEAD_TILE_VALUES(0, 5, block, d);
      if (across > 1) CLEARHEAD_TILE_VALUES(1, 6, block, d + 1);
      if (block + 1 == blocks) break;
      CLEARHEAD_TILE_LOAD(4, weights(block + 1), 64);
      CLEARHEAD_TILE_VALUES(2, 7, block + 1, d);
      if (across > 1) CLEARHEAD_TILE_VALUES(3, 5, block + 1, d + 1);
    }
  }

  // What the tiles hold for up to four queries; true where all of it is finite.
  bool add_up(int64_t r, int64_t d, int64_t across, float* sums, int64_t room) {
    keep();
    bool finite = true;
    for (int64_t i = 0; i < std::min(kTileFew, count_ - r); ++i) {
      for (int64_t x = 0; x < across; ++x) {
        float both[kTileDepth];
        for (int64_t odd = 0; odd < 2; ++odd) {
          const float* const one = products_.data() + ((x * kTileRows) + 4 * i + odd) * kTileRows;
          const float* const two = one + 2 * kTileRows * kTileRows;
          constexpr int64_t rest = 2 * kTileRows;
          for (int64_t n = 0; n < kTileRows; ++n)
            both[2 * n + odd] = across > 2 ? one[n] + one[rest + n] : (one[n] + two[n]) + (one[rest + n] + two[rest + n]);
        }
        const int64_t first = (d + x) * kTileDepth;
        std::copy_n(both, std::min(kTileDepth, width_ - first), sums + (r + i) * room + first);
        finite = finite && !is_odd<float>(both, kTileDepth);
      }
    }
    return finite;
  }

  static void zero() {
    CLEARHEAD_TILE_ZERO(0);
    CLEARHEAD_TILE_ZERO(1);
    CLEARHEAD_TILE_ZERO(2);
    CLEARHEAD_TILE_ZERO(3);
  }

  // The sums, one tile after the other.
  void keep() {
    CLEARHEAD_TILE_STORE(0, products_.data(), 64);
    CLEARHEAD_TILE_STORE(1, products_.data() + kTileRows * kTileRows, 64);
    CLEARHEAD_TILE_STORE(2, products_.data() + 2 * kTileRows * kTileRows, 64);
    CLEARHEAD_TILE_STORE(3, products_.data() + 3 * kTileRows * kTileRows, 64);
  }

  int64_t count_ = 0, width_ = 0;
  LyingTiles keys_, values_;
  Buffer<uint16_t> row_;
  Buffer<uint32_t> q_;        // [16 queries][32 features][pair of features][query]
  Buffer<uint32_t> weights_;  // [16 keys][row of a query][key]
  Buffer<float> products_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
