// Which instruction sets the CPU has and the system keeps. On x86-64 the CPU itself is asked: what compilers offer for it lies
// in a library of theirs that Windows' linker does not look into. On ARM only the system may ask, and tells; where it is none of
// those here, the CPU counts as one that has no more than all of them.
#pragma once
#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#include <sys/types.h>
#endif

namespace clearhead {

struct Cpu {
  bool fp16 = false;  // FMLAL: products of float16 that are added up in float32
  bool bf16 = false;  // that, and BFMMLA and BFDOT: no CPU is known to have these alone

  static const Cpu& here() {
    static const Cpu cpu;
    return cpu;
  }

 private:
#if defined(__linux__)
  Cpu() {
    constexpr unsigned long has_fhm = 1ul << 23, has_bf16 = 1ul << 14;  // HWCAP_ASIMDFHM, HWCAP2_BF16: older headers lack them
    fp16 = getauxval(AT_HWCAP) & has_fhm;
    bf16 = fp16 && getauxval(AT_HWCAP2) & has_bf16;
  }
#elif defined(__APPLE__)
  static bool has(const char* feature) {
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname(feature, &found, &size, nullptr, 0) == 0 && found;
  }

  Cpu() {
    fp16 = has("hw.optional.arm.FEAT_FHM");
    bf16 = fp16 && has("hw.optional.arm.FEAT_BF16");
  }
#else
  Cpu() = default;
#endif
};

}  // namespace clearhead
#elif defined(__x86_64__)
#include <cstdint>
#include <initializer_list>

namespace clearhead {

struct Cpu {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx = false;

  static const Cpu& here() {
    static const Cpu cpu;
    return cpu;
  }

 private:
  struct Registers { uint32_t a, b, c, d; };

  static Registers ask(uint32_t leaf, uint32_t part) {
    Registers said;
    asm volatile("cpuid" : "=a"(said.a), "=b"(said.b), "=c"(said.c), "=d"(said.d) : "a"(leaf), "c"(part));
    return said;
  }

  // The registers that the system saves when it lets another program run; only where the CPU says that there is such a thing.
  static uint32_t kept() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
  }

  static bool all(uint32_t word, std::initializer_list<int> bits) {
    for (const int bit : bits)
      if (!(word >> bit & 1)) return false;
    return true;
  }

  Cpu() {
    if (ask(0, 0).a < 7) return;
    const Registers first = ask(1, 0), seventh = ask(7, 0);
    if (!all(first.c, {12, 27, 28, 29})) return;  // FMA, xgetbv, AVX, F16C
    const uint32_t saved = kept();
    avx2 = all(saved, {1, 2}) && all(seventh.b, {5});
    avx512 = avx2 && all(saved, {5, 6, 7}) && all(seventh.b, {16, 17, 30, 31});  // F, DQ, BW, VL
    avx512_bf16 = avx512 && seventh.a >= 1 && all(ask(7, 1).a, {5});
    amx = avx512_bf16 && all(seventh.d, {22, 24});  // for bfloat16, and the tiles; the system is asked for them apart
  }
};

}  // namespace clearhead
#endif
