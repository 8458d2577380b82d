// What keys are given, summed over queries: sums[key][column] += Σ tile[key][query] · columns[query][column]. These are dk and dv.
//
// Tiles are read as the other products leave them, queries side by side: a number of each of a block's keys, taken from a lane,
// goes with all columns of its query.
#pragma once
#include "micro.h"
#include "pack.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kBackTile = 192;  // keys in a tile: whole blocks of either kind, in every instruction set
constexpr int64_t kTogether = 8;    // panels of queries over which is summed at once

// A block is kSumRows keys and kSumVecs vectors of columns: kRows × kVecs accumulators again, in another shape.
constexpr int kSumVecs = kVecs == 3 ? 4 : kVecs, kSumRows = kRows * kVecs / kSumVecs;
template <class T> constexpr int kSumColumns = kSumVecs * kLanes<T>;
static_assert(kBackTile % kRows == 0 && kBackTile % kSumRows == 0);

#if defined(CLEARHEAD_NEON)
// Six keys × four registers of columns, with the registers named: v8–v31 hold the sums, four registers a key; v0–v5 one vector of
// queries of each of the keys, v6 and v7 half of one query's columns.
#define CLEARHEAD_KEYS(of, lane, from, a, b, c, d, e, f)                                                                    \
  "fmla v" #a of ", " from of ", v0" lane "\nfmla v" #b of ", " from of ", v1" lane "\nfmla v" #c of ", " from of ", v2" lane \
  "\nfmla v" #d of ", " from of ", v3" lane "\nfmla v" #e of ", " from of ", v4" lane "\nfmla v" #f of ", " from of ", v5" lane "\n"
#define CLEARHEAD_QUERY(of, lane)                                                                                          \
  "ldp q6, q7, [%[b]], #32\n"                                                                                              \
  CLEARHEAD_KEYS(of, lane, "v6", 8, 12, 16, 20, 24, 28) CLEARHEAD_KEYS(of, lane, "v7", 9, 13, 17, 21, 25, 29)               \
  "ldp q6, q7, [%[b]], #32\n"                                                                                              \
  CLEARHEAD_KEYS(of, lane, "v6", 10, 14, 18, 22, 26, 30) CLEARHEAD_KEYS(of, lane, "v7", 11, 15, 19, 23, 27, 31)
