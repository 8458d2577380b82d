// A mask as lists of tiles, for kernels on other machines: of each block of queries the tiles of keys of which something is seen.
#pragma once
#include "kernel.h"
#include "sight.h"
#include "threads.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kBlocksOfTask = 32;  // blocks of queries whose lists one thread makes at a time

// Which tiles of `size` keys a stretch touches, and which lie in it whole. A tile that is shorter than the others never does, since
// who reads the lists takes full tiles for as wide as the others.
class Tiles {
 public:
  Tiles(int64_t keys, int64_t size) : keys_(keys), size_(size) {
    while ((int64_t(1) << shift_) < size) ++shift_;
    if ((int64_t(1) << shift_) != size) shift_ = -1;
  }

  // Puts those of one block's stretches behind the lists, and their counts; true where all of its queries see something together.
  bool put(const Stretches& seen, TileLists& lists) {
    std::vector<int32_t>& tiles = lists.tiles;
    const size_t before = tiles.size();
    full_.clear();
    bool together = false;
    int64_t next = 0;  // the first tile that is on neither list yet
    seen.each_with_verdict([&](int64_t from, int64_t end, Verdict verdict) {
      const int64_t touched = std::max(before_or_at(from), next), after = before_or_at(end + size_ - 1);
      int64_t first = after, stop = after;  // of the full ones
      if (verdict == kAll) {
        together = true;
        first = std::min(std::max(before_or_at(from + size_ - 1), touched), after);
        stop = std::max(before_or_at(std::min(end, keys_)), first);
      }
      for (int64_t tile = touched; tile < first; ++tile) tiles.push_back(int32_t(tile));
      for (int64_t tile = first; tile < stop; ++tile) full_.push_back(int32_t(tile));
      for (int64_t tile = stop; tile < after; ++tile) tiles.push_back(int32_t(tile));
      next = std::max(next, after);
    });
    lists.counts.insert(lists.counts.end(), {int32_t(before), int32_t(tiles.size() - before), int32_t(full_.size())});
    tiles.insert(tiles.end(), full_.begin(), full_.end());
    return together;
  }

 private:
  // Divided by the size, which is a power of two nearly always: a division takes as long as all the rest.
  int64_t before_or_at(int64_t key) const { return shift_ >= 0 ? key >> shift_ : key / size_; }

  const int64_t keys_, size_;
  int shift_ = 0;
  std::vector<int32_t> full_;
};

// What all blocks look at, found once for all lists of a call; its mask reads no arrays, which others may write to.
inline const Sights& sights_of(const Call& call, int threads) {
  static char here;  // an address that nobody else has
  if (call.kept.by != &here) call.kept = {&here, std::make_shared<const Sights>(call, 1, threads)};
  return *static_cast<const Sights*>(call.kept.what.get());
}

// The lists of `batch` rows and `heads`, as many as differ. Each task has some blocks, whose lists are then put one behind the other.
inline TileLists tile_lists(const Call& call, const TileCut& cut, int threads) {
  const Sights& sights = sights_of(call, threads);
  const int64_t blocks = (call.queries + cut.rows - 1) / cut.rows, count = cut.batch * cut.heads * blocks;
  std::vector<TileLists> parts((count + kBlocksOfTask - 1) / kBlocksOfTask);
  parallel(call, int64_t(parts.size()), threads, [&](int) {
    return [&, seen = Stretches(), tiles = Tiles(call.keys, cut.columns)](int64_t task) mutable {
      TileLists& part = parts[task];
      for (int64_t n = task * kBlocksOfTask; n < std::min((task + 1) * kBlocksOfTask, count); ++n) {
        const int64_t plane = n / blocks, first = n % blocks * cut.rows;
        sights.see(plane / cut.heads, plane % cut.heads, first, std::min(first + cut.rows, call.queries), seen);
        part.certain = tiles.put(seen, part) && part.certain;
      }
    };
  });
  TileLists found;
  size_t all = 0;
  for (const TileLists& part : parts) all += part.tiles.size();
  found.counts.reserve(3 * count), found.tiles.reserve(all);
  for (const TileLists& part : parts) {
    const int32_t before = int32_t(found.tiles.size());
    for (size_t n = 0; n < part.counts.size(); n += 3)
      found.counts.insert(found.counts.end(), {before + part.counts[n], part.counts[n + 1], part.counts[n + 2]});
    found.tiles.insert(found.tiles.end(), part.tiles.begin(), part.tiles.end());
    found.certain = found.certain && part.certain;
  }
  return found;
}

// The same with blocks and tiles changed about: of each of `tiles` the blocks, ascending, the mixed ones first.
inline TileLists turned(const TileLists& lists, int64_t planes, int64_t blocks, int64_t tiles) {
  TileLists found;
  found.counts.resize(3 * planes * tiles), found.tiles.resize(lists.tiles.size()), found.certain = false;
  const auto each = [&](auto use) {
    for (int64_t row = 0; row < planes * blocks; ++row) {
      const int32_t *const here = lists.counts.data() + 3 * row, start = here[0], mixed = start + here[1], stop = mixed + here[2];
      for (int32_t n = start; n < stop; ++n) use(row / blocks * tiles + lists.tiles[n], int32_t(row % blocks), n < mixed);
    }
  };
  each([&](int64_t line, int32_t, bool mixed) { ++found.counts[3 * line + (mixed ? 1 : 2)]; });
  std::vector<int32_t> next[2];  // where the next one goes: full, mixed
  int32_t start = 0;
  for (int64_t line = 0; line < planes * tiles; ++line) {
    int32_t* const here = found.counts.data() + 3 * line;
    here[0] = start, next[1].push_back(start), next[0].push_back(start + here[1]);
    start += here[1] + here[2];
  }
  each([&](int64_t line, int32_t block, bool mixed) { found.tiles[next[mixed][line]++] = block; });
  return found;
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
