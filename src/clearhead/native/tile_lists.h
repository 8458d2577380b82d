// A mask as lists of tiles, for kernels on other machines: of each block of queries the tiles of keys of which something is seen.
#pragma once
#include "kernel.h"
#include "sight.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// Which tiles of `size` keys a stretch touches, and which lie in it whole. A tile that is shorter than the others never does, since
// who reads the lists takes full tiles for as wide as the others.
class Tiles {
 public:
  Tiles(int64_t keys, int64_t size) : keys_(keys), size_(size) {
    while ((int64_t(1) << shift_) < size) ++shift_;
    if ((int64_t(1) << shift_) != size) shift_ = -1;
  }

  // Puts those of one block's stretches behind `tiles`, the mixed ones before the full ones, each in order; how many are mixed.
  int32_t put(const Stretches& seen, std::vector<int32_t>& tiles) {
    const size_t before = tiles.size();
    full_.clear();
    int64_t next = 0;  // the first tile that is on neither list yet
    seen.each_with_verdict([&](int64_t from, int64_t end, Verdict verdict) {
      const int64_t touched = std::max(before_or_at(from), next), after = before_or_at(end + size_ - 1);
      int64_t first = after, stop = after;  // of the full ones
      if (verdict == kAll) {
        first = std::min(std::max(before_or_at(from + size_ - 1), touched), after);
        stop = std::max(before_or_at(std::min(end, keys_)), first);
      }
      for (int64_t tile = touched; tile < first; ++tile) tiles.push_back(int32_t(tile));
      for (int64_t tile = first; tile < stop; ++tile) full_.push_back(int32_t(tile));
      for (int64_t tile = stop; tile < after; ++tile) tiles.push_back(int32_t(tile));
      next = std::max(next, after);
    });
    const size_t mixed = tiles.size() - before;
    tiles.insert(tiles.end(), full_.begin(), full_.end());
    return int32_t(mixed);
  }

 private:
  // Divided by the size, which is a power of two nearly always: a division takes as long as all the rest.
  int64_t before_or_at(int64_t key) const { return shift_ >= 0 ? key >> shift_ : key / size_; }

  const int64_t keys_, size_;
  int shift_ = 0;
  std::vector<int32_t> full_;
};

// The lists of `batch` rows and `heads`, as many as differ.
inline TileLists tile_lists(const Call& call, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  const Sights sights(call, rows, 1);
  const int64_t blocks = (call.queries + rows - 1) / rows;
  TileLists found;
  found.starts.reserve(batch * heads * blocks + 1), found.mixed.reserve(batch * heads * blocks);
  found.starts.push_back(0);
  Stretches seen;
  Tiles tiles(call.keys, columns);
  for (int64_t plane = 0; plane < batch * heads; ++plane)
    for (int64_t block = 0; block < blocks; ++block) {
      sights.see(plane / heads, plane % heads, block * rows, std::min((block + 1) * rows, call.queries), seen);
      found.mixed.push_back(tiles.put(seen, found.tiles));
      found.starts.push_back(int32_t(found.tiles.size()));
    }
  return found;
}

// The same with blocks and tiles changed about: of each of `tiles` the blocks, ascending, the mixed ones first.
inline TileLists turned(const TileLists& lists, int64_t planes, int64_t blocks, int64_t tiles) {
  TileLists found;
  found.starts.resize(planes * tiles + 1), found.mixed.resize(planes * tiles), found.tiles.resize(lists.tiles.size());
  const auto each = [&](auto use) {
    for (int64_t row = 0; row < planes * blocks; ++row)
      for (int32_t n = lists.starts[row]; n < lists.starts[row + 1]; ++n)
        use(row / blocks * tiles + lists.tiles[n], int32_t(row % blocks), n < lists.starts[row] + lists.mixed[row]);
  };
  each([&](int64_t line, int32_t, bool mixed) { ++found.starts[line + 1], found.mixed[line] += mixed; });
  for (int64_t line = 0; line < planes * tiles; ++line) found.starts[line + 1] += found.starts[line];
  std::vector<int32_t> next[2] = {{found.starts.begin(), found.starts.end() - 1}, {}};  // where the next one goes: mixed, full
  for (int64_t line = 0; line < planes * tiles; ++line) next[1].push_back(next[0][line] + found.mixed[line]);
  each([&](int64_t line, int32_t block, bool mixed) { found.tiles[next[mixed ? 0 : 1][line]++] = block; });
  return found;
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
