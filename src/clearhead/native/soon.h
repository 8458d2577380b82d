// Rows that stream by one query are asked for before they are read: of many rows a core foresees too few to keep memory busy.
#pragma once
#include <algorithm>

#include "isa.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kLine = 64;    // bytes that memory gives at a time
constexpr int64_t kSoon = 4096;  // bytes of rows that are read between asking for one and reading it
#if defined(CLEARHEAD_AVX2) || defined(CLEARHEAD_AVX512)
constexpr bool kAsksSoon = true;
#else
constexpr bool kAsksSoon = false;  // not measured
#endif

// `count` rows with `bytes` in each, `stride` apart, and those that are read after them, as far apart, from `next` on.
class Soon {
 public:
  Soon(const char* rows, int64_t stride, int64_t count, int64_t bytes, const char* next)
      : bytes_(bytes), last_(count - std::max<int64_t>(kSoon / bytes, 1)), within_((count - last_) * stride),
        behind_(next - (rows + last_ * stride)) {}

  // How far from row j lies the one that is asked for meanwhile.
  int64_t from(int64_t j) const { return j < last_ ? within_ : behind_; }

  // Asks for the row that lies so far from this one.
  CLEARHEAD_INLINE void ask(const char* row, int64_t far) const {
    for (int64_t x = 0; kAsksSoon && x < bytes_; x += kLine) __builtin_prefetch(row + far + x);
  }

 private:
  const int64_t bytes_, last_, within_, behind_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
