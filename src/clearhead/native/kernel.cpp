// The kernels for one instruction set: how a call is cut into tasks. Compiled once for each, with CLEARHEAD_ISA its name.
#include "kernel.h"

#include <memory>

#include "backward.h"
#include "decode.h"
#include "forward.h"
#include "threads.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kPackedBytes = 16 << 20;  // keys and values that are packed at a time, all threads together
constexpr int64_t kPackStep = 16 * kTile;   // keys that one task packs
constexpr int64_t kSplitHeads = 8;           // heads that are differentiated at a time; fewer are split by keys
constexpr int64_t kChunkBlocks = 8;         // blocks of queries that one observer watches, at least
constexpr int64_t kMostChunks = 32;         // observers of a head: each keeps a number for each key

struct Place { int64_t b, head, first, last; };  // a batch row, a head and some of its queries or keys

inline void add_places(std::vector<Place>& places, int64_t b, int64_t head, int64_t count, int64_t step) {
  for (int64_t first = 0; first < count; first += step) places.push_back({b, head, first, std::min(first + step, count)});
}

template <class T> void forward_wave(const Call& call, int64_t start, int64_t stop, int threads) {
  // kept for the next call of this thread: fresh memory costs more than packing does
  static thread_local std::vector<Packed<T>> packed;
  if (int64_t(packed.size()) < stop - start) packed.resize(stop - start);
  Packed<T>* const here = packed.data();
  std::vector<Place> packing, blocks;
  const bool watched = call.wanted.second_look();
  const int64_t block = kPanels * kPanel<T>, all_blocks = (call.queries + block - 1) / block;
  const int64_t chunk = std::max(kChunkBlocks, (all_blocks + kMostChunks - 1) / kMostChunks) * block;
  for (int64_t n = start; n < stop; ++n) {
    const int64_t b = n / call.key_heads, head = n % call.key_heads;
    here[n - start].resize(call);
    add_places(packing, b, head, call.keys, kPackStep);
    for (int64_t h = head * call.group(); h < (head + 1) * call.group(); ++h)
      add_places(blocks, b, h, call.queries, watched ? chunk : block);
  }
  std::vector<std::unique_ptr<Observer<T>>> observers(watched ? blocks.size() : 0);
  const int64_t packs = int64_t(packing.size());
  parallel(packs + int64_t(blocks.size()), threads, [&] {
    return [&, work = Workspace<T>(call)](int64_t task) mutable {
      if (task < packs) {
        const Place& p = packing[task];
        here[p.b * call.key_heads + p.head - start].pack(call, p.b, p.head, p.first, p.last - p.first, work.scratch.data());
        return;
      }
      const size_t n = blocks.size() - 1 - size_t(task - packs);  // under a causal mask the last are the longest: they go first
      const Place& p = blocks[n];
      const Packed<T>& keys = here[p.b * call.key_heads + p.head / call.group() - start];
      if (watched) observers[n] = std::make_unique<Observer<T>>(call, p.b, p.head, p.first, p.last);
      for (int64_t first = p.first; first < p.last; first += block)
        forward_block<T>(call, keys, p.b, p.head, first, std::min(first + block, p.last), work,
                         watched ? observers[n].get() : nullptr);
    };
  }, packs);
  int64_t bytes = std::min<int64_t>(threads, int64_t(blocks.size())) * Workspace<T>(call).bytes();
  int64_t kept = 0;
  for (int64_t n = 0; n < stop - start; ++n) kept += here[n].bytes();
  bytes += kept;
  for (auto& observer : observers) {
    observer->add();
    bytes += observer->bytes();
  }
  call.uses(bytes);
  if (kept > kPackedBytes) std::vector<Packed<T>>().swap(packed);  // a long sequence is not held on to
}

template <class T> void forward_as(const Call& call, int threads) {
  if (decodes(call)) return decode<T>(call, threads);
  const int64_t heads = call.batch * call.key_heads;
  const int64_t bytes = call.keys * (rounded(call.features, kRows) + rounded(call.width, kRows)) * int64_t(sizeof(T));
  const int64_t wave = std::max<int64_t>(1, kPackedBytes / std::max<int64_t>(bytes, 1));
  for (int64_t start = 0; start < heads; start += wave) forward_wave<T>(call, start, std::min(start + wave, heads), threads);
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
        if (denominator == 0) continue;
        read_row<T>(call.out.at(b, h) + i * call.out.row, call.out.type, call.out.col, call.width, output.data());
        read_row<T>(call.dout.at(b, h) + i * call.dout.row, call.dout.type, call.dout.col, call.width, dout.data());
        T spread = 0;
        for (int64_t c = 0; c < call.width; ++c) spread += output[c] * dout[c];
        const T score = static_cast<const T*>(call.peak)[at] * Units<T>(call).to_score;
        total -= T(std::exp(call.sinks[h] - double(score))) / denominator * spread;
      }
      static_cast<T*>(call.dsinks)[b * call.heads + h] = total;
    }
}

// Keys are cut into splits that depend on the call only, each with a dq of its own; they are added up in order.
template <class T> void backward_as(const Call& call, int threads) {
  const int64_t heads = call.batch * call.key_heads, group = call.group(), size = Backward<T>::room(call);
  const int64_t most = heads >= kSplitHeads ? 1 : kSplitHeads / std::max<int64_t>(heads, 1);
  const int64_t step = std::max(rounded((call.keys + most - 1) / most, kBackTile), kBackTile);
  const int64_t splits = std::max<int64_t>((call.keys + step - 1) / step, 1);
  for (int64_t start = 0; start < heads; start += kSplitHeads) {
    const int64_t count = std::min(kSplitHeads, heads - start);
    Buffer<T> dq(count * splits * group * size, T(0));
    call.uses(int64_t(dq.size() * sizeof(T)) + std::min<int64_t>(threads, count * splits) * Backward<T>::bytes(call, step));
    parallel(count * splits, threads, [&] {
      return [&, back = std::make_unique<Backward<T>>(call)](int64_t task) mutable {
        const int64_t n = start + task / splits, first = task % splits * step;
        back->keys(n / call.key_heads, n % call.key_heads, first, std::min(first + step, call.keys), dq.data() + task * group * size);
      };
    });
    parallel(count * group, threads, [&] {
      return [&, back = std::make_unique<Backward<T>>(call)](int64_t task) mutable {
        const int64_t n = start + task / group, g = task % group, h = n % call.key_heads * group + g;
        T* sum = dq.data() + (task / group * splits * group + g) * size;
        for (int64_t s = 1; s < splits; ++s)
          for (int64_t x = 0; x < size; ++x) sum[x] += sum[s * group * size + x];
        back->write(sum, rounded(call.features, kRows), call.features, T(call.scale), call.dq, n / call.key_heads, h, 0, call.queries);
      };
    });
  }
  if (!call.sinks.empty()) sink_gradients<T>(call);
}

void backward(const Call& call, int threads) {
  if (call.wide) backward_as<double>(call, threads);
  else backward_as<float>(call, threads);
}

#define CLEARHEAD_TEXT(x) #x
#define CLEARHEAD_NAME(x) CLEARHEAD_TEXT(x)

const Kernel* kernel() {
  static const Kernel here{CLEARHEAD_NAME(CLEARHEAD_ISA), forward, backward};
  return &here;
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
