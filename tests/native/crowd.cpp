// The pool under ThreadSanitizer: many threads call at once, calls nest, and a child that was forked has a pool of its own.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "pool.h"

struct Sum {
  std::atomic<long> next{0}, total{0};
  std::atomic<int> seen{0};
  int depth = 0;
  std::vector<std::atomic<int>> inside;

  explicit Sum(int threads, int nested) : depth(nested), inside(threads) {}

  void work(int number) {
    if (inside[number].fetch_add(1)) std::abort();  // two have the same number
    ++seen;
    for (long task; (task = next.fetch_add(1)) < 200;) {
      if (depth && task % 50 == 0) {
        Sum inner(3, 0);
        clearhead::together(3, 0, enter, &inner);
        if (inner.total != 199 * 200 / 2) std::abort();
      }
      total += task;
    }
    --inside[number];
  }
  static void enter(void* sum, int number) { static_cast<Sum*>(sum)->work(number); }
};

void calls(int count, int threads) {
  for (int n = 0; n < count; ++n) {
    Sum sum(threads, n % 2);
    clearhead::together(threads, 0, Sum::enter, &sum);
    if (sum.total != 199 * 200 / 2 || sum.seen < 1 || sum.seen > threads) std::abort();
    if (n % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));  // they fall asleep, and are woken
  }
}

int main(int count, char** words) {
  const int each = count > 1 ? std::atoi(words[1]) : 200;
  const bool forks = count > 2 && std::string(words[2]) == "fork";
  clearhead::prepare_pool();
  std::vector<std::thread> callers;
  for (int n = 0; n < 4; ++n) callers.emplace_back(calls, each, 2 + n);
  if (forks)
    for (int n = 0; n < 8; ++n) {
      const pid_t child = fork();
      if (child == 0) {
        calls(20, 4);
        _exit(0);
      }
      int status = 0;
      if (waitpid(child, &status, 0) != child || status != 0) std::abort();
    }
  for (auto& caller : callers) caller.join();
  std::puts("well");
}
