// Scores of bfloat16 by AVX512-BF16: of sixteen sums in float32 in a register, one instruction adds two products to each.
//
// The keys lie as in tiles of AMX, and a pair of a key's features is multiplied with that of sixteen queries. It rounds as two
// multiply-adds do, and takes what is too small for a normal number as zero. Values are not multiplied so: weights would go in two
// parts, which takes as long as float32 does where the instruction is as fast as a multiply-add, and longer where it is not.
#pragma once
#include "dots.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kTileRows = 8, kTileDepth = 16, kTileGroup = 2, kTileSize = kTileRows * kTileDepth, kTileGrain = kTileRows;
constexpr int64_t kTileKeys = kTileDepth, kTileWide = kPanel<float>;  // no values go by tiles
static_assert(kLanes<float> == 16 && kVecs == 3 && kRows == kTileRows);
struct TileUnit {};  // there is nothing to set up

typedef uint32_t LaneOfPairs __attribute__((vector_size(kBytes), aligned(4), may_alias));

template <int vecs> inline void score_tiles_of(const uint16_t* keys, int64_t blocks, const uint32_t* q, int64_t depth, float* s) {
  constexpr int64_t panel = kPanel<float>, lanes = kLanes<float>;
  for (int64_t block = 0; block < blocks; ++block, s += kTileRows * panel) {
    Vec<float> sums[kTileRows][vecs] = {};
    const uint32_t* pairs = q;
    for (int64_t d = 0; d < depth; ++d, keys += kTileSize)
      for (int64_t p = 0; p < kTileDepth; p += 2, pairs += panel) {
        Halves right[vecs];
        for (int j = 0; j < vecs; ++j) right[j] = load_halves(reinterpret_cast<const char*>(pairs + j * lanes));
        for (int64_t i = 0; i < kTileRows; ++i) {
          uint32_t pair;
          std::memcpy(&pair, keys + i * kTileDepth + p, 4);
          const Halves left = (Halves)(pair - LaneOfPairs{});
          for (int j = 0; j < vecs; ++j) sums[i][j] = dot_add<kBFloat16>(sums[i][j], right[j], left);
        }
      }
    for (int64_t i = 0; i < kTileRows; ++i)
      for (int j = 0; j < vecs; ++j) store<float>(s + i * panel + j * lanes, sums[i][j]);
  }
}

// s[key][query] for blocks of eight keys; `depth` tiles of features.
inline void score_tiles(const uint16_t* keys, int64_t blocks, const uint32_t* q, int64_t depth, float* s, int vecs) {
  if (vecs == 3) return score_tiles_of<3>(keys, blocks, q, depth, s);
  if (vecs == 2) return score_tiles_of<2>(keys, blocks, q, depth, s);
  score_tiles_of<1>(keys, blocks, q, depth, s);
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
