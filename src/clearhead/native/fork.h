// What is to be done in a child that was forked; Windows has no fork.
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

}  // namespace clearhead
