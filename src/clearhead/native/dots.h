// Products of queries with rows of half precision as they lie, where the CPU has an instruction that adds them up in float32.
//
// The queries have the rows' type, too, so that nothing is lost when they are brought back to it: twice as many numbers are in a
// register, and none is converted. BFDOT rounds to odd, as BFMMLA does; FMLAL, and VDPBF16PS for each of its two products, round as
// a multiply-add does. What is too small for a normal number is zero for BFDOT and VDPBF16PS.
#pragma once
#include "pack.h"
#include "soon.h"

#if (defined(CLEARHEAD_AMX) || defined(CLEARHEAD_AVX512_BF16)) && !defined(CLEARHEAD_TILES_BY_HAND)
#define CLEARHEAD_DOTS_512
#endif

namespace clearhead {
namespace CLEARHEAD_ISA {

#if defined(CLEARHEAD_NEON_BF16)
template <int type> constexpr bool kDotted = type == kBFloat16 || type == kFloat16;
#elif defined(CLEARHEAD_NEON_FP16)
template <int type> constexpr bool kDotted = type == kFloat16;
#elif defined(CLEARHEAD_AMX) || defined(CLEARHEAD_AVX512_BF16)
template <int type> constexpr bool kDotted = type == kBFloat16;
#else
template <int type> constexpr bool kDotted = false;  // nothing of this is used
#endif

typedef uint16_t Halves __attribute__((vector_size(kBytes), aligned(2), may_alias));  // as many bytes as a vector

inline Halves load_halves(const char* p) { return *reinterpret_cast<const Halves*>(p); }

// Two vectors of numbers that are of a type of half precision, side by side and in it.
template <int type> CLEARHEAD_INLINE Halves narrowed(const float* p) {
#if defined(CLEARHEAD_NEON)
  const Vec<float> low = load<float>(p), high = load<float>(p + kLanes<float>);
  if constexpr (type == kFloat16) return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(low), high));
  else return vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high));
#elif defined(CLEARHEAD_DOTS_512)
  return (Halves)_mm512_cvtne2ps_pbh(load<float>(p + kLanes<float>), load<float>(p));
#else
  Halves out{};
  for (int i = 0; i < 2 * kLanes<float>; ++i) out[i] = type == kFloat16 ? float_to_half(p[i]) : float_to_bfloat(p[i]);
  return out;
#endif
}

// The products of two rows, added to sums: which of them to which does not matter, all are added up in the end.
template <int type> CLEARHEAD_INLINE Vec<float> dot_add(Vec<float> sums, Halves a, Halves b) {
#if defined(CLEARHEAD_NEON_FP16)
  if constexpr (type == kFloat16) {
    const float16x8_t x = vreinterpretq_f16_u16(a), y = vreinterpretq_f16_u16(b);
    return vfmlalq_high_f16(vfmlalq_low_f16(sums, x, y), x, y);
  }
#endif
#if defined(CLEARHEAD_NEON_BF16) && defined(CLEARHEAD_NEON)
  return vbfdotq_f32(sums, (bfloat16x8_t)a, (bfloat16x8_t)b);
#elif defined(CLEARHEAD_DOTS_512)
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
#else
  const auto number = type == kFloat16 ? half_to_float : bfloat_to_float;
  for (int i = 0; i < 2 * kLanes<float>; ++i) sums[i / 2] += number(a[i]) * number(b[i]);
  return sums;
#endif
}

// The products in the form in which `stream.h` has them; columns are whole registers of halves.
template <int type> struct HalfDots {
  static constexpr int many = 2 * kLanes<float>;  // numbers in a register

  static bool takes(int64_t columns) { return kDotted<type> && columns > 0 && columns % many == 0; }

  // out[query][row] = the products of some queries with some rows; `ahead` is how far on the next stretch of rows lies.
  template <int queries, int keys>
  static CLEARHEAD_INLINE void block(const float* q, int64_t columns, const char* rows, int64_t stride, int64_t ahead, float* out,
                                     int64_t step) {
    Vec<float> sums[queries][keys] = {};
    for (int64_t c = 0; c < columns; c += many) {
      Halves query[queries];
      for (int i = 0; i < queries; ++i) query[i] = narrowed<type>(q + i * columns + c);
      for (int j = 0; j < keys; ++j) {
        if (queries > 1 && 2 * c % kLine < kBytes) __builtin_prefetch(rows + j * stride + ahead + 2 * c);
        const Halves row = load_halves(rows + j * stride + 2 * c);
        for (int i = 0; i < queries; ++i) sums[i][j] = dot_add<type>(sums[i][j], query[i], row);
      }
    }
    for (int i = 0; i < queries; ++i)
      if constexpr (keys == 1) out[i * step] = sum<float>(sums[i][0]);
      else
        for (int j = 0; j < keys; j += 4) sums_of_four<float>(sums[i] + j, out + i * step + j);
  }

  template <int queries, int keys>
  static void blocks(const float* q, int64_t columns, const char* rows, int64_t stride, int64_t ahead, int64_t count, float* out,
                     int64_t step) {
    int64_t j = 0;
    for (; j + keys <= count; j += keys) block<queries, keys>(q, columns, rows + j * stride, stride, ahead, out + j, step);
    for (; j < count; ++j) block<queries, 1>(q, columns, rows + j * stride, stride, ahead, out + j, step);
  }

  // The same for one query of some registers, which stays in them while rows stream by.
  template <int registers>
  static void alone(const float* q, int64_t, const char* rows, int64_t stride, int64_t count, float* out, const char* next) {
    constexpr int sets = registers < 4 ? registers : 4;  // sums, so that none waits for the one before
    Halves query[registers];
    for (int x = 0; x < registers; ++x) query[x] = narrowed<type>(q + x * many);
    const Soon soon(rows, stride, count, registers * kBytes, next);
    const auto one = [&](int64_t j) CLEARHEAD_LAMBDA {
      const char* const row = rows + j * stride;
      soon.ask(row, soon.from(j));
      Vec<float> part[sets] = {};
      for (int x = 0; x < registers; ++x) part[x % sets] = dot_add<type>(part[x % sets], query[x], load_halves(row + x * kBytes));
      for (int x = 1; x < sets; ++x) part[0] += part[x];
      return part[0];
    };
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
      const Vec<float> sums[4] = {one(j), one(j + 1), one(j + 2), one(j + 3)};
      sums_of_four<float>(sums, out + j);
    }
    for (; j < count; ++j) out[j] = sum<float>(one(j));
  }
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
