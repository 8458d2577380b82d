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

namespace clearhead {

// Threads are started for each call and end with it: nothing is left behind for a fork to copy half of, and calls from
// many threads at once do not meet. Starting one takes about 20 µs, so calls of less than a millisecond stay on one.
//
// Tasks may come in two phases: none past `first` begins before all of the first ones have ended. Phases of one call are
// cheaper than two calls.
template <class Make> void parallel(int64_t tasks, int threads, Make make, int64_t first = 0) {
  std::atomic<int64_t> next{0}, ended{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  std::mutex guard;
  auto work = [&] {
    try {
      auto run = make();  // each thread its own workspace
      for (int64_t task; (task = next.fetch_add(1)) < tasks;) {
        while (task >= first && ended < first && !failed) std::this_thread::yield();
        if (failed) break;
        run(task);
        if (task < first) ++ended;
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(guard);
      failure = std::current_exception();
      failed = true;
    }
  };
  std::vector<std::thread> others;
  for (int64_t t = 1; t < std::min<int64_t>(threads, tasks); ++t) {
    try {
      others.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: those that there are do the work
    }
  }
  work();
  for (auto& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace clearhead