#define CLEARHEAD_QUERIES(queries)                                                                                         \
  asm volatile(CLEARHEAD_EACH_PAIR(CLEARHEAD_LOAD)                                                                         \
               "1:\nsubs %[panels], %[panels], #1\ncsel %[left], %[last], %[vecs], eq\n2:\n"                              \
               "ldr q0, [%[a]]\nldr q1, [%[a], #48]\nldr q2, [%[a], #96]\nldr q3, [%[a], #144]\nldr q4, [%[a], #192]\n"    \
               "ldr q5, [%[a], #240]\nadd %[a], %[a], #16\n" queries                                                       \
               "subs %[left], %[left], #1\nb.ne 2b\nadd %[a], %[a], %[next]\ncbnz %[panels], 1b\n"                        \
               CLEARHEAD_EACH_PAIR(CLEARHEAD_STORE)                                                                        \
               : [a] "+r"(tile), [b] "+r"(columns), [panels] "+r"(panels), [left] "=&r"(left)                              \
               : [c] "r"(sums), [last] "r"(last), [vecs] "r"(int64_t(kVecs)), [next] "r"(next)                             \
               : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",   \
                 "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28",  \
                 "v29", "v30", "v31")

// `last` counts vectors of queries; there is one of either.
template <class T> inline void add_block_in_lanes(const T* tile, const T* columns, int64_t panels, int64_t last, T* sums) {
  static_assert(kSumRows == 6 && kSumVecs == 4 && kPanel<T> * sizeof(T) == 48);
  constexpr int64_t next = (kBackTile - 1) * 48;
  int64_t left;
  if constexpr (sizeof(T) == 4)
    CLEARHEAD_QUERIES(CLEARHEAD_QUERY(".4s", ".s[0]") CLEARHEAD_QUERY(".4s", ".s[1]") CLEARHEAD_QUERY(".4s", ".s[2]")
                      CLEARHEAD_QUERY(".4s", ".s[3]"));
  else CLEARHEAD_QUERIES(CLEARHEAD_QUERY(".2d", ".d[0]") CLEARHEAD_QUERY(".2d", ".d[1]"));
}
#endif

// The same by vectors, each sum with a number of its own, as in `micro.h`; `last` counts queries.
template <class T, int... n>
CLEARHEAD_INLINE void add_block_in(const T* __restrict tile, const T* __restrict columns, int64_t panels, int64_t last,
                                   T* __restrict sums, std::integer_sequence<int, n...>) {
  constexpr int lanes = kLanes<T>, panel = kPanel<T>;
  Vec<T> acc[] = {load<T>(sums + n * lanes)...};
  for (; panels > 0; --panels, tile += kBackTile * panel)
    for (int64_t d = 0, depth = panels == 1 ? last : panel; d < depth; ++d, columns += kSumColumns<T>)
      ((acc[n] += tile[n / kSumVecs * panel + d] * load<T>(columns + n % kSumVecs * lanes)), ...);
  (store<T>(sums + n * lanes, acc[n]), ...);
}

// Panels of queries, tiles of them one behind the other, and their columns; all panels but the last are whole, which has `last`
// queries.
template <class T>
inline void add_block(const T* __restrict tile, const T* __restrict columns, int64_t panels, int64_t last, T* __restrict sums) {
#if defined(CLEARHEAD_NEON)
  if (panels > 0 && last > 0) return add_block_in_lanes<T>(tile, columns, panels, (last + kLanes<T> - 1) / kLanes<T>, sums);
#endif
  add_block_in<T>(tile, columns, panels, last, sums, std::make_integer_sequence<int, kSumRows * kSumVecs>());
}

// The sums of some keys: [key block][column block][key][column], so that what one block of either adds up lies together.
template <class T> class KeySums {
 public:
  static constexpr int64_t wide = kSumColumns<T>;

  void begin(int64_t keys, int64_t columns) {
    blocks_ = rounded(columns, wide) / wide;
    sums_.assign(rounded(keys, kSumRows) * blocks_ * wide, T(0));
  }

  // Block `n` of keys, which is where `tile` is, against some panels of queries.
  void add(int64_t n, const T* tile, const T* columns, int64_t panels, int64_t last) {
    T* const sums = sums_.data() + n * blocks_ * kSumRows * wide;
    for (int64_t i = 0; i < blocks_; ++i)
      add_block<T>(tile, columns + i * kTogether * kPanel<T> * wide, panels, last, sums + i * kSumRows * wide);
  }

  T& at(int64_t key, int64_t column) {
    return sums_[((key / kSumRows * blocks_ + column / wide) * kSumRows + key % kSumRows) * wide + column % wide];
  }

  // All of them times a factor, into the rows of a view.
  void write(T factor, int64_t count, int64_t columns, T* scratch, const View& view, int64_t b, int64_t head, int64_t first) {
    const bool direct = view.col == int64_t(sizeof(T)) && view.type == kOwn<T>;
    for (int64_t key = 0; key < count; ++key) {
      char* const at = view.at(b, head) + (first + key) * view.row;
      T* const row = direct ? reinterpret_cast<T*>(at) : scratch;
      for (int64_t c = 0; c < columns; c += wide) {
        const T* const from = &this->at(key, c);
        for (int64_t x = 0; x < std::min(wide, columns - c); ++x) row[c + x] = from[x] * factor;
      }
      if (!direct) write_row<T>(row, columns, at, view.type, view.col);
    }
  }

  int64_t bytes() const { return int64_t(sums_.size() * sizeof(T)); }

 private:
  int64_t blocks_ = 0;  // of columns
  Buffer<T> sums_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
