// Work spread over threads: tasks are taken in turn, and what each task computes does not depend on who took it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <vector>

#include "pause.h"
#include "pool.h"
#include "problem.h"

namespace clearhead {

// `work(number)` on this thread and on those that come to help, each with a number of its own below `threads`. It is over when
// all who began have ended; what one of them throws is thrown here, and `failed` tells the others.
template <class Work> void spread(const Call& call, int threads, std::atomic<bool>& failed, Work work) {
  struct Shared {
    Work& work;
    std::atomic<bool>& failed;
    Stop& stop;
    std::exception_ptr failure;
    std::mutex guard;
    std::atomic<int> running{0};

    void enter(int number) {
      ++running;
      try {
        work(number);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(guard);
        failure = std::current_exception();
        failed = true;
      }
      --running;
      // the one who called goes on listening for an interrupt while the last task ends
      if (number == 0)
        for (Patience patience; running > 0; patience.wait()) stop.asked();
    }
  } shared{work, failed, call.stop, {}, {}, {}};
  together(threads, call.team, [](void* data, int number) { static_cast<Shared*>(data)->enter(number); }, &shared);
  if (shared.failure) std::rethrow_exception(shared.failure);
}

// Tasks one after the other; `make(number)` gives a thread what runs one, with a workspace of its own.
template <class Make> void parallel(const Call& call, int64_t tasks, int threads, Make make) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  spread(call, int(std::min<int64_t>(threads, tasks)), failed, [&](int number) {
    int64_t task = next.fetch_add(1);
    if (task >= tasks) return;
    auto run = make(number);
    for (; !failed && task < tasks; task = next.fetch_add(1)) {
      call.stop.check();
      run(task);
    }
  });
}

// Groups of tasks, each with steps that prepare it and must all have ended before its tasks begin. A thread stays with a
// group that it began, and when none is left to begin helps with the others. `make(number)` gives a thread's worker, which
// has begin(group), prepare(group, step), run(group, task) and end(group), the last by whoever ends the group's last task.
template <class Make>
void parallel_groups(const Call& call, int64_t groups, int64_t steps, int64_t tasks, int threads, Make make) {
  struct alignas(64) Progress { std::atomic<int64_t> begun{0}, step{0}, prepared{0}, task{0}, ended{0}; };
  std::vector<Progress> progress(groups);
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  const auto wait = [&](const std::atomic<int64_t>& count, int64_t wanted) {
    for (Patience patience; count < wanted && !failed; patience.wait()) call.stop.check();
    return !failed;
  };
  spread(call, threads, failed, [&](int number) {
    auto worker = make(number);
    const auto work = [&](int64_t group) {
      Progress& here = progress[group];
      if (here.task >= tasks || !wait(here.begun, 1)) return;
      for (int64_t step; (step = here.step.fetch_add(1)) < steps; ++here.prepared) worker.prepare(group, step);
      if (!wait(here.prepared, steps)) return;
      for (int64_t task; !failed && (task = here.task.fetch_add(1)) < tasks;) {
        call.stop.check();
        worker.run(group, task);
        if (here.ended.fetch_add(1) + 1 == tasks) worker.end(group);
      }
    };
    for (int64_t group; (group = next.fetch_add(1)) < groups;) {
      worker.begin(group);
      progress[group].begun = 1;
      work(group);
    }
    // those who come to help begin at different groups, so that not all press into the same one
    for (int64_t n = 0; n < groups; ++n) work((n + number) % groups);
  });
}

}  // namespace clearhead
