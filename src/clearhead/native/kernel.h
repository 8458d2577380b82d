// What each instruction set offers; the same source is compiled for each, and one is chosen at run time.
#pragma once
#include "problem.h"

namespace clearhead {

// A size at whose border something happens, and the axis along which it is counted.
struct Size {
  const char* axis;
  const char* name;
  int64_t size;
};

// The tiles of keys that are left for each block of queries of each head and batch row, the mixed ones of each before the full ones;
// where its tiles begin, how many are mixed and how many full, three numbers for each block; and whether it is certain from that
// alone that each query sees something.
struct TileLists {
  std::vector<int32_t> counts, tiles;
  bool certain = true;
};

// How a mask is cut into lists of tiles: how many batch rows and heads differ, how large blocks and tiles are; or for each tile
// of keys the blocks of queries.
struct TileCut {
  int64_t batch, heads, rows, columns;
  bool turned;
};

struct Kernel {
  const char* name;
  void (*forward)(const Call&, int threads);
  void (*backward)(const Call&, int threads);
  std::vector<Size> (*sizes)(bool wide);
  std::vector<std::string> (*observes)();  // what can be asked for in Wanted::of_weights
  TileLists (*tile_lists)(const Call&, const TileCut&, int threads);  // of a call of which only the mask and the sizes are there
};

namespace portable { const Kernel* kernel(); }
namespace neon { const Kernel* kernel(); }
namespace neon_fp16 { const Kernel* kernel(); }
namespace neon_bf16 { const Kernel* kernel(); }
namespace avx2 { const Kernel* kernel(); }
namespace avx512 { const Kernel* kernel(); }
namespace avx512_bf16 { const Kernel* kernel(); }
namespace amx { const Kernel* kernel(); }

// The kernel of an instruction set, or the best that this machine has where none is named; throws where it has not that one.
const Kernel* named(const std::string& isa);

}  // namespace clearhead
