// Work spread over threads: tasks are taken in turn, and what each task computes does not depend on who took it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "stop.h"

namespace clearhead {

// Threads are started for each call and end with it: nothing is left behind for a fork to copy half of, and calls from
// many threads at once do not meet. Starting one takes about 20 µs, so calls of less than a millisecond stay on one. A task
// that takes long asks `stop` itself; what it throws ends the others, and all threads have ended when it goes on from here.
template <class Make> void parallel(Stop& stop, int64_t tasks, int threads, Make make) {
  std::atomic<int64_t> next{0}, running{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  std::mutex guard;
  auto work = [&] {
    try {
      auto run = make();  // each thread its own workspace
      for (int64_t task; !failed && (task = next.fetch_add(1)) < tasks;) {
        stop.check();
        run(task);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(guard);
      failure = std::current_exception();
      failed = true;
    }
    --running;
  };
  std::vector<std::thread> others;
  others.reserve(size_t(std::max<int64_t>(std::min<int64_t>(threads, tasks), 0)));  // nothing may throw once one runs
  for (int64_t t = 1; t < std::min<int64_t>(threads, tasks); ++t) {
    try {
      ++running;
      others.emplace_back(work);
    } catch (const std::system_error&) {
      --running;
      break;  // no more threads to be had: those that there are do the work
    }
  }
  ++running;
  work();
  // Not asleep while the last task ends: Linux wakes a sleeper where the waker ran, and the next call's first thread would
  // then start on the same core and wait for its turn, some milliseconds.
  while (running > 0) {
    stop.asked();
    std::this_thread::yield();
  }
  for (auto& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
}

// Groups of tasks, each with steps that prepare it and must all have ended before its tasks begin. A thread stays with a
// group that it began, and when none is left to begin helps with the others. `make(number)` gives a thread's worker, which
// has begin(group), prepare(group, step), run(group, task) and end(group), the last by whoever ends the group's last task.
template <class Make>
void parallel_groups(Stop& stop, int64_t groups, int64_t steps, int64_t tasks, int threads, Make make) {
  struct Progress { std::atomic<int64_t> begun{0}, step{0}, prepared{0}, task{0}, ended{0}; };
  std::vector<Progress> progress(groups);
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  const auto wait = [&](const std::atomic<int64_t>& count, int64_t wanted) {
    while (count < wanted && !failed) {
      stop.check();
      std::this_thread::yield();
    }
    return !failed;
  };
  parallel(stop, threads, threads, [&] {
    return [&](int64_t number) {
      try {
        auto worker = make(number);
        const auto work = [&](int64_t group) {
          Progress& here = progress[group];
          if (here.task >= tasks || !wait(here.begun, 1)) return;
          for (int64_t step; (step = here.step.fetch_add(1)) < steps; ++here.prepared) worker.prepare(group, step);
          if (!wait(here.prepared, steps)) return;
          for (int64_t task; !failed && (task = here.task.fetch_add(1)) < tasks;) {
            worker.run(group, task);
            if (here.ended.fetch_add(1) + 1 == tasks) worker.end(group);
          }
        };
        for (int64_t group; (group = next.fetch_add(1)) < groups;) {
          worker.begin(group);
          progress[group].begun = 1;
          work(group);
        }
        for (int64_t group = 0; group < groups; ++group) work(group);
      } catch (...) {
        failed = true;
        throw;
      }
    };
  });
}

}  // namespace clearhead
