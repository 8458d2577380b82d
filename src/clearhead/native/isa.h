// The one small vector type that everything else is written in; each instruction set has its own.
//
// `Vec<T>` holds `kLanes<T>` numbers. A panel is `kVecs` of them side by side: `kPanel<T>` queries in one register row. A
// block is `kRows` keys or features. kRows × kVecs accumulators fit into the registers, with room for what feeds them.
// `kExpVecs` exponentials go side by side: as many as hide how long a multiply-add takes, and still fit.
#pragma once
#include <cstdint>
#include <cstring>

#if (defined(CLEARHEAD_AMX) || defined(CLEARHEAD_AVX512_BF16)) && !defined(CLEARHEAD_TILES_BY_HAND)
#define CLEARHEAD_AVX512  // which they have too
#endif
#if defined(CLEARHEAD_NEON_BF16) && !defined(CLEARHEAD_TILES_BY_HAND)
#define CLEARHEAD_NEON_FP16
#endif
#if defined(CLEARHEAD_NEON_FP16)
#define CLEARHEAD_NEON
#endif
#if defined(CLEARHEAD_NEON)
#include <arm_neon.h>
#elif defined(CLEARHEAD_AVX2) || defined(CLEARHEAD_AVX512)
#include <immintrin.h>
#endif

namespace clearhead {
namespace CLEARHEAD_ISA {

#if defined(CLEARHEAD_AVX512) || defined(CLEARHEAD_AMX) || defined(CLEARHEAD_AVX512_BF16)
constexpr int kBytes = 64, kVecs = 3, kRows = 8, kExpVecs = 8;
#elif defined(CLEARHEAD_AVX2)
constexpr int kBytes = 32, kVecs = 2, kRows = 6, kExpVecs = 4;
#elif defined(CLEARHEAD_NEON) || defined(CLEARHEAD_NEON_BF16)
constexpr int kBytes = 16, kVecs = 3, kRows = 8, kExpVecs = 8;
#else
constexpr int kBytes = 16, kVecs = 2, kRows = 4, kExpVecs = 4;
#endif
#define CLEARHEAD_INLINE inline __attribute__((always_inline))
#define CLEARHEAD_LAMBDA __attribute__((always_inline))

template <class T> constexpr int kLanes = kBytes / int(sizeof(T));
template <class T> constexpr int kPanel = kVecs * kLanes<T>;
static_assert(kBytes % sizeof(double) == 0);

template <class T> struct Bits;
template <> struct Bits<float> { using type = int32_t; };
template <> struct Bits<double> { using type = int64_t; };

// GCC's and Clang's vector types: + − × compile to the instruction set's own, and × then + to a fused multiply-add.
template <class T> struct VecOf {
  typedef T type __attribute__((vector_size(kBytes), aligned(sizeof(T)), may_alias));
  typedef typename Bits<T>::type bits __attribute__((vector_size(kBytes), aligned(sizeof(T)), may_alias));
};
template <class T> using Vec = typename VecOf<T>::type;
template <class T> using BitVec = typename VecOf<T>::bits;

template <class T> inline Vec<T> load(const T* p) { return *reinterpret_cast<const Vec<T>*>(p); }
template <class T> inline void store(T* p, Vec<T> v) { *reinterpret_cast<Vec<T>*>(p) = v; }
template <class T> inline Vec<T> all(T x) { return x - Vec<T>{}; }

// The larger of two; NaN in the second is kept.
#if defined(CLEARHEAD_NEON)
inline Vec<float> max(Vec<float> a, Vec<float> b) { return vmaxq_f32(a, b); }
inline Vec<double> max(Vec<double> a, Vec<double> b) { return vmaxq_f64(a, b); }
#elif defined(CLEARHEAD_AVX512)
inline Vec<float> max(Vec<float> a, Vec<float> b) { return _mm512_max_ps(a, b); }
inline Vec<double> max(Vec<double> a, Vec<double> b) { return _mm512_max_pd(a, b); }
#elif defined(CLEARHEAD_AVX2)
inline Vec<float> max(Vec<float> a, Vec<float> b) { return _mm256_max_ps(a, b); }
inline Vec<double> max(Vec<double> a, Vec<double> b) { return _mm256_max_pd(a, b); }
#else
template <class V> inline V max(V a, V b) { return a > b ? a : b; }
#endif

// The smaller of two finite numbers.
#if defined(CLEARHEAD_NEON)
inline Vec<float> min(Vec<float> a, Vec<float> b) { return vminq_f32(a, b); }
inline Vec<double> min(Vec<double> a, Vec<double> b) { return vminq_f64(a, b); }
#else
template <class V> inline V min(V a, V b) { return a < b ? a : b; }
#endif

// a · b + c with c read from memory. A NEON multiply-add overwrites c: read anew, it costs a load, for which there is room,
// and not a copy, for which the multipliers would wait.
template <class T> inline Vec<T> fma(Vec<T> a, Vec<T> b, const T* c) {
#if defined(CLEARHEAD_NEON)
  Vec<T> sum;
  asm volatile("ldr %q0, %1" : "=w"(sum) : "m"(*reinterpret_cast<const Vec<T>*>(c)));
  return sum + a * b;
#else
  return a * b + load<T>(c);
#endif
}

// A number in every lane, in memory.
template <class T> struct Spread {
  alignas(kBytes) T at[kLanes<T>];
  constexpr Spread(T x) : at() {
    for (int i = 0; i < kLanes<T>; ++i) at[i] = x;
  }
};

template <class T> inline T sum(Vec<T> v) {
  T total = 0;
  for (int i = 0; i < kLanes<T>; ++i) total += v[i];
  return total;
}

// The same by halves, which takes a fraction of the time; but a score of few features is then not the one that gradients see.
template <class T> inline T sum_by_halves(Vec<T> v) {
#if defined(CLEARHEAD_AVX512)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps(v);
  else return _mm512_reduce_add_pd(v);
#elif defined(CLEARHEAD_AVX2)
  if constexpr (sizeof(T) == 4) {
    const __m128 four = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1), two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
  }
#endif
  return sum<T>(v);
}

// The largest of its numbers; any where one of them is NaN.
template <class T> inline T largest(Vec<T> v) {
#if defined(CLEARHEAD_NEON)
  if constexpr (sizeof(T) == 4) return vmaxvq_f32(v);
#elif defined(CLEARHEAD_AVX512)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_max_ps(v);
  else return _mm512_reduce_max_pd(v);
#elif defined(CLEARHEAD_AVX2)
  if constexpr (sizeof(T) == 4) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return two[0] > two[1] ? two[0] : two[1];
  }
#endif
  T top = v[0];
  for (int i = 1; i < kLanes<T>; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

// Bit x for lane x: where the first is the larger one.
template <class T> inline uint32_t lanes_above(Vec<T> a, Vec<T> b) {
#if defined(CLEARHEAD_AVX512)
  if constexpr (sizeof(T) == 4) return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
  else return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ);
#elif defined(CLEARHEAD_AVX2)
  if constexpr (sizeof(T) == 4) return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
  else return uint32_t(_mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_GT_OQ)));
