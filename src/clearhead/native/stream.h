// Rows of numbers that stream by, in the type and place in which they lie: their products with queries, their weighted sums.
//
// Reading is most of what decoding does, and memory is read fastest in its own order: a row is read once for all queries that
// go together. They do not read in memory's order, by which the processor would foresee it, so what they will read of the next
// stretch is asked for. One query alone stays in registers while the rows stream by, `vecs` vectors of it, where that is the
// whole row (`whole`); longer rows have the rest of it in the first cache.
#pragma once
#if defined(CLEARHEAD_NEON)
#include "alone_neon.h"
#endif
#include "dots.h"
#include "pack.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int kStretch = 16;                  // vectors of one query, or of one sum, in registers
constexpr int kQueries = kRows == 8 ? 4 : 2;  // queries that go together: with kKeys keys, or kKeys vectors of their sums,
constexpr int kKeys = 4;                      // they fill half of the registers, or all that there are
constexpr int kAlone = 8;                     // keys that go together for one query: as many as hide how long each step takes
#if defined(CLEARHEAD_AVX2) || defined(CLEARHEAD_AVX512)
constexpr int kSums = 2;                      // sums of one product, so that none waits for the one before; more would have to be
#else                                         // added up, and while they wait the next rows have begun
constexpr int kSums = 4;
#endif
constexpr int64_t kShared = 64;               // rows that stay in the first cache until all queries have read them
constexpr int64_t kLong = 256;                // bytes of a row from which on eight at a time are not foreseen either
constexpr int kTwice = 2 * kQueries;          // queries that ask for the next stretch: not all that is asked for comes

// Whether one query goes with kAlone rows at a time: each of them has one sum, and what converts has more time.
#if defined(CLEARHEAD_NEON)
template <int type> constexpr bool kByEight = type == kBFloat16;
#else
template <int type> constexpr bool kByEight = false;
#endif

// Queries up to which numbers of another type are converted whenever they are read; for more they are copied once.
inline int64_t read_again(int type) {
#if defined(CLEARHEAD_NEON)
  if (type == kBFloat16) return 3 * kQueries;  // two instructions for eight of them
#elif defined(CLEARHEAD_AVX2) || defined(CLEARHEAD_AVX512)
  if (type == kFloat16 || type == kBFloat16) return 32;  // what copies waits for memory, of which nothing is asked for before
#endif
  return type == kFloat16 || type == kBFloat16 ? kQueries : 0;
}

template <class T, int type> inline Vec<T> load_number(const char* p) {
  if constexpr (type == kOwn<T>) return load<T>(reinterpret_cast<const T*>(p));
  else return load_as<type>(p);
}

