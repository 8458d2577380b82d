// What a first look computed, kept for the second: the exponentials of a block of queries, tile after tile. Looking at them again
// takes one product each, and neither the scores nor their exponentials anew.
#pragma once
#include "softmax.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// Bytes for each thread, at most: in a cache, or not far from one. Wide panels have room for 16,384 keys, narrow ones for more.
constexpr int64_t kStashBytes = kPanel<float> > 24 ? 13 << 18 : 2 << 20;
// keys, or features of the values, that products take together: the room is for whole blocks of them, of either kind
constexpr int64_t kDepth = kTiled ? kTileRows : kRows;
static_assert(kDepth % kRows == 0);

// Keys of a tile that a panel sees, and where their scores lie.
struct Scored { int64_t first, last, place; bool mixed; };

template <class T> class Stash {
 public:
  static constexpr int panel = kPanel<T>;

  // Panels of queries that go together, of at most so many: as have room here, where there is room for one.
  static int64_t panels(int64_t keys, int64_t most) {
    const int64_t some = kStashBytes / bytes_of(keys + 2 * kMaskStep + kDepth);
    return some ? std::min(some, most) : most;
  }

  // For a block of panels which see so much; used only where there is room for it.
  bool begin(const std::vector<Stretches>& seen, int64_t many) {
    int64_t all = 0;
    starts_.clear();
    for (int64_t n = 0; n < many; ++n) {
      starts_.push_back(all);
      // parts begin at whole blocks of keys, and take with them what is short between two
      all += seen[n].count() + 2 * kMaskStep * seen[n].size() + kDepth;
    }
    if (bytes_of(all) > kStashBytes) return false;
    // whole steps at a time: what grows little by little leaves holes behind
    constexpr int64_t step = kStashBytes / 8 / int64_t(sizeof(T));
    if (int64_t(numbers_.size()) < all * panel) numbers_.clear(), numbers_.resize(rounded(all * panel, step));
    tiles_.resize(many);
    for (auto& tiles : tiles_) tiles.clear();
    next_.assign(many, 0);
    return true;
  }

  // Where a panel's next tile goes.
  T* room(int64_t place) {
    const auto& tiles = tiles_[place];
    return numbers_.data() + (tiles.empty() ? starts_[place] : tiles.back().at + tiles.back().count) * panel;
  }

  // What lies there now was computed with these as the largest scores.
  void keep(int64_t place, int64_t tile, int64_t count, const std::vector<Scored>& parts, const T* largest) {
    tiles_[place].push_back({tile, (room(place) - numbers_.data()) / panel, count, parts, {}});
    std::copy(largest, largest + panel, tiles_[place].back().largest);
  }

  // `use(weights, part)` for the parts of a tile that a panel sees, tiles in their order; `rows` are what it ended with.
  template <class Use> void show(int64_t place, int64_t tile, const Rows<T>& rows, T factor, Use use) {
    size_t& next = next_[place];
    if (next == tiles_[place].size() || tiles_[place][next].tile != tile) return;
    const Tile& one = tiles_[place][next++];
    T* const weights = numbers_.data() + one.at * panel;
    rows.weigh_again(weights, one.count, factor, one.largest);
    for (const Scored& part : one.parts) use(weights + part.place * panel, part);
  }

  int64_t bytes() const { return int64_t(numbers_.size() * sizeof(T)); }

 private:
  static int64_t bytes_of(int64_t keys) { return keys * panel * int64_t(sizeof(T)); }

  struct Tile {
    int64_t tile, at, count;
    std::vector<Scored> parts;
    T largest[panel];
  };
  Buffer<T> numbers_;                     // [panel of the block][key][query]
  std::vector<int64_t> starts_;           // of each panel's
  std::vector<std::vector<Tile>> tiles_;  // of each panel
  std::vector<size_t> next_;              // of those that are to be shown
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
