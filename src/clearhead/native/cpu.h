// Which instruction sets of x86-64 the CPU has and the system keeps. Asked of the CPU itself: what compilers offer for it lies
// in a library of theirs that Windows' linker does not look into.
#pragma once
#if defined(__x86_64__)
#include <cstdint>
#include <initializer_list>

namespace clearhead {

struct Cpu {
  bool avx2 = false, avx512 = false, amx = false;

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
    amx = avx512 && all(seventh.d, {22, 24});  // for bfloat16, and the tiles; the system is asked for them apart
  }
};

}  // namespace clearhead
#endif
