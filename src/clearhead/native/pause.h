// Waiting without sleep: for what takes less long than to fall asleep and be woken.
#pragma once
#include <atomic>
#include <thread>

namespace clearhead {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // about as long as x86's pause; `yield` is nothing at all on most cores
#endif
}

// Some pauses, and then the core for whoever else wants it: that may be the one who is waited for.
class Patience {
 public:
  void wait() {
    if (++waited_ <= kPauses) pause();
    else std::this_thread::yield();
  }

 private:
  static constexpr int kPauses = 1000;
  int waited_ = 0;
};

// A lock that is held for some instructions only.
class Spinning {
 public:
  void lock() {
    for (Patience patience; held_.test_and_set(std::memory_order_acquire);) patience.wait();
  }
  void unlock() { held_.clear(std::memory_order_release); }

 private:
  std::atomic_flag held_ = ATOMIC_FLAG_INIT;
};

}  // namespace clearhead
