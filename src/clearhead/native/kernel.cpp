// The kernels for one instruction set: calls spread over threads. Compiled once for each, with CLEARHEAD_ISA its name.
#include "kernel.h"

#include <memory>
#include <numeric>

#include "backward.h"
#include "decode.h"
#include "tasks.h"
#include "tile_lists.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kKeptBytes = 8 << 20;     // of packed keys and values that are kept for the next call, at most, for each thread
constexpr int64_t kSplitHeads = 64;         // heads from which on each is differentiated whole; fewer are split by keys
constexpr int64_t kFewSplits = 8;           // heads and splits that there is always room for
constexpr int64_t kSplitNumbers = 16 << 20; // numbers in the dq of all splits, beyond which there are only few
constexpr int64_t kAskedNumbers = 6 << 20;  // numbers in queries that are packed for all splits, beyond which it takes little time
constexpr int64_t kKeptShared = 64 << 20;   // bytes of both that are kept for the next call, at most

// What the threads of one call share, a group being a head of keys and the query heads that read it, or a part of their queries.
template <class T> struct Heads {
  const Call& call;
  const std::shared_ptr<const Plan<T>> plan;
  const bool watched = call.wanted.second_look();
  const Sought sought{call};
  const Panels& queries = plan->queries;
  const std::vector<Range>& blocks = plan->blocks.panels;
  const int64_t parts;             // of a head's queries, each with keys and values packed for itself
  const bool as_needed;            // whether a tile of keys is packed by who first sees it
  const std::vector<Range> steps;  // or keys that are packed together, all of them before the first is seen
  const int64_t count = call.batch * call.key_heads * parts, tasks = int64_t(blocks.size()) * call.group() / parts;
  int64_t most = 1;  // panels that go together
  std::vector<Packed<T>*> packed = std::vector<Packed<T>*>(count);
  std::vector<std::vector<std::unique_ptr<Observer<T>>>> observers{size_t(watched ? count : 0)};
  std::atomic<int64_t> observing{0};  // bytes of one group's observers

  Heads(const Call& c, int threads)
      : call(c), plan(Plan<T>::of(c, threads)), parts(parts_of_heads(c, int64_t(blocks.size()), threads)),
        as_needed(!watched && parts == 1 && plan->blocks.sparse),
        steps(as_needed ? std::vector<Range>() : pack_steps(c, parts > 1 ? 1 : threads)) {
    for (const Range& block : blocks) most = std::max(most, std::min(block.last - block.first, kPanels));
  }
};

// What a thread has of its own.
template <class T> struct Room {
  Packed<T> packed;
  Workspace<T> work;
};

// One thread's part: it packs a head's keys and values and goes on to the queries that read them, while they are in its cache.
template <class T> struct HeadWorker {
  Heads<T>& all;
  Packed<T>& own;
  Workspace<T>& work;

  HeadWorker(Heads<T>& heads, Room<T>& room) : all(heads), own(room.packed), work(room.work) { work.begin(heads.call, heads.most); }

  int64_t batch_of(int64_t n) const { return n / all.parts / all.call.key_heads; }
  int64_t head_of(int64_t n) const { return n / all.parts % all.call.key_heads; }

  void begin(int64_t n) {
    const std::vector<uint8_t>& tiles = all.plan->tiles;
    own.resize(all.call, batch_of(n), head_of(n), tiles.empty() ? tiles_seen(all.call, batch_of(n), head_of(n)) : tiles,
               all.plan->blocks.readers * all.call.group() / all.parts, all.plan->blocks.sparse);
    all.packed[n] = &own;
    if (all.watched) all.observers[n].resize(all.tasks);
  }

  void prepare(int64_t n, int64_t step) {
    const Range keys = all.steps[step];
    all.packed[n]->pack(all.call, batch_of(n), head_of(n), keys.first, keys.last, work.scratch.data());
  }

  void run(int64_t n, int64_t task) {
    const int64_t many = int64_t(all.blocks.size());
    task = task * all.parts + n % all.parts;  // in turn: the first see most keys, under many a mask
    const int64_t b = batch_of(n), h = head_of(n) * all.call.group() + task / many;
    if (all.watched) task = task / many * many + many - 1 - task % many;  // the last see most keys, under many a mask
    const Range panels = all.blocks[task % many];
    Observer<T>* observer = nullptr;
    if (all.watched) {
      all.observers[n][task] = std::make_unique<Observer<T>>(all.call, all.sought, b, h, all.queries.first(panels.first),
                                                             all.queries.first(panels.last));
      observer = all.observers[n][task].get();
    }
    const int64_t some = all.watched ? Stash<T>::panels(all.call.keys, kPanels) : kPanels;
    for (int64_t first = panels.first; first < panels.last; first += some)
      forward_block<T>(all.call, all.plan->sights, all.queries, all.plan->seen, *all.packed[n], all.as_needed, b, h, first,
                       std::min(first + some, panels.last), work, observer);
  }

  // All queries of a group are done: what was summed over chunks of them is added up in their order.
  void end(int64_t n) {
    if (!all.watched) return;
    int64_t bytes = 0;
    for (auto& observer : all.observers[n]) {
      observer->add();
      bytes += observer->bytes();
      observer.reset();
    }
    all.observing = bytes;
  }
};