#elif defined(CLEARHEAD_NEON)
  if constexpr (sizeof(T) == 4) return vaddvq_u32(vandq_u32(vcgtq_f32(a, b), uint32x4_t{1, 2, 4, 8}));
  else return uint32_t(vaddvq_u64(vandq_u64(vcgtq_f64(a, b), uint64x2_t{1, 2})));
#else
  const BitVec<T> above = a > b;
  uint32_t bits = 0;
  for (int x = 0; x < kLanes<T>; ++x) bits |= uint32_t(above[x] & 1) << x;
  return bits;
#endif
}

// Bit x for number x of a panel: where the first is no less than the second.
template <class T> inline uint64_t lanes_from(const T* numbers, const T* low) {
  uint64_t bits = 0;
#if defined(CLEARHEAD_NEON)
  if constexpr (sizeof(T) == 4) {
    static_assert(kVecs == 3);
    const auto part = [&](int x, uint32x4_t bit) { return vandq_u32(vcgeq_f32(load<T>(numbers + x), load<T>(low + x)), bit); };
    return vaddvq_u32(vorrq_u32(vorrq_u32(part(0, uint32x4_t{1, 2, 4, 8}), part(4, uint32x4_t{16, 32, 64, 128})),
                                part(8, uint32x4_t{256, 512, 1024, 2048})));
  }
#endif
  constexpr uint64_t all = (uint64_t(1) << kLanes<T>) - 1;
  for (int x = 0; x < kPanel<T>; x += kLanes<T>) bits |= (~lanes_above<T>(load<T>(low + x), load<T>(numbers + x)) & all) << x;
  return bits;
}

#if defined(CLEARHEAD_AVX2) || defined(CLEARHEAD_AVX512)
// Four vectors folded into one: in each of its lanes of 128 bits, what the lanes of the four add up to, in their order.
inline Vec<float> folded(const Vec<float>* v) {
#if defined(CLEARHEAD_AVX512)
  const __m512d a = (__m512d)(_mm512_unpacklo_ps(v[0], v[1]) + _mm512_unpackhi_ps(v[0], v[1]));
  const __m512d b = (__m512d)(_mm512_unpacklo_ps(v[2], v[3]) + _mm512_unpackhi_ps(v[2], v[3]));
  return (__m512)_mm512_mask_blend_pd(0xaa, a, b) + (__m512)_mm512_shuffle_pd(a, b, 0x55);  // a blend has two ports
#else
  const __m256d a = (__m256d)(_mm256_unpacklo_ps(v[0], v[1]) + _mm256_unpackhi_ps(v[0], v[1]));
  const __m256d b = (__m256d)(_mm256_unpacklo_ps(v[2], v[3]) + _mm256_unpackhi_ps(v[2], v[3]));
  return (__m256)_mm256_blend_pd(a, b, 0xa) + (__m256)_mm256_shuffle_pd(a, b, 0x5);
#endif
}

