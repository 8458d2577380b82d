// How a call is cut into tasks: panels of queries, blocks of panels, parts of heads, and the steps in which keys are packed.
#pragma once
#include <memory>

#include "forward.h"
#include "threads.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kPackStep = kMaskStep;    // keys that one thread packs at a time, at least; at most a tile of them
constexpr int64_t kPackShares = 2;          // steps for each thread that a head has
constexpr int64_t kRepeated = 64 << 10;     // numbers in a head's keys and values up to which each of its threads packs them
constexpr int64_t kSmallPanels = 2;         // panels of queries in a small task
constexpr int64_t kManyTasks = 256;         // panels of a call from which on a task has more than one
constexpr int64_t kChunk = 96;              // queries that one observer watches, at least
constexpr int64_t kKeptStretches = 1 << 16; // of keys that panels see, that are kept for all heads and for the next call
constexpr int64_t kMostChunks = 32;         // observers of a head: each keeps a number for each key
constexpr double kFeeding = 0.4;            // vectors whose products take as long as reading what a panel is multiplied with
constexpr double kAlike = 1.25;             // times as many keys as another task sees, that one may see and be much the same work
constexpr double kWorthwhile = 0.85;        // of a call's time, that narrower panels have to save

struct Range { int64_t first, last; };

inline std::vector<Range> cut(int64_t count, int64_t step) {
  std::vector<Range> parts;
  for (int64_t first = 0; first < count; first += step) parts.push_back({first, std::min(first + step, count)});
  return parts;
}

// The steps in which a head's keys are packed: tiles of them, or less where a head has several threads, which then need not wait
// for one.
inline std::vector<Range> pack_steps(const Call& call, int threads) {
  const int64_t heads = std::max<int64_t>(call.batch * call.key_heads, 1), tiles = (call.keys + kTile - 1) / kTile;
  const int64_t parts = std::max<int64_t>(kPackShares * ((threads + heads - 1) / heads) / std::max<int64_t>(tiles, 1), 1);
  const int64_t step = threads > heads ? rounded((std::min(call.keys, kTile) + parts - 1) / parts, kPackStep) : kTile;
  std::vector<Range> steps;
  for (int64_t tile = 0; tile < call.keys; tile += kTile)
    for (const Range& part : cut(std::min(kTile, call.keys - tile), step)) steps.push_back({tile + part.first, tile + part.last});
  return steps;
}

// How many queries a panel has: as many as it is wide, or whole vectors less where threads then end together. Each lane's sums
// are the same. An observer needs panels that depend on the call only.
template <class T> int64_t panel_length(const Call& call, int threads) {
  if (threads <= 1 || call.wanted.second_look()) return kPanel<T>;
  const auto effort = [&](int64_t vecs) {
    const int64_t each = vecs * kLanes<T>, panels = call.batch * call.heads * ((call.queries + each - 1) / each);
    return double((panels + threads - 1) / threads) * (double(vecs) + kFeeding);
  };
  int64_t best = kVecs;
  for (int64_t vecs = kVecs - 1; vecs > 0; --vecs)
    if (effort(vecs) < std::min(kWorthwhile * effort(kVecs), effort(best))) best = vecs;
  return best * kLanes<T>;
}

// Panels of queries that one observer watches, at least.
template <class T> constexpr int64_t kChunkPanels = std::max<int64_t>(kChunk / kPanel<T>, 1);

// Tasks, each some panels of queries; how many queries see a key, on average, where that was counted; whether that is less than half
// of them; and whether most tasks see about as many keys, so that those that come one after the other are neighbours.
struct Blocks {
  std::vector<Range> panels;
  int64_t readers;
  bool sparse = false, alike = false;
};

