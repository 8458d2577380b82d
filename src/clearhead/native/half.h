// Numbers of half precision: one by one, and a vector of them at a time where the instruction set converts them.
#pragma once
#include <cmath>
#include <cstring>

#include "isa.h"
#include "problem.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// the caller's type that is worked in as it lies
template <class T> constexpr int kOwn = sizeof(T) == 4 ? kFloat32 : kFloat64;

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  uint32_t bits;
  if (exponent == 31) bits = sign | 0x7f800000 | (mantissa << 13);
  else if (exponent) bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  else {  // zero and numbers too small for a normal half are mantissa · 2^−24
    const float small = float(mantissa) * 5.9604644775390625e-08f;
    std::memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;                     // NaN
  if (magnitude >= 0x477ff000) return sign | 0x7c00;                    // rounds past the largest half: inf
  if (magnitude < 0x38800000) {                                         // below the smallest normal half
    const float scaled = std::nearbyint(std::fabs(f) * 16777216.0f);    // in units of 2^−24
    return sign | uint16_t(scaled);
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);  // to nearest, ties to even
  return sign | uint16_t((rounded - 0x38000000) >> 13);
}

inline float bfloat_to_float(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t float_to_bfloat(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes<float>), aligned(2), may_alias));
typedef uint32_t WordVec __attribute__((vector_size(kBytes), aligned(4), may_alias));

// kLanes numbers of a type, as they lie.
template <int type> inline Vec<float> load_as(const char* p) {
  if constexpr (type == kFloat32) return load<float>(reinterpret_cast<const float*>(p));
  if constexpr (type == kBFloat16)  // the upper half of a float
#if defined(CLEARHEAD_AVX512)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
#elif defined(CLEARHEAD_AVX2)
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
#elif defined(CLEARHEAD_NEON)
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16));
#else
    return (Vec<float>)(__builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), WordVec) << 16);
#endif
#if defined(CLEARHEAD_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(CLEARHEAD_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(CLEARHEAD_NEON)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
#else
  Vec<float> out{};
  for (int i = 0; i < kLanes<float>; ++i) {
    uint16_t bits;
    std::memcpy(&bits, p + 2 * i, 2);
    out[i] = half_to_float(bits);
  }
  return out;
#endif
}

// The same the other way, to nearest, ties to even.
template <int type> inline void store_as(char* p, Vec<float> v) {
  if constexpr (type == kBFloat16) {
    const WordVec bits = (WordVec)v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const WordVec nan = (WordVec)((bits & 0x7fffffff) > 0x7f800000);  // which rounding would make an infinity of
    *reinterpret_cast<HalfVec*>(p) = __builtin_convertvector((nan & (bits >> 16 | 0x40)) | (~nan & rounded), HalfVec);
    return;
  }
#if defined(CLEARHEAD_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(CLEARHEAD_AVX2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(CLEARHEAD_NEON)
  vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(v)));
#else
  for (int i = 0; i < kLanes<float>; ++i) {
    const uint16_t bits = float_to_half(v[i]);
    std::memcpy(p + 2 * i, &bits, 2);
  }
#endif
}

// Whether two vectors of a type are read as the numbers at even places and those at odd ones, by one load and one instruction
// for each. What they meet is brought into that order before, sums out of it afterwards; a vector left over is in its own order.
#if defined(CLEARHEAD_AVX2) || defined(CLEARHEAD_AVX512)
template <int type> constexpr bool kParted = type == kBFloat16;
#else
template <int type> constexpr bool kParted = false;
#endif

template <class T> inline void part_row(T* row, int64_t columns) {
  constexpr int lanes = kLanes<T>;
  for (int64_t c = 0; c + 2 * lanes <= columns; c += 2 * lanes) {
    T both[2 * lanes];
    std::memcpy(both, row + c, sizeof both);
    for (int x = 0; x < lanes; ++x) row[c + x] = both[2 * x], row[c + lanes + x] = both[2 * x + 1];
  }
}

template <class T> inline void join_row(T* row, int64_t columns) {
  constexpr int lanes = kLanes<T>;
  for (int64_t c = 0; c + 2 * lanes <= columns; c += 2 * lanes) {
    T both[2 * lanes];
    std::memcpy(both, row + c, sizeof both);
    for (int x = 0; x < lanes; ++x) row[c + 2 * x] = both[x], row[c + 2 * x + 1] = both[lanes + x];
  }
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