// The sums of `count` times four vectors, folded, `step` apart.
template <int count> inline void store_folded(const Vec<float>* v, float* out, int64_t step) {
#if defined(CLEARHEAD_AVX512)
  if constexpr (count > 1) {
    static_assert(count <= 4);
    const auto halved = [](__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee); };
    const __m512 a = halved(v[0], v[1]), b = count == 2 ? a : halved(v[2], v[count - 1]);
    const __m512 sums = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    _mm_storeu_ps(out, _mm512_castps512_ps128(sums));
    _mm_storeu_ps(out + step, _mm512_extractf32x4_ps(sums, 1));
    if constexpr (count > 2) _mm_storeu_ps(out + 2 * step, _mm512_extractf32x4_ps(sums, 2));
    if constexpr (count > 3) _mm_storeu_ps(out + 3 * step, _mm512_extractf32x4_ps(sums, 3));
    return;
  }
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v[0]), _mm512_extractf32x8_ps(v[0], 1));
#else
  if constexpr (count > 1) {
    static_assert(count == 2);
    const __m256 sums = _mm256_permute2f128_ps(v[0], v[1], 0x20) + _mm256_permute2f128_ps(v[0], v[1], 0x31);
    _mm_storeu_ps(out, _mm256_castps256_ps128(sums));
    _mm_storeu_ps(out + step, _mm256_extractf128_ps(sums, 1));
    return;
  }
  const __m256 half = v[0];
#endif
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
#endif

// The sums of four vectors, and of `count` times four, `step` apart.
template <class T> inline void sums_of_four(const Vec<T>* v, T* out) {
#if defined(CLEARHEAD_NEON)
  if constexpr (sizeof(T) == 4) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
    return;
  }
#elif defined(CLEARHEAD_AVX2) || defined(CLEARHEAD_AVX512)
  if constexpr (sizeof(T) == 4) {
    const Vec<T> four = folded(v);
    return store_folded<1>(&four, out, 0);
  }
#endif
  for (int i = 0; i < 4; ++i) out[i] = sum<T>(v[i]);
}
template <class T, int count> inline void sums_of_fours(const Vec<T>* v, T* out, int64_t step) {
#if defined(CLEARHEAD_AVX2) || defined(CLEARHEAD_AVX512)
  if constexpr (sizeof(T) == 4) {
    Vec<T> fours[count];
    for (int i = 0; i < count; ++i) fours[i] = folded(v + 4 * i);
    return store_folded<count>(fours, out, step);
  }
#endif
  for (int i = 0; i < count; ++i) sums_of_four<T>(v + 4 * i, out + i * step);
}

// 2^x of several vectors, in place: exact at whole numbers, within an ulp or so elsewhere, 0 for what is too small for a
// normal number and for −inf. They go step by step together, since each step waits for the one before. `limited` is x in
// the range in which it was used, so that x · 2^x is 0 and not NaN for −inf; it is put together again from its parts, since
// there are not registers enough to keep it.
template <class T, int count> CLEARHEAD_INLINE void exp2(Vec<T>* x, Vec<T>* limited) {
  constexpr bool wide = sizeof(T) == 8;
  constexpr int shift = wide ? 52 : 23, degree = wide ? 13 : 5;
  constexpr T bias = wide ? T(1023) : T(127);
  // adding 1.5 · 2^shift rounds to a whole number and leaves it in the low bits; the exponent's bias rides along
  constexpr T magic = (wide ? T(6755399441055744.0) : T(12582912.0)) + bias;
  static constexpr Spread<T> taylor[] = {T(1.0), T(0.6931471805599453), T(0.24022650695910072), T(0.05550410866482158),
                                         T(0.009618129107628477), T(0.0013333558146428443), T(0.00015403530393381608),
                                         T(1.525273380405984e-05), T(1.3215486790144307e-06), T(1.0178086009239699e-07),
                                         T(7.054911620801121e-09), T(4.445538271870812e-10),
                                         T(2.567843599348820e-11), T(1.369148885390412e-12)};
  // the best fit to 2^f on [−1/2, 1/2] in relative error (9e-8) with the constant held at 1
  static constexpr Spread<T> fitted[] = {T(1.0), T(0.69314698), T(0.24022242), T(0.05550734), T(0.00967151), T(0.00132647)};
  const Spread<T>* c = wide ? taylor : fitted;
  Vec<T> whole[count], f[count], p[count];
  for (int i = 0; i < count; ++i) x[i] = max(all<T>(-bias), x[i]);
  for (int i = 0; i < count; ++i) whole[i] = x[i] + magic;
  for (int i = 0; i < count; ++i) f[i] = x[i] - (whole[i] - magic);  // −1/2 … 1/2
  for (int i = 0; i < count; ++i) p[i] = fma<T>(all<T>(c[degree].at[0]), f[i], c[degree - 1].at);
  for (int power = degree - 2; power >= 0; --power)
    for (int i = 0; i < count; ++i) p[i] = fma<T>(p[i], f[i], c[power].at);
  for (int i = 0; i < count; ++i) {
    x[i] = p[i] * (Vec<T>)((BitVec<T>)whole[i] << shift);  // the same bits, seen as the other type
    limited[i] = f[i] + (whole[i] - magic);
  }
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
