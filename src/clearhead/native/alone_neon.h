// The weighted values of half precision for one query, with the registers named: what is converted next goes between the products
// of what was converted before. Compilers put the two one after the other, and a quarter of the time is spent waiting.
#pragma once
#include "pack.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// The lower and the upper four of eight numbers, as floats; v12 is zero.
#define CLEARHEAD_BF16_LOW(to, from) "zip1 v" #to ".8h, v12.8h, v" #from ".8h\n"
#define CLEARHEAD_BF16_HIGH(to, from) "zip2 v" #to ".8h, v12.8h, v" #from ".8h\n"
#define CLEARHEAD_FP16_LOW(to, from) "fcvtl v" #to ".4s, v" #from ".4h\n"
#define CLEARHEAD_FP16_HIGH(to, from) "fcvtl2 v" #to ".4s, v" #from ".8h\n"

template <int type> struct HalvesAlone {
  static constexpr int64_t wide = 64;   // columns whose sums are in registers
  static constexpr int64_t ahead = 16;  // keys whose values are asked for before they are read

  static bool takes(int64_t columns) { return columns % wide == 0; }

  // sums[column] += Σ weight · row[column], over rows that are allowed; others are not read, since they may be NaN.
  static void add(const float* weights, const uint8_t* allowed, int64_t columns, const char* rows, int64_t stride, int64_t count,
                  float* sums, const char*) {
    for (int64_t from = 0, to; from < count; from = to) {
      for (to = from; to < count && (!allowed || allowed[to]); ++to) {}
      for (int64_t c = 0; from < to && c < columns; c += wide)
        add_block(weights + from, rows + from * stride + 2 * c, stride, to - from, sums + c);
      for (; to < count && allowed && !allowed[to]; ++to) {}
    }
  }

 private:
// Sixteen columns of a key, in v`a` to v`a + 3`, with its weight in v0; in between the next sixteen, from v`x` and v`y`.
#define CLEARHEAD_SIXTEEN(LOW, HIGH, s0, s1, s2, s3, a, b, c, d, x, y, e, f, g, h, next)                                       \
  "fmla v" #s0 ".4s, v" #a ".4s, v0.s[0]\n" LOW(e, x) "fmla v" #s1 ".4s, v" #b ".4s, v0.s[0]\n" HIGH(f, x) next                \
  "fmla v" #s2 ".4s, v" #c ".4s, v0.s[0]\n" LOW(g, y) "fmla v" #s3 ".4s, v" #d ".4s, v0.s[0]\n" HIGH(h, y)
#define CLEARHEAD_THREE_PARTS(LOW, HIGH, next)                                                                                 \
  CLEARHEAD_SIXTEEN(LOW, HIGH, 16, 17, 18, 19, 4, 5, 6, 7, 13, 14, 8, 9, 10, 11, "ldp q2, q3, [%[row], #64]\n")                \
  CLEARHEAD_SIXTEEN(LOW, HIGH, 20, 21, 22, 23, 8, 9, 10, 11, 2, 3, 4, 5, 6, 7,                                                 \
                    "ldp q13, q14, [%[row], #96]\nadd %[row], %[row], %[stride]\n")                                            \
  CLEARHEAD_SIXTEEN(LOW, HIGH, 24, 25, 26, 27, 4, 5, 6, 7, 13, 14, 8, 9, 10, 11, next)
#define CLEARHEAD_ALONE_SUMS(f)                                                                                                \
  f("16", "17", "0") f("18", "19", "32") f("20", "21", "64") f("22", "23", "96") f("24", "25", "128") f("26", "27", "160")     \
  f("28", "29", "192") f("30", "31", "224")
#define CLEARHEAD_ALONE_LOAD(a, b, at) "ldp q" a ", q" b ", [%[sums], #" at "]\n"
#define CLEARHEAD_ALONE_STORE(a, b, at) "stp q" a ", q" b ", [%[sums], #" at "]\n"
#define CLEARHEAD_ALONE_ADD(LOW, HIGH)                                                                                         \
  asm volatile("movi v12.4s, #0\n" CLEARHEAD_ALONE_SUMS(CLEARHEAD_ALONE_LOAD)                                                  \
               "ldp q2, q3, [%[row]]\nldp q13, q14, [%[row], #32]\n" LOW(4, 2) HIGH(5, 2) LOW(6, 3) HIGH(7, 3)                 \
               "cbz %[n], 2f\n1:\nldr s0, [%[w]], #4\nprfm pldl1keep, [%[far]]\nprfm pldl1keep, [%[far], #64]\n"               \
               "add %[far], %[far], %[stride]\n"                                                                               \
               CLEARHEAD_THREE_PARTS(LOW, HIGH, "ldp q2, q3, [%[row]]\n")                                                      \
               CLEARHEAD_SIXTEEN(LOW, HIGH, 28, 29, 30, 31, 8, 9, 10, 11, 2, 3, 4, 5, 6, 7, "ldp q13, q14, [%[row], #32]\n")   \
               "subs %[n], %[n], #1\nb.ne 1b\n2:\nldr s0, [%[w]]\n" CLEARHEAD_THREE_PARTS(LOW, HIGH, "")                       \
               "fmla v28.4s, v8.4s, v0.s[0]\nfmla v29.4s, v9.4s, v0.s[0]\n"                                                    \
               "fmla v30.4s, v10.4s, v0.s[0]\nfmla v31.4s, v11.4s, v0.s[0]\n"                                                  \
               CLEARHEAD_ALONE_SUMS(CLEARHEAD_ALONE_STORE)                                                                     \
               : [w] "+r"(weights), [row] "+r"(row), [n] "+r"(n), [far] "+r"(far)                                              \
               : [stride] "r"(stride), [sums] "r"(sums)                                                                        \
               : "cc", "memory", "v0", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v16", \
                 "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")

  // 64 columns of `count` keys, the last of which loads nothing that would come after it.
  static void add_block(const float* weights, const char* row, int64_t stride, int64_t count, float* sums) {
    const char* far = row + ahead * stride;
    int64_t n = count - 1;
    if constexpr (type == kBFloat16) CLEARHEAD_ALONE_ADD(CLEARHEAD_BF16_LOW, CLEARHEAD_BF16_HIGH);
    else CLEARHEAD_ALONE_ADD(CLEARHEAD_FP16_LOW, CLEARHEAD_FP16_HIGH);
  }
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
