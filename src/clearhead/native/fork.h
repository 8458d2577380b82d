// What is to be done where a process forks, and in the child; Windows has no fork.
#pragma once
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace clearhead {

inline void in_children([[maybe_unused]] void (*then)()) {
#if !defined(_WIN32)
  pthread_atfork(nullptr, nullptr, then);
#endif
}

inline void around_forks([[maybe_unused]] void (*before)(), [[maybe_unused]] void (*in_parent)(),
                         [[maybe_unused]] void (*in_child)()) {
#if !defined(_WIN32)
  pthread_atfork(before, in_parent, in_child);
#endif
}

}  // namespace clearhead