template <class T> void forward_as(const Call& call, int threads) {
  if (decodes<T>(call)) return decode<T>(call, threads);
  Heads<T> heads(call, threads);
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(threads, heads.count * heads.tasks));
  // Kept for the next call of this thread: fresh memory costs more than packing does. While a call has them nobody else does,
  // since a signal's handler may call again; a call that is interrupted frees them.
  static thread_local std::vector<Room<T>> kept_rooms;
  std::vector<Room<T>> rooms = std::move(kept_rooms);
  if (int64_t(rooms.size()) < workers) rooms.resize(workers);
  Room<T>* const room = rooms.data();
  parallel_groups(call, heads.count, int64_t(heads.steps.size()), heads.tasks, heads.plan->blocks.alike, int(workers),
                  [&](int64_t worker) { return HeadWorker<T>(heads, room[worker]); });
  if (heads.count) {
    const int64_t each = room[0].work.bytes() + (heads.watched ? room[0].work.stash.bytes() : 0);
    const int64_t head = heads.packed[0]->bytes() + heads.observing;
    call.uses(workers * each + std::min(workers, heads.count) * head + heads.plan->bytes());
  }
  int64_t kept = 0;
  for (auto& one : rooms) kept += one.packed.bytes() + one.work.bytes() + one.work.stash.bytes();
  if (kept <= kKeptBytes * workers) kept_rooms = std::move(rooms);  // a long sequence is not held on to
}

void forward(const Call& call, int threads) {
  if (call.wide) forward_as<double>(call, threads);
  else forward_as<float>(call, threads);
}

// A sink's gradient is −Σ its weight · spread, over the queries of its head.
template <class T> void sink_gradients(const Call& call) {
  std::vector<T> output(call.width), dout(call.width);
  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t h = 0; h < call.heads; ++h) {
      T total = 0;
      for (int64_t i = 0; i < call.queries; ++i) {
        const int64_t at = call.row_of(b, h) + i;
        const T denominator = static_cast<const T*>(call.total)[at];
        if (denominator == 0) {  // the sink, if there is one, is all that the log-sum-exp has
          if (call.dlse && call.sinks[h] > -std::numeric_limits<double>::infinity()) total += static_cast<const T*>(call.dlse)[at];
          continue;
        }
        if (i % kTile == 0) call.stop.check();
        read_row<T>(call.out.at(b, h) + i * call.out.row, call.out.type, call.out.col, call.width, output.data());
        read_row<T>(call.dout.at(b, h) + i * call.dout.row, call.dout.type, call.dout.col, call.width, dout.data());
        T spread = 0;
        for (int64_t c = 0; c < call.width; ++c) spread += output[c] * dout[c];
        if (call.dlse) spread -= static_cast<const T*>(call.dlse)[at];
        const Units<T> units(call);
        const T peak = static_cast<const T*>(call.peak)[at], score = peak * units.to_score;
        // a sink far above all scores is the peak itself, and may be infinite
        const T extra = peak == in_units(call.sinks[h], units) ? T(1) : T(std::exp(call.sinks[h] - double(score)));
        total -= extra / denominator * spread;
      }
      static_cast<T*>(call.dsinks)[b * call.heads + h] = total;
    }
}

// What gradients are computed in: by each thread, and by all of them.
template <class T> struct BackwardRooms {
  std::vector<Backward<T>> own;
  Buffer<T> dq, packed;

  int64_t bytes() const {
    return std::accumulate(own.begin(), own.end(), int64_t(0), [](int64_t sum, const auto& one) { return sum + one.bytes(); });
  }
  int64_t shared_bytes() const { return int64_t((dq.size() + packed.size()) * sizeof(T)); }  // some may be an earlier call's
};

// Room for so many numbers, of which none has a value; they are counted.
template <class T> T* room_for_all(Buffer<T>& room, int64_t numbers, int64_t& counted) {
  counted += numbers;
  if (int64_t(room.size()) < numbers) room.clear(), room.resize(numbers);
  return room.data();
}

