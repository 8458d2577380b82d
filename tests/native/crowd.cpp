// The pool under ThreadSanitizer: many threads call at once, calls nest, and a child that was forked has a pool of its own. What
// tasks write is not atomic: two that have the same one, or a task before its group is prepared, are a race.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "pool.h"
#include "threads.h"

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

// Every task once, whoever has it.
void tasks_of(int64_t count, int threads) {
  const clearhead::Call call;
  std::vector<int> done(count);
  clearhead::parallel(call, count, threads, [&](int) { return [&](int64_t task) { ++done[task]; }; });
  for (int times : done)
    if (times != 1) std::abort();
}

// Every group begun once, prepared whole before its tasks, each of them once, and ended once after all of them; what is begun
// lies with the thread that began it, as packed keys do.
struct Groups {
  int64_t count, steps, tasks;
  std::vector<std::vector<int>> rooms;      // of threads
  std::vector<std::vector<int>*> prepared;  // of groups
  std::vector<std::vector<int>> done;
  std::vector<int> ended;

  Groups(int64_t groups, int64_t s, int64_t t, int threads)
      : count(groups), steps(s), tasks(t), rooms(threads), prepared(groups), done(groups, std::vector<int>(t)), ended(groups) {}

  struct Worker {
    Groups& all;
    std::vector<int>& own;
    void begin(int64_t group) {
      own.assign(all.steps, -1);
      all.prepared[group] = &own;
    }
    void prepare(int64_t group, int64_t step) {
      if (group % 2) std::this_thread::sleep_for(std::chrono::microseconds(20));  // others come meanwhile
      (*all.prepared[group])[step] = int(group);
    }
    void run(int64_t group, int64_t task) {
      for (int one : *all.prepared[group])
        if (one != group) std::abort();
      ++all.done[group][task];
    }
    void end(int64_t group) {
      for (int times : all.done[group])
        if (times != 1) std::abort();
      ++all.ended[group];
    }
  };

  void go(bool alike) {
    const clearhead::Call call;
    clearhead::parallel_groups(call, count, steps, tasks, alike, int(rooms.size()),
                               [&](int n) { return Worker{*this, rooms[n]}; });
    for (int times : ended)
      if (times != 1) std::abort();
  }
};

void calls(int count, int threads) {
  for (int n = 0; n < count; ++n) {
    tasks_of(n % 37, threads);
    Groups(1 + n % 9, 1 + n % 3, 1 + n % 5, threads).go(n % 2);
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
