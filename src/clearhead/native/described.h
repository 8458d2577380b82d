// A call described by whole numbers and arrays, as a compiled XLA program holds it: read, and made into a Call.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "problem.h"

namespace clearhead {

// Types that arrays of a described call have besides those of problem.h.
enum WholeType : int { kInt32 = 5, kInt64 = 6 };

// A dense array of the caller's, the last axis the fastest.
struct Given {
  void* data = nullptr;
  int type = kFloat32;
  std::vector<int64_t> dims;

  int64_t size() const {
    int64_t all = 1;
    for (const int64_t size : dims) all *= size;
    return all;
  }
};

// The numbers are written by `kernels/xla/describing.py`, in the order in which described.cpp reads them. Arrays come as
// (*batch, …), each batch axis whole or of size one; `scale`, sinks and a table of biases have no batch axes.
struct Described {
  Call call;
  bool back = false;
  int wanted = 1;  // threads that are worth it

  // Throws std::invalid_argument where the numbers and the arrays do not fit together.
  Described(const int64_t* numbers, int64_t count, double scale, double softcap, std::vector<Given> given,
            std::vector<Given> results);

  // Positions that the caller wants in 32 bits are written there; to be called after the kernel.
  void finish();

 private:
  struct Narrowed {
    std::vector<int64_t> wide;
    int32_t* into;
  };
  std::vector<std::unique_ptr<Narrowed>> narrowed_;
  std::vector<char> spread_;  // how much each query counts, one batch row after the other

  void* whole_rows(const Given& array, const std::vector<int64_t>& batch);
};

// The most threads that calls of compiled programs take, which ask nobody; `by_cores`: no more than the process has cores.
void allow_threads(int count, bool by_cores);
int allowed_threads();

}  // namespace clearhead