// The sum of some numbers of each part, which may be the first of them.
template <class T> void add_up(const std::vector<const T*>& parts, int64_t count, T* out) {
  constexpr int64_t lanes = kLanes<T>;
  static_assert(kPanel<T> * kRows % (2 * lanes) == 0);
  if (parts.empty()) return void(std::fill_n(out, count, T(0)));
  for (int64_t x = 0; x < count; x += 2 * lanes) {
    Vec<T> one = load<T>(parts[0] + x), two = load<T>(parts[0] + x + lanes);
    for (size_t n = 1; n < parts.size(); ++n) one += load<T>(parts[n] + x), two += load<T>(parts[n] + x + lanes);
    store<T>(out + x, one), store<T>(out + x + lanes, two);
  }
}

// Few heads are cut into splits of their keys, which depend on the call only, each with a dq of its own; those are added up in
// order. Queries of which there are not too many are then packed once, for all splits.
template <class T> void backward_as(const Call& call, int threads) {
  const Sights sights(call, kLanes<T>, threads);
  const BackwardPanels<T> panels(call, sights);
  const int64_t heads = call.batch * call.key_heads, group = call.group(), size = panels.room(call), many = panels.blocks();
  const int64_t room_for = std::max(kFewSplits, kSplitNumbers / std::max<int64_t>(heads * group * size, 1) * heads);
  const int64_t most = std::max<int64_t>(std::min(kSplitHeads, room_for) / std::max<int64_t>(heads, 1), 1);
  const int64_t step = std::max(rounded((call.keys + most - 1) / most, kBackTile), kBackTile);
  const int64_t splits = std::max<int64_t>((call.keys + step - 1) / step, 1);
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(threads, heads * splits));
  static thread_local BackwardRooms<T> kept_rooms;  // as in the forward pass
  BackwardRooms<T> rooms = std::move(kept_rooms);
  if (int64_t(rooms.own.size()) < workers) rooms.own.resize(workers);
  Backward<T>* const room = rooms.own.data();
  std::vector<Together<T>> asked;
  int64_t shared = 0;  // numbers that all threads have
  const auto worker = [&](int number) -> Backward<T>& {
    Backward<T>& back = room[number];
    back.begin(call, sights, panels, asked.empty() ? nullptr : asked.data());
    return back;
  };
  if (splits == 1) {
    parallel(call, heads, int(workers), [&](int number) {
      return [&, back = &worker(number)](int64_t n) { back->head(n / call.key_heads, n % call.key_heads); };
    });
  } else {
    const int64_t row = kPanel<T> * rounded(call.features, kRows), each = Together<T>::numbers(call), blocks = heads * group * many;
    if (blocks * each <= kAskedNumbers) {
      T* const packed = room_for_all(rooms.packed, blocks * each, shared);
      for (int64_t n = 0; n < blocks; ++n) asked.emplace_back(call, packed + n * each);
      parallel(call, blocks, int(workers), [&](int number) {
        return [&, back = &worker(number)](int64_t n) {
          back->ask(asked[n], n / many / call.heads, n / many % call.heads, n % many);
        };
      });
    }
    T* const dq = room_for_all(rooms.dq, heads * splits * group * size, shared);
    std::vector<uint8_t> touched(heads * splits * group * many);  // which blocks of queries see any keys of a split
    parallel(call, heads * splits, int(workers), [&](int number) {
      return [&, back = &worker(number)](int64_t task) {
        const int64_t n = task / splits, first = task % splits * step;
        T* const part = dq + task * group * size;
        back->keys(n / call.key_heads, n % call.key_heads, first, std::min(first + step, call.keys), part,
                   touched.data() + task * group * many);
      };
    });
    parallel(call, blocks, int(workers), [&](int number) {
      return [&, back = &worker(number)](int64_t task) {
        const int64_t n = task / many / group, g = task / many % group;
        const Range some{task % many * kTogether, std::min(task % many * kTogether + kTogether, panels.count())};
        T* const sum = dq + (n * splits * group + g) * size + some.first * row;
        const int64_t count = (some.last - some.first) * row;
        std::vector<const T*> parts;
        for (int64_t s = 0; s < splits; ++s)
          if (touched[((n * splits + s) * group + g) * many + task % many]) parts.push_back(sum + s * group * size);
        add_up(parts, count, sum);
        back->write_queries(sum, n / call.key_heads, n % call.key_heads * group + g, some.first, some.last);
      };
    });
  }
  call.uses(rooms.bytes() + shared * int64_t(sizeof(T)));
  if (rooms.bytes() <= kKeptBytes * workers && rooms.shared_bytes() <= kKeptShared) kept_rooms = std::move(rooms);
  if (!call.sinks.empty()) sink_gradients<T>(call);
}

void backward(const Call& call, int threads) {
  if (call.wide) backward_as<double>(call, threads);
  else backward_as<float>(call, threads);
}

