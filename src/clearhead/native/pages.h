// Large pages for large arrays, where the system has them to give.
//
// Memory that the system has just given is mapped when it is first written to, page by page. Arrays above 32 MiB are always new
// to a process, since malloc gives them back at once, and in small pages that took an eighth of a sparse call's time. Linux is
// asked for large ones, as NumPy does for its arrays: what is there already stays as it is, and nothing is lost where it refuses.
#pragma once
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "problem.h"

namespace clearhead {

constexpr int64_t kLargePage = int64_t(1) << 21, kLargeArray = 2 * kLargePage;

inline void ask_for_large_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  if (bytes < kLargeArray) return;
  const uintptr_t first = uintptr_t(data), last = first + uintptr_t(bytes), page = uintptr_t(kLargePage);
  const uintptr_t from = (first + page - 1) / page * page, to = last / page * page;
  madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// The same for a call's result, (batch, heads, rows, columns) in any order, if nothing else lies between its numbers.
inline void ask_for_large_pages(const View& view, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  const int64_t size = view.type == kFloat64 ? 8 : view.type == kFloat32 ? 4 : 2, bytes = batch * heads * rows * columns * size;
  if (!view || bytes < kLargeArray || view.head < 0 || view.row < 0 || view.col < 0) return;
  int64_t last = 0;
  for (int64_t b = 0; b < batch; ++b) last = view.batch[b] > last ? view.batch[b] : last;
  last += (heads - 1) * view.head + (rows - 1) * view.row + (columns - 1) * view.col + size;
  if (last == bytes) ask_for_large_pages(view.data, bytes);
}

inline void ask_for_large_pages(const Call& call, bool back) {
  if (!back) return ask_for_large_pages(call.out, call.batch, call.heads, call.queries, call.width);
  ask_for_large_pages(call.dq, call.batch, call.heads, call.queries, call.features);
  ask_for_large_pages(call.dk, call.batch, call.key_heads, call.keys, call.features);
  ask_for_large_pages(call.dv, call.batch, call.key_heads, call.keys, call.width);
}

}  // namespace clearhead
