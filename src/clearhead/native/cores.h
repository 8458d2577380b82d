// The cores that a thread may run on now.
#pragma once
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <thread>

namespace clearhead {

inline int cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(CPU_COUNT(&set), 1);
#endif
  return std::max(int(std::thread::hardware_concurrency()), 1);
}

}  // namespace clearhead