template <class T, int type> struct Rowwise {
  static constexpr int lanes = kLanes<T>, bytes = lanes * (type == kFloat64 ? 8 : type == kFloat32 ? 4 : 2);

  static CLEARHEAD_INLINE Vec<T> at(const char* row, int64_t vec) { return load_number<T, type>(row + vec * bytes); }

  // Two vectors that lie side by side, in the order that `kParted` tells.
  static CLEARHEAD_INLINE void two(const char* row, int64_t vec, Vec<T>* out) {
#if defined(CLEARHEAD_NEON)  // one load; what widens a whole register has both multipliers' ports, what shifts has one
    const uint16_t* const p = reinterpret_cast<const uint16_t*>(row + vec * bytes);
    if constexpr (type == kBFloat16) {
      const uint16x8_t x = vld1q_u16(p), zero = vdupq_n_u16(0);
      out[0] = vreinterpretq_f32_u16(vzip1q_u16(zero, x));
      out[1] = vreinterpretq_f32_u16(vzip2q_u16(zero, x));
      return;
    } else if constexpr (type == kFloat16) {
      const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16(p));
      out[0] = vcvt_f32_f16(vget_low_f16(x));
      out[1] = vcvt_high_f32_f16(x);
      return;
    }
#endif
    if constexpr (kParted<type>) {
      const WordVec both = (WordVec)load_halves(row + vec * bytes);
      out[0] = (Vec<T>)(both << 16);
      out[1] = (Vec<T>)(both & 0xffff0000u);
    } else {
      out[0] = at(row, vec);
      out[1] = at(row, vec + 1);
    }
  }

  // `act(vec, number)` for vectors [first, last) of a row, by twos.
  template <class Act> static CLEARHEAD_INLINE void each(const char* row, int64_t first, int64_t last, Act act) {
    int64_t c = first;
    for (; c + 2 <= last; c += 2) {
      Vec<T> pair[2];
      two(row, c, pair);
      act(c, pair[0]);
      act(c + 1, pair[1]);
    }
    if (c < last) act(c, at(row, c));
  }

  // out[query][row] = the products of some queries with some rows.
  template <int queries, int keys>
  static CLEARHEAD_INLINE void block(const T* q, int64_t columns, const char* rows, int64_t stride, int64_t ahead, T* out,
                                     int64_t step) {
    static_assert(keys == 1 || keys == 4 || queries == 1);
    const int64_t vecs = columns / lanes;
    const bool asks = queries > 1 || (kByEight<type> && vecs * bytes >= kLong);
    Vec<T> sums[queries][keys] = {};
    int64_t c = 0;
    for (; c + 2 <= vecs; c += 2) {
      Vec<T> query[queries][2], pair[2];
      for (int i = 0; i < queries; ++i)
        for (int x = 0; x < 2; ++x) query[i][x] = load<T>(q + i * columns + (c + x) * lanes);
      for (int j = 0; j < keys; ++j) {
        if (asks && c * bytes % kLine < 2 * bytes) __builtin_prefetch(rows + j * stride + ahead + c * bytes);
        two(rows + j * stride, c, pair);
        for (int i = 0; i < queries; ++i)
          for (int x = 0; x < 2; ++x) sums[i][j] += query[i][x] * pair[x];
      }
    }
    if (c < vecs)
      for (int j = 0; j < keys; ++j)
        for (int i = 0; i < queries; ++i) sums[i][j] += load<T>(q + i * columns + c * lanes) * at(rows + j * stride, c);
    if constexpr (keys == 1)
      for (int i = 0; i < queries; ++i) out[i * step] = sum<T>(sums[i][0]);
    else if constexpr (queries == 1) sums_of_fours<T, keys / 4>(sums[0], out, 4);
    else sums_of_fours<T, queries>(sums[0], out, step);
  }

  template <int queries, int keys>
  static void blocks(const T* q, int64_t columns, const char* rows, int64_t stride, int64_t ahead, int64_t count, T* out,
                     int64_t step) {
    int64_t j = 0;
    for (; j + keys <= count; j += keys) block<queries, keys>(q, columns, rows + j * stride, stride, ahead, out + j, step);
    for (; j < count; ++j) block<queries, 1>(q, columns, rows + j * stride, stride, ahead, out + j, step);
  }

  // The same for one query, kept in registers.
  template <int vecs, bool whole>
  static void alone(const T* q, int64_t columns, const char* rows, int64_t stride, int64_t count, T* out, const char* next) {
    constexpr int sets = vecs < kSums ? vecs : kSums;
    const int64_t all = columns / lanes;
    Vec<T> query[vecs];
    for (int x = 0; x < vecs; ++x) query[x] = load<T>(q + x * lanes);
    const Soon soon(rows, stride, count, (whole ? vecs : all) * bytes, next);
    const auto one = [&](const char* row, int64_t far) CLEARHEAD_LAMBDA {
      soon.ask(row, far);
      Vec<T> part[sets] = {};
      each(row, 0, vecs, [&](int64_t x, Vec<T> number) CLEARHEAD_LAMBDA { part[x % sets] += query[x] * number; });
      if (!whole)
        for (int64_t c = vecs; c < all; c += vecs)
          each(row + c * bytes, 0, vecs, [&](int64_t x, Vec<T> number) CLEARHEAD_LAMBDA {
            part[x % sets] += load<T>(q + (c + x) * lanes) * number;
          });
      for (int x = 1; x < sets; ++x) part[0] += part[x];
      return part[0];
    };
    int64_t j = 0;
#if defined(CLEARHEAD_AVX2) || defined(CLEARHEAD_AVX512)
    if constexpr (sizeof(T) == 4)  // as many as fill a vector: four at a time would take twice as many steps to add up
      for (constexpr int fours = lanes / 4; j + lanes <= count; j += lanes) {
        Vec<T> four[fours];
        const int64_t far = soon.from(j);
        for (int x = 0; x < fours; ++x) {
          const char* const from = rows + (j + 4 * x) * stride;
          const Vec<T> sums[4] = {one(from, far), one(from + stride, far), one(from + 2 * stride, far), one(from + 3 * stride, far)};
          four[x] = folded(sums);
        }
        store_folded<fours>(four, out + j, 4);
      }
#endif
    for (; j + 4 <= count; j += 4) {
      const char* const from = rows + j * stride;
      const int64_t far = soon.from(j);
      const Vec<T> sums[4] = {one(from, far), one(from + stride, far), one(from + 2 * stride, far), one(from + 3 * stride, far)};
      sums_of_four<T>(sums, out + j);
    }
    for (; j < count; ++j) out[j] = sum<T>(one(rows + j * stride, soon.from(j)));
  }

  // sums[query][column] += Σ weight · row[column], for vectors [first, first + vecs) of the columns.
  template <int queries, int vecs>
  static CLEARHEAD_INLINE void add_block(const T* weights, int64_t step, const uint8_t* allowed, int64_t columns, int64_t first,
                                         const char* rows, int64_t stride, int64_t ahead, int64_t count, T* sums) {
    Vec<T> total[queries][vecs];
    for (int i = 0; i < queries; ++i)
      for (int x = 0; x < vecs; ++x) total[i][x] = load<T>(sums + i * columns + (first + x) * lanes);
    const char* row = rows + first * bytes;
    for (int64_t j = 0; j < count; ++j, row += stride) {
      for (int x = 0; queries > 1 && x < vecs; x += kLine / bytes) __builtin_prefetch(row + ahead + x * bytes);
      if (allowed && !allowed[j]) continue;  // which also keeps NaN in padding out
      T share[queries];
      for (int i = 0; i < queries; ++i) share[i] = weights[i * step + j];
      each(row, 0, vecs, [&](int64_t x, Vec<T> number) CLEARHEAD_LAMBDA {
        for (int i = 0; i < queries; ++i) total[i][x] += share[i] * number;
      });
    }
    for (int i = 0; i < queries; ++i)
      for (int x = 0; x < vecs; ++x) store<T>(sums + i * columns + (first + x) * lanes, total[i][x]);
  }

  template <int queries>
  static void add_blocks(const T* weights, int64_t step, const uint8_t* allowed, int64_t columns, const char* rows,
                         int64_t stride, int64_t ahead, int64_t count, T* sums) {
    constexpr int most = queries == 3 ? kKeys : kQueries * kKeys / queries;
    const int64_t vecs = columns / lanes;
    int64_t c = 0;
    for (; c + most <= vecs; c += most)
      add_block<queries, most>(weights, step, allowed, columns, c, rows, stride, ahead, count, sums);
    for (; c + 2 <= vecs; c += 2)
      add_block<queries, 2>(weights, step, allowed, columns, c, rows, stride, ahead, count, sums);
    if (c < vecs) add_block<queries, 1>(weights, step, allowed, columns, c, rows, stride, ahead, count, sums);
  }

  // The same for one query, its sums kept in registers.
  template <int vecs, bool whole>
  static void add_alone(const T* weights, const uint8_t* allowed, int64_t columns, const char* rows, int64_t stride,
                        int64_t count, T* sums, const char* next) {
    constexpr int sets = vecs < 8 ? 8 / vecs : 1;  // so that none waits for the one before
    const int64_t all = columns / lanes;
    Vec<T> total[sets][vecs] = {};
    for (int x = 0; x < vecs; ++x) total[0][x] = load<T>(sums + x * lanes);
    const Soon soon(rows, stride, count, (whole ? vecs : all) * bytes, next);
    const auto one = [&](int64_t j, int64_t far, Vec<T>* into) CLEARHEAD_LAMBDA {
      const char* row = rows + j * stride;
      soon.ask(row, far);
      each(row, 0, vecs, [&](int64_t x, Vec<T> number) CLEARHEAD_LAMBDA { into[x] += weights[j] * number; });
      if (!whole)
        each(row, vecs, all, [&](int64_t c, Vec<T> number) CLEARHEAD_LAMBDA {
          T* const place = sums + c * lanes;
          store<T>(place, load<T>(place) + weights[j] * number);
        });
    };
    int64_t j = 0;
    if (!allowed)
      for (; j + sets <= count; j += sets)
        for (int64_t n = 0, far = soon.from(j); n < sets; ++n) one(j + n, far, total[n]);
    for (; j < count; ++j)
      if (!allowed || allowed[j]) one(j, soon.from(j), total[0]);
    for (int n = 1; n < sets; ++n)
      for (int x = 0; x < vecs; ++x) total[0][x] += total[n][x];
    for (int x = 0; x < vecs; ++x) store<T>(sums + x * lanes, total[0][x]);
  }
};

