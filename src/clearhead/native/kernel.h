// What each instruction set offers; the same source is compiled for each, and one is chosen at run time.
#pragma once
#include "problem.h"

namespace clearhead {

struct Kernel {
  const char* name;
  void (*forward)(const Call&, int threads);
  void (*backward)(const Call&, int threads);
};

namespace portable { const Kernel* kernel(); }
namespace neon { const Kernel* kernel(); }
namespace avx2 { const Kernel* kernel(); }
namespace avx512 { const Kernel* kernel(); }

}  // namespace clearhead
