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

// Tasks in as many runs as there are threads: each thread has one of its own, the same in every call of a kind, since what it
// read then may still be in its cache. Whoever has done all of its own takes from the others'.
class Runs {
 public:
  using Next = std::atomic<int64_t>;

  // `next` has room for a number for each run, `apart` from one to the next.
  Runs(int64_t tasks, int64_t runs, Next* next, int64_t apart) : tasks_(tasks), runs_(runs), next_(next), apart_(apart) {}

  // Before any thread takes a task.
  void begin() {
    for (int64_t n = 0; n < runs_; ++n) next_[n * apart_].store(start(n), std::memory_order_relaxed);
  }

  // The next task for the thread of a number; −1 when there is none. `passed` counts the runs that it found done, 0 at first.
  int64_t take(int64_t number, int64_t& passed) {
    for (; passed < runs_; ++passed) {
      const int64_t run = (number + passed) % runs_, end = start(run + 1);
      Next& next = next_[run * apart_];
      if (next.load(std::memory_order_relaxed) >= end) continue;
      if (const int64_t task = next.fetch_add(1); task < end) return task;
    }
    return -1;
  }

 private:
  int64_t start(int64_t run) const { return run * tasks_ / runs_; }

  const int64_t tasks_, runs_;
  Next* const next_;
  const int64_t apart_;
};

// Tasks one by one; `make(number)` gives a thread what runs one, with a workspace of its own.
template <class Make> void parallel(const Call& call, int64_t tasks, int threads, Make make) {
  if (!tasks) return;
  threads = int(std::clamp<int64_t>(threads, 1, tasks));
  constexpr int64_t line = 64 / sizeof(Runs::Next);
  std::vector<Runs::Next> room(threads * line);
  Runs runs(tasks, threads, room.data(), line);
  runs.begin();
  std::atomic<bool> failed{false};
  spread(call, threads, failed, [&](int number) {
    int64_t passed = 0, task = runs.take(number, passed);
    if (task < 0) return;
    auto run = make(number);
    for (; !failed && task >= 0; task = runs.take(number, passed)) {
      call.stop.check();
      run(task);
    }
  });
}

// Groups of tasks, each with steps that prepare it and must all have ended before its tasks begin. A thread begins at groups of
// its own, as with tasks, stays with a group that it began, and when none is left to begin helps with the others: those that
// come first after its own. Where threads share groups, each has a run of a group's steps and of its tasks, if tasks are `alike`:
// what comes one after the other reads much the same. `make(number)` gives a thread's worker, which has begin(group),
// prepare(group, step), run(group, task) and end(group), the last by whoever ends the group's last task.
template <class Make>
void parallel_groups(const Call& call, int64_t groups, int64_t steps, int64_t tasks, bool alike, int threads, Make make) {
  const int64_t shared = alike && groups ? (threads + groups - 1) / groups : 1;
  struct alignas(64) Progress { std::atomic<int64_t> taken{0}, begun{0}, prepared{0}, given{0}, ended{0}; };
  std::vector<Progress> progress(groups);
  std::vector<Runs::Next> room(2 * groups * shared);
  const auto steps_of = [&](int64_t group) { return Runs(steps, shared, room.data() + 2 * group * shared, 1); };
  const auto tasks_of = [&](int64_t group) { return Runs(tasks, shared, room.data() + (2 * group + 1) * shared, 1); };
  for (int64_t n = 0; n < groups; ++n) steps_of(n).begin(), tasks_of(n).begin();
  // groups that nobody has begun, and those of which not all tasks are taken: who finds none need not look at each
  struct alignas(64) Left { std::atomic<int64_t> count; } fresh{{groups}}, open{{tasks > 0 ? groups : 0}};
  std::atomic<bool> failed{false};
  const auto wait = [&](const std::atomic<int64_t>& count, int64_t wanted) {
    for (Patience patience; count < wanted && !failed; patience.wait()) call.stop.check();
    return !failed;
  };
  spread(call, threads, failed, [&](int number) {
    auto worker = make(number);
    const int64_t own = number * groups / threads;
    const auto work = [&](int64_t group) {
      Progress& here = progress[group];
      if (here.given >= tasks || !wait(here.begun, 1)) return;
      Runs to_prepare = steps_of(group), to_run = tasks_of(group);
      const int64_t mine = number % shared;
      int64_t passed = 0, done = 0;
      for (int64_t step; (step = to_prepare.take(mine, passed)) >= 0; ++here.prepared) worker.prepare(group, step);
      if (!wait(here.prepared, steps)) return;
      for (int64_t task; !failed && (task = to_run.take(mine, done)) >= 0;) {
        call.stop.check();
        if (here.given.fetch_add(1) + 1 == tasks) --open.count;
        worker.run(group, task);
        if (here.ended.fetch_add(1) + 1 == tasks) worker.end(group);
      }
    };
    for (int64_t n = 0; n < groups && fresh.count > 0 && !failed; ++n) {
      const int64_t group = (own + n) % groups;
      Progress& here = progress[group];
      if (here.taken.load(std::memory_order_relaxed) || here.taken.exchange(1)) continue;
      --fresh.count;
      worker.begin(group);
      here.begun = 1;
      work(group);
    }
    for (int64_t n = 0; n < groups && open.count > 0 && !failed; ++n) work((own + n) % groups);
  });
}

}  // namespace clearhead