// The products and sums for rows of one kind. `together[n]` is for n + 1 queries, `alone` for one; the queries, and their sums,
// lie `columns` apart, the products and the weights `step`; `ahead` is how far on the next stretch lies.
template <class T> struct Streaming {
  using Dots = void (*)(const T*, int64_t, const char*, int64_t, int64_t, int64_t, T*, int64_t);
  using Add = void (*)(const T*, int64_t, const uint8_t*, int64_t, const char*, int64_t, int64_t, int64_t, T*);
  Dots dots_together[kQueries] = {};
  Add add_together[kQueries] = {};
  void (*dots_alone)(const T*, int64_t, const char*, int64_t, int64_t, T*, const char*) = nullptr;
  void (*add_alone)(const T*, const uint8_t*, int64_t, const char*, int64_t, int64_t, T*, const char*) = nullptr;
  bool parted = false;  // queries and sums are in the order that `kParted` tells

  Streaming() = default;
  Streaming(int type, int64_t columns) {
    if (type == kOwn<T>) choose<kOwn<T>>(columns);
    if constexpr (sizeof(T) == 4) {
      if (type == kFloat16) choose<kFloat16>(columns);
      if (type == kBFloat16) choose<kBFloat16>(columns);
    }
  }

  // Products with queries of the same type, where the CPU has an instruction for it; true where it has.
  bool dot(int type, int64_t columns) {
    if constexpr (sizeof(T) == 4) return (type == kBFloat16 && dot<kBFloat16>(columns)) || (type == kFloat16 && dot<kFloat16>(columns));
    return false;
  }

  // Whether rows stream as they lie: columns side by side, in whole vectors.
  static bool takes(const View& view, int64_t columns) {
    const int64_t size = view.type == kOwn<T> ? int64_t(sizeof(T)) : 2;
    const bool known = view.type == kOwn<T> || (sizeof(T) == 4 && (view.type == kFloat16 || view.type == kBFloat16));
    return known && columns > 0 && columns % kLanes<T> == 0 && view.col == size;
  }

  void dots(const T* q, int64_t queries, int64_t columns, const char* rows, int64_t stride, int64_t ahead, int64_t count, T* out,
            int64_t step) const {
    for (int64_t i = 0; i < queries; i += kQueries) {
      const int64_t some = std::min<int64_t>(kQueries, queries - i);
      if (some == 1 && dots_alone) dots_alone(q + i * columns, columns, rows, stride, count, out + i * step, rows + ahead);
      else dots_together[some - 1](q + i * columns, columns, rows, stride, i < kTwice ? ahead : 0, count, out + i * step, step);
    }
  }

  void add(const T* weights, int64_t step, int64_t queries, const uint8_t* allowed, int64_t columns, const char* rows,
           int64_t stride, int64_t ahead, int64_t count, T* sums) const {
    if (queries == 1 && add_alone) add_alone(weights, allowed, columns, rows, stride, count, sums, rows + ahead);
    else add_together[queries - 1](weights, step, allowed, columns, rows, stride, ahead, count, sums);
  }

 private:
  template <int type> bool dot(int64_t columns) {
    using Way = HalfDots<type>;
    if constexpr (!kDotted<type>) return false;
    else {
      if (!Way::takes(columns)) return false;
      parted = false;
      dots_together[0] = Way::template blocks<1, kAlone>;
      dots_together[1] = Way::template blocks<2, kKeys>;
      if constexpr (kQueries == 4) {
        dots_together[2] = Way::template blocks<3, kKeys>;
        dots_together[3] = Way::template blocks<4, kKeys>;
      }
      const int64_t registers = columns / Way::many;
      dots_alone = registers == 1          ? Way::template alone<1>
                   : registers == 2        ? Way::template alone<2>
                   : registers == 4        ? Way::template alone<4>
                   : registers == 8        ? Way::template alone<8>
                   : registers == kStretch ? Way::template alone<kStretch>
                                           : nullptr;
      return true;
    }
  }
  template <int type> void choose(int64_t columns) {
    using Way = Rowwise<T, type>;
    parted = kParted<type>;
    dots_together[0] = Way::template blocks<1, kAlone>;
    add_together[0] = Way::template add_blocks<1>;
    dots_together[1] = Way::template blocks<2, kKeys>;
    add_together[1] = Way::template add_blocks<2>;
    if constexpr (kQueries == 4) {
      dots_together[2] = Way::template blocks<3, kKeys>;
      add_together[2] = Way::template add_blocks<3>;
      dots_together[3] = Way::template blocks<4, kKeys>;
      add_together[3] = Way::template add_blocks<4>;
    }
    const int64_t vecs = columns / kLanes<T>;
    if (vecs == 1) take<type, 1, true>();
    else if (vecs == 2) take<type, 2, true>();
    else if (vecs == 4) take<type, 4, true>();
    else if (vecs == 8) take<type, 8, true>();
    else if (vecs == kStretch) take<type, kStretch, true>();
    else if (vecs % kStretch == 0) take<type, kStretch, false>();
#if defined(CLEARHEAD_NEON)
    if constexpr (sizeof(T) == 4 && (type == kFloat16 || type == kBFloat16)) {
      if (HalvesAlone<type>::takes(columns)) add_alone = HalvesAlone<type>::add;
    }
#endif
  }
  template <int type, int vecs, bool whole> void take() {
    if (!kByEight<type>) dots_alone = Rowwise<T, type>::template alone<vecs, whole>;
    add_alone = Rowwise<T, type>::template add_alone<vecs, whole>;
  }
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
