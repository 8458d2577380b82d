// The one product in the inner loop: C (kRows × panel) = or += A (depth × kRows)ᵀ · B (depth × panel), in registers.
#pragma once
#include <algorithm>
#include <utility>

#include "isa.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// `vecs` are those of the panel's vectors that hold queries; `a(i, d)` is A's number in row i. Each sum has a number of its own, `n`:
// of an array that loops go over, GCC keeps a copy in memory, written before the products and after them. With `ask`, what comes
// after this A, packed as it is, is asked for meanwhile.
template <class T, bool add, int vecs, bool ask, class A, int... n>
CLEARHEAD_INLINE void micro_in(A a, const T* __restrict b, int64_t depth, T* __restrict c, const T* after,
                               std::integer_sequence<int, n...>) {
  constexpr int lanes = kLanes<T>, panel = kPanel<T>;
  Vec<T> acc[] = {(add ? load<T>(c + n / vecs * panel + n % vecs * lanes) : Vec<T>{})...};
  for (int64_t d = 0; d < depth; ++d, b += panel) {
    if constexpr (ask) __builtin_prefetch(after + d * kRows);
    ((acc[n] += a(n / vecs, d) * load<T>(b + n % vecs * lanes)), ...);
  }
  (store<T>(c + n / vecs * panel + n % vecs * lanes, acc[n]), ...);
}

template <class T, bool add, int vecs, bool ask = false, class A>
CLEARHEAD_INLINE void micro_of(A a, const T* __restrict b, int64_t depth, T* __restrict c, const T* after = nullptr) {
  micro_in<T, add, vecs, ask>(a, b, depth, c, after, std::make_integer_sequence<int, kRows * vecs>());
}

template <class T, bool add, int vecs = kVecs>
inline void micro(const T* __restrict a, const T* __restrict b, int64_t depth, T* __restrict c, const T* after) {
  const auto number = [a](int i, int64_t d) CLEARHEAD_LAMBDA { return a[d * kRows + i]; };
  if (after) micro_of<T, add, vecs, true>(number, b, depth, c, after);
  else micro_of<T, add, vecs>(number, b, depth, c);
}

#if defined(CLEARHEAD_NEON)
// The same for 8 × 12 floats, or 8 × 6 doubles, with the registers named: compilers copy accumulators around this loop, which
// costs a third of its speed. v8–v31 hold the sums, three registers a row; v0–v2 a row of B, v4 to v7 eight of A.
static_assert(kRows == 8 && kPanel<float> == 12 && kPanel<double> == 6);
#define CLEARHEAD_ROW(op, of, x, y, z, factor)                                                              \
  op " v" #x of ", v0" of ", " factor "\n"                                                                  \
  op " v" #y of ", v1" of ", " factor "\n"                                                                  \
  op " v" #z of ", v2" of ", " factor "\n"
#define CLEARHEAD_ROWS(op, of, a, b, c, d, e, f, g, h)                                                      \
  "ldp q0, q1, [%[b]], #32\n"                                                                               \
  "ldr q2, [%[b]], #16\n"                                                                                   \
  "prfm pldl1keep, [%[a], #384]\n"                                                                          \
  CLEARHEAD_ROW(op, of, 8, 9, 10, a) CLEARHEAD_ROW(op, of, 11, 12, 13, b)                                   \
  CLEARHEAD_ROW(op, of, 14, 15, 16, c) CLEARHEAD_ROW(op, of, 17, 18, 19, d)                                 \
  CLEARHEAD_ROW(op, of, 20, 21, 22, e) CLEARHEAD_ROW(op, of, 23, 24, 25, f)                                 \
  CLEARHEAD_ROW(op, of, 26, 27, 28, g) CLEARHEAD_ROW(op, of, 29, 30, 31, h)
#define CLEARHEAD_FLOATS(op)                                                                                \
  "ldp q4, q5, [%[a]], #32\n"                                                                               \
  CLEARHEAD_ROWS(op, ".4s", "v4.s[0]", "v4.s[1]", "v4.s[2]", "v4.s[3]", "v5.s[0]", "v5.s[1]", "v5.s[2]", "v5.s[3]")
#define CLEARHEAD_DOUBLES(op)                                                                               \
  "ldp q4, q5, [%[a]], #32\nldp q6, q7, [%[a]], #32\n"                                                      \
  CLEARHEAD_ROWS(op, ".2d", "v4.d[0]", "v4.d[1]", "v5.d[0]", "v5.d[1]", "v6.d[0]", "v6.d[1]", "v7.d[0]", "v7.d[1]")
