// What gradients go by: panels of queries and of keys, and what a panel of queries knows and sees of a tile of keys.
#pragma once
#include "forward.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kBackTile = 192;  // keys in a tile: whole blocks and whole panels, in every instruction set
constexpr int64_t kTogether = 8;    // panels of queries over which dk and dv are summed at once
static_assert(kBackTile <= kTile);  // the scorer remembers what was allowed in a tile of at most that many keys

// Keys of a tile that a panel of queries sees, and where what is computed of them lies: side by side, and not at their places.
struct Run { int64_t start, first, last, place; bool mixed; };  // it is seen from `start` on, and computed from a whole block on

// A panel of queries: packed, with what the softmax knows of each.
template <class T> struct Asking {
  Buffer<T> q, dout;  // [feature][query]
  Rows<T> rows;
  alignas(64) T spread[kPanel<T>];
  int64_t first = 0, last = 0;
  int64_t at = 0;            // queries of the panels before it that are taken together
  Stretches seen;            // the keys that any of them may see
  std::vector<Run> runs;     // of the tile
  uint8_t odd[kPanel<T>];    // for each: the query or its gradient holds a number that is not finite
  bool alive = false;        // one of them attends to something here
  bool spoiled = false;      // something of some query is not finite

  int64_t count() const { return last - first; }
  int vecs() const { return int((count() + kLanes<T> - 1) / kLanes<T>); }
};

// How a call is cut for its gradients: panels of queries; panels of keys, none of which lies across two tiles.
template <class T> struct BackwardPanels {
  Panels queries, keys;
  int64_t most = 1;  // panels of keys in a tile, at most

  BackwardPanels(const Call& call, const Sights& sights) {
    const Borders borders(call, sights, kLanes<T>);
    queries = Panels(call.queries, kPanel<T>, borders.of_queries());
    std::vector<int64_t> of_keys = borders.of_keys();
    for (int64_t j = kBackTile; j < call.keys; j += kBackTile) of_keys.push_back(j);
    std::sort(of_keys.begin(), of_keys.end());
    keys = Panels(call.keys, kPanel<T>, of_keys);
    for (int64_t j = 0; j < call.keys; j += kBackTile)
      most = std::max(most, keys.from(std::min(j + kBackTile, call.keys)) - keys.from(j));
  }

  // Room for dq of one head: [query panel][feature][query].
  int64_t room(const Call& call) const { return queries.count() * kPanel<T> * rounded(call.features, kRows); }
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