// Every size at whose border something happens: the tests take cases on both sides of each of them from here. What is counted
// while decoding has an axis of its own, since few queries go another way.
template <class T> std::vector<Size> sizes_as() {
  constexpr int64_t panel = kPanel<T>, lanes = kLanes<T>, block = kPanels * panel;
  std::vector<Size> found{{"keys", "rows", kRows},
          {"keys", "sum_rows", kSumRows},
          {"keys", "mask_step", kMaskStep},
          {"keys", "back_tile", kBackTile},
          {"keys", "tile", kTile},
          {"keys", "splits", kSplitHeads * kBackTile},
          {"keys", "pack_step", kPackStep},
          {"seen keys", "reach", kReach - kMaskStep},
          {"seen keys", "tile", kTile},
          {"queries", "few_queries", kFewQueries<T>},
          {"queries", "lanes", lanes},
          {"queries", "panel", panel},
          {"queries", "small", kSmallPanels * panel},
          {"queries", "as_keys_lie", kFewPanels * panel},
          {"queries", "block", block},
          {"queries", "together", kTogether * panel},
          {"queries", "tasks", 2 * kManyTasks * panel},
          {"queries", "chunk", kChunkPanels<T> * panel},
          {"queries", "chunks", kMostChunks * kChunkPanels<T> * panel},
          {"queries", "chunk_blocks", kMostChunks * block},
          {"features", "turned", 4},
          {"features", "lanes", lanes},
          {"features", "rows", kRows},
          {"features", "sum_columns", kSumColumns<T>},
          {"heads", "split_heads", kSplitHeads},
          {"decoded keys", "together", kKeys},
          {"decoded keys", "alone", kAlone},
          {"decoded keys", "exponentials", kPowers * lanes},
          {"decoded keys", "shared", kShared},
          {"decoded keys", "piece", kPiece},
          {"decoded heads", "together", kQueries},
          {"decoded heads", "least_piece", kPieceRows * (kPiece / kShared)},
          {"decoded features", "lanes", lanes},
          {"decoded features", "pair", 2 * lanes},
          {"decoded features", "four", 4 * lanes},
          {"decoded features", "eight", 8 * lanes},
          {"decoded features", "stretch", kStretch * lanes}};
  if (kAsItLies)
    for (const Size& size : {Size{"decoded heads", "abreast", kAbreast<T>}, Size{"decoded heads", "lanes", lanes},
                             Size{"decoded heads", "panel", panel}, Size{"abreast keys", "rows", kRows},
                             Size{"abreast keys", "strip", kStripRows}, Size{"abreast keys", "shared", kShared},
                             Size{"abreast keys", "piece", kPieces * kShared}, Size{"abreast features", "lanes", lanes},
                             Size{"abreast features", "four", 4 * lanes}})
      found.push_back(size);
  if (kDotted<kBFloat16> || kDotted<kFloat16>) found.push_back({"decoded features", "dots", 2 * kStretch * lanes});
  if (kByTiles<T>)
    for (const Size& size : {Size{"shared keys", "tile_rows", kTileRows}, Size{"shared keys", "tile_stretch", kTileStretch},
                             Size{"shared keys", "piece", kPiece}, Size{"shared features", "tile_depth", kTileDepth},
                             Size{"shared features", "two", 2 * kTileDepth}, Size{"shared features", "four", 4 * kTileDepth},
                             Size{"decoded heads", "tile_rows", kTileRows}, Size{"features", "tile_blocks", 4 * kTileRows}})
      found.push_back(size);
  if (kTiled)
    for (const char* axis : {"keys", "features"})
      for (const Size& size : {Size{axis, "tile_rows", kTileRows}, Size{axis, "tile_depth", kTileDepth},
                               Size{axis, "tile_grain", kTileGrain}})
        found.push_back(size);
  return found;
}

std::vector<Size> sizes(bool wide) { return wide ? sizes_as<double>() : sizes_as<float>(); }

TileLists lists(const Call& call, const TileCut& cut, int threads) {
  TileLists found = tile_lists(call, cut, threads);
  if (!cut.turned) return found;
  const int64_t blocks = (call.queries + cut.rows - 1) / cut.rows, tiles = (call.keys + cut.columns - 1) / cut.columns;
  return turned(found, cut.batch * cut.heads, blocks, tiles);
}

#define CLEARHEAD_TEXT(x) #x
#define CLEARHEAD_NAME(x) CLEARHEAD_TEXT(x)

const Kernel* kernel() {
  static const Kernel here{CLEARHEAD_NAME(CLEARHEAD_ISA), forward, backward, sizes, observes, lists};
  return &here;
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