// The panels of a head's queries in tasks, in the order in which they are taken: those that see most keys first. A call of few
// panels has a task for each, so that many threads have something to do; longer ones have tasks that share what is in the
// cache, as long as they see no more than others do. Those taken last are cut small, so that threads end together. An
// observer needs chunks that depend on the call only, in the order of queries. What panels see is kept in `seen`, where all batch
// rows and heads see alike.
template <class T>
Blocks query_blocks(const Call& call, const Sights& sights, const Panels& queries, std::vector<Stretches>& seen, int threads) {
  const int64_t panels = queries.count(), all = (panels + kPanels - 1) / kPanels;
  if (call.wanted.second_look()) {
    const int64_t least = (panels + kMostChunks - 1) / kMostChunks;
    return {cut(panels, std::max(kChunkPanels<T>, least > kPanels ? rounded(least, kPanels) : least)), call.queries};
  }
  const int64_t some = std::clamp<int64_t>(call.batch * call.heads * panels / kManyTasks, 1, kPanels);
  std::vector<Range> blocks = cut(std::min(panels, some), std::min(some, kSmallPanels));
  if (some == 1 || call.mask.empty()) {
    for (int64_t first = some; first < panels; first += some) blocks.push_back({first, std::min(first + some, panels)});
    std::reverse(blocks.begin(), blocks.end());
    return {std::move(blocks), call.queries};
  }
  std::vector<int64_t> before(panels + 1);  // keys that the panels before it see, in the first batch row and head
  std::vector<int64_t> parts(panels);       // in how many stretches a panel sees them
  if (sights.alike()) seen.resize(panels);
  parallel(call, all, threads, [&](int) {
    return [&, other = Stretches()](int64_t task) mutable {
      for (int64_t n = task * kPanels; n < std::min((task + 1) * kPanels, panels); ++n) {
        sights.see(0, 0, queries.first(n), queries.last(n), other);
        before[n + 1] = other.count(), parts[n] = other.size();
        if (!seen.empty()) seen[n] = other;
      }
    };
  });
  if (std::accumulate(parts.begin(), parts.end(), int64_t(0)) > kKeptStretches) std::vector<Stretches>().swap(seen);
  int64_t pairs = 0;
  for (int64_t n = 0; n < panels; ++n) pairs += before[n + 1] * queries.length(n), before[n + 1] += before[n];
  const int64_t most = before[panels] * some / panels * 3 / 2;  // what a task of average length sees, and half as much again
  blocks.clear();
  for (int64_t first = 0, last; first < panels; first = last) {
    for (last = first + 1; last < std::min(first + some, panels) && before[last + 1] - before[first] <= most;) ++last;
    blocks.push_back({first, last});
  }
  const auto sees = [&](const Range& block) { return before[block.last] - before[block.first]; };
  std::stable_sort(blocks.begin(), blocks.end(), [&](const Range& x, const Range& y) { return sees(x) > sees(y); });
  const size_t quarter = blocks.size() / 4;
  const bool alike = sees(blocks[quarter]) <= kAlike * double(sees(blocks[blocks.size() - 1 - quarter]));
  std::vector<Range> small;  // those taken last
  for (size_t n = blocks.size() / 2; n < blocks.size(); ++n)
    for (const Range& part : cut(blocks[n].last - blocks[n].first, kSmallPanels))
      small.push_back({blocks[n].first + part.first, blocks[n].first + part.last});
  blocks.resize(blocks.size() / 2);
  blocks.insert(blocks.end(), small.begin(), small.end());
  const int64_t readers = (pairs + call.keys - 1) / std::max<int64_t>(call.keys, 1);
  return {std::move(blocks), readers, 2 * readers < call.queries, alike};
}

// Where there are fewer heads than threads and few keys, each thread packs them for itself: what another core has just written
// takes longer to come than to be made again.
inline int64_t parts_of_heads(const Call& call, int64_t blocks, int threads) {
  const int64_t heads = std::max<int64_t>(call.batch * call.key_heads, 1), tasks = blocks * call.group();
  if (call.wanted.second_look() || call.keys * (call.features + call.width) > kRepeated) return 1;
  for (int64_t parts = (threads + heads - 1) / heads; parts > 1; --parts)
    if (tasks % parts == 0) return parts;
  return 1;
}

// What is found of a call's mask before any thread begins; a call that comes again has it already.
template <class T> struct Plan {
  const Sights sights;
  const int64_t length;  // of a panel, at most
  const Panels queries;
  std::vector<Stretches> seen;  // by each panel of queries, whatever the batch row and head; empty where that is not known
  const Blocks blocks;
  const std::vector<uint8_t> tiles;  // of keys, which of them somebody sees, whatever the batch row and head; empty likewise

  Plan(const Call& call, int threads)
      : sights(call, kLanes<T>, threads), length(panel_length<T>(call, threads)),
        queries(call.queries, length, Borders(call, sights, kLanes<T>).of_queries(), kLanes<T>),
        blocks(query_blocks<T>(call, sights, queries, seen, threads)),
        tiles(sights.alike() && call.batch ? tiles_seen(call, 0, 0) : std::vector<uint8_t>()) {}

  int64_t bytes() const {
    int64_t all = 0;
    for (const Stretches& one : seen) all += one.size() * int64_t(sizeof(Stretch));
    return all;
  }

  static std::shared_ptr<const Plan> of(const Call& call, int threads) {
    static char looks[2];  // without a second look and with one, for each set and type: addresses that nobody else has
    const char* const by = looks + call.wanted.second_look();
    if (call.kept.by == by) {
      auto kept = std::static_pointer_cast<const Plan>(call.kept.what);
      if (kept->length == panel_length<T>(call, threads)) return kept;
    }
    auto made = std::make_shared<const Plan>(call, threads);
    if (!made->sights.reads_arrays()) call.kept = {by, made};  // others may write to those
    return made;
  }
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