#define CLEARHEAD_EACH_PAIR(f)                                                                              \
  f(8, 9, 0) f(10, 11, 32) f(12, 13, 64) f(14, 15, 96) f(16, 17, 128) f(18, 19, 160) f(20, 21, 192)         \
  f(22, 23, 224) f(24, 25, 256) f(26, 27, 288) f(28, 29, 320) f(30, 31, 352)
#define CLEARHEAD_LOAD(x, y, at) "ldp q" #x ", q" #y ", [%[c], #" #at "]\n"
#define CLEARHEAD_STORE(x, y, at) "stp q" #x ", q" #y ", [%[c], #" #at "]\n"
#define CLEARHEAD_MICRO(start, step)                                                                        \
  asm volatile(start "cbz %[d], 2f\n1:\n" step                                                              \
               "subs %[d], %[d], #1\nb.ne 1b\n2:\n" CLEARHEAD_EACH_PAIR(CLEARHEAD_STORE)                    \
               : [a] "+r"(a), [b] "+r"(b), [d] "+r"(depth)                                                  \
               : [c] "r"(c)                                                                                 \
               : "cc", "memory", "v0", "v1", "v2", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",      \
                 "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", \
                 "v27", "v28", "v29", "v30", "v31")

// The first step of a fresh sum is a product: zeros would take as long as a step does.
#define CLEARHEAD_MICROS(T, step)                                                                           \
  template <> inline void micro<T, false>(const T* __restrict a, const T* __restrict b, int64_t depth, T* __restrict c, const T*) { \
    if (depth-- == 0) return void(std::memset(c, 0, kRows * kPanel<T> * sizeof(T)));                        \
    CLEARHEAD_MICRO(step("fmul"), step("fmla"));                                                            \
  }                                                                                                         \
  template <> inline void micro<T, true>(const T* __restrict a, const T* __restrict b, int64_t depth, T* __restrict c, const T*) { \
    CLEARHEAD_MICRO(CLEARHEAD_EACH_PAIR(CLEARHEAD_LOAD), step("fmla"));                                     \
  }
CLEARHEAD_MICROS(float, CLEARHEAD_FLOATS)
CLEARHEAD_MICROS(double, CLEARHEAD_DOUBLES)
constexpr bool kNamedRegisters = true;
#else
constexpr bool kNamedRegisters = false;
#endif

// Many blocks of rows against one panel: A is packed block after block, C likewise. `after` is the A that the next product is of,
// where it lies elsewhere and may not be in the cache.
template <class T, bool add, int vecs>
inline void product_of(const T* a, int64_t blocks, const T* b, int64_t depth, int64_t stride, T* c, const T* after) {
  for (int64_t i = 1; i <= blocks; ++i, a += stride, c += kRows * kPanel<T>)
    micro<T, add, vecs>(a, b, depth, c, after && i < blocks ? a + stride : after);
}

// The same for a panel of which the first vectors alone are wanted.
template <class T, bool add>
inline void product(const T* a, int64_t blocks, const T* b, int64_t depth, int64_t stride, T* c, int vecs = kVecs,
                    const T* after = nullptr) {
  static_assert(kVecs == 2 || kVecs == 3);
  if (vecs == kVecs) return product_of<T, add, kVecs>(a, blocks, b, depth, stride, c, after);
  if (vecs == 1) return product_of<T, add, 1>(a, blocks, b, depth, stride, c, after);
  product_of<T, add, 2>(a, blocks, b, depth, stride, c, after);
}

// For two vectors a number is loaded once and multiplied twice, by three instructions, or loaded by both multiplications: that many
// of a block's numbers the second way, and neither loads nor instructions keep the multiplications waiting.
#if defined(CLEARHEAD_AVX512)
constexpr int kLoadedTwice = 2;
#else
constexpr int kLoadedTwice = 0;
#endif

// Rows of A, `depth` of them, and how they lie: from one to the next, and from one block of kRows columns to the next.
template <class T> struct Strip { const T* at; int64_t depth; };
struct Lain { int64_t row, block; };

// The same address, of which the compiler does not know that it is.
template <class T> CLEARHEAD_INLINE const T* hidden(const T* at) {
  asm("" : "+r"(at));
  return at;
}

// `row`: from one row of A to the next, where that is known here, else 0.
template <class T, int vecs, int64_t row, int... n>
CLEARHEAD_INLINE void strips_in(const Strip<T>* strip, const Strip<T>* last, Lain lain, int64_t block, const T* __restrict b,
                                bool add, T* __restrict c, std::integer_sequence<int, n...>) {
  constexpr int lanes = kLanes<T>, panel = kPanel<T>;
  const int64_t apart = row ? row : lain.row;
  Vec<T> acc[] = {(add ? load<T>(c + n / vecs * panel + n % vecs * lanes) : Vec<T>{})...};
  const auto step = [&](const T* numbers, const T* vectors) CLEARHEAD_LAMBDA {
    const T* const again = vecs == 2 && kLoadedTwice ? hidden(numbers) : numbers;
    ((acc[n] += (n / vecs < kLoadedTwice && n % vecs ? again : numbers)[n / vecs] * load<T>(vectors + n % vecs * lanes)), ...);
  };
  for (const Strip<T>* const first = strip; strip < last; ++strip) {
    const T* __restrict a = strip->at + block * lain.block;
    // strips lie anywhere, and a cache that reads on finds them too late: the next one is asked for, from its first row on
    const bool more = strip + 1 < last;
    const Strip<T>& next = more ? strip[1] : *first;
    const T* after = next.at + (block + !more) * lain.block;
    const int64_t pairs = strip->depth / 2, asked = std::min(pairs, next.depth / 2);
    const auto two = [&]() CLEARHEAD_LAMBDA {
      step(a, b), step(a + apart, b + panel);
      a += 2 * apart, b += 2 * panel;
    };
    int64_t pair = 0;
    for (; pair < asked; ++pair, after += 2 * apart) {
      __builtin_prefetch(after);
      if (!row || row * sizeof(T) > 32) __builtin_prefetch(after + apart);  // two shorter ones are in one line
      two();
    }
    for (; pair < pairs; ++pair) two();
    if (strip->depth % 2) step(a, b), b += panel;
  }
  (store<T>(c + n / vecs * panel + n % vecs * lanes, acc[n]), ...);
}

// C = Aᵀ · B, or with `add` that much more, where A is in strips and B is not: what is summed stays in registers from one strip to
// the next, unless those are named.
template <class T, int vecs = kVecs>
inline void strips_product(const Strip<T>* first, const Strip<T>* last, Lain lain, int64_t blocks, const T* b, bool add, T* c,
                           int wanted) {
  if (kNamedRegisters || (last - first == 1 && lain.row == kRows)) {
    for (; first < last; b += first++->depth * kPanel<T>, add = true)
      if (add) product<T, true>(first->at, blocks, b, first->depth, lain.block, c, wanted);
      else product<T, false>(first->at, blocks, b, first->depth, lain.block, c, wanted);
    return;
  }
  if constexpr (vecs > 1)
    if (wanted < vecs) return strips_product<T, vecs - 1>(first, last, lain, blocks, b, add, c, wanted);
  for (int64_t n = 0; n < blocks; ++n, c += kRows * kPanel<T>) {
    constexpr std::make_integer_sequence<int, kRows * vecs> each{};
    if (lain.row == kRows) strips_in<T, vecs, kRows>(first, last, lain, n, b, add, c, each);
    else strips_in<T, vecs, 0>(first, last, lain, n, b, add, c, each);
  }
}

// A where it lies: `count` rows of it, `stride` apart. Who reads it a few times need not pack it, where numbers
// are taken from memory one by one.
#if defined(CLEARHEAD_AVX2) || defined(CLEARHEAD_AVX512)
constexpr bool kAsItLies = true;
#else
constexpr bool kAsItLies = false;
#endif

// C = Aᵀ · B for rows of A; in the last block those past the end are the last once more. `after` is as above.
template <class T, int vecs = kVecs>
inline void rows_product(const T* a, int64_t count, const T* b, int64_t depth, int64_t stride, T* c, int wanted, const T* after) {
  if constexpr (vecs > 1)
    if (wanted < vecs) return rows_product<T, vecs - 1>(a, count, b, depth, stride, c, wanted, after);
  for (int64_t first = 0; first < count; first += kRows, c += kRows * kPanel<T>) {
    const T* rows[kRows];
    for (int64_t i = 0; i < kRows; ++i) rows[i] = a + std::min(first + i, count - 1) * stride;
    const auto number = [&](int i, int64_t d) CLEARHEAD_LAMBDA { return rows[i][d]; };
    if (after) micro_of<T, false, vecs, true>(number, b, depth, c, first + kRows < count ? a + (first + kRows) * stride : after);
    else micro_of<T, false, vecs>(number, b, depth, c);
  }
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
