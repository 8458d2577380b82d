// The pool of threads: a list of open jobs, which idle threads watch for a moment and then sleep beside.
#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "cores.h"
#include "fork.h"
#include "pause.h"

namespace clearhead {
namespace {

// how long a thread without work watches for the next job: about as long as waking it would take
constexpr std::chrono::microseconds kWatch{100};

struct Job {
  void (*work)(void*, int);
  void* data;
  int places;                  // of helpers that are still wanted; under the list's lock
  std::vector<char> taken;     // the numbers that are had, from 1 on; under the list's lock
  std::atomic<int> inside{0};  // helpers at work

  // The wanted number, or the first that nobody has.
  int take(int wanted) {
    const int count = int(taken.size());
    int place = wanted - 1;
    if (place >= count || taken[place]) place = int(std::find(taken.begin(), taken.end(), 0) - taken.begin());
    taken[place] = 1;
    return place + 1;
  }
};

class Pool {
 public:
  void run(int threads, void (*work)(void*, int), void* data) {
    Job job{work, data, threads - 1, std::vector<char>(threads - 1)};
    start(threads - 1);
    {
      const std::lock_guard<Spinning> lock(list_);
      open_.push_back(&job);
      places_ += job.places;
    }
    wake(std::min(threads, cores()) - 1);  // more would only take turns
    work(data, 0);
    {
      const std::lock_guard<Spinning> lock(list_);
      places_ -= job.places;
      open_.erase(std::remove(open_.begin(), open_.end(), &job), open_.end());
    }
    for (Patience patience; job.inside > 0;) patience.wait();
  }

 private:
  // As many threads as anybody has asked for so far; fewer where there are no more to be had.
  void start(int wanted) {
    if (started_ >= wanted) return;
    const std::lock_guard<std::mutex> lock(beds_);
    try {
      for (; started_ < wanted; ++started_) std::thread(&Pool::serve, this, started_ + 1).detach();
    } catch (const std::system_error&) {
    }
  }

  void wake(int wanted) {
    const int asleep = asleep_;
    if (asleep == 0) return;
    const std::lock_guard<std::mutex> lock(beds_);  // whoever has seen no places is asleep by now
    if (wanted >= asleep) return alarm_.notify_all();
    for (int n = 0; n < wanted; ++n) alarm_.notify_one();
  }

  void serve(int own) {
    for (;;) {
      watch(own);
      if (Job* job = nullptr; const int number = join(job, own)) {
        job->work(job->data, number);
        --job->inside;
      }
    }
  }

  // Until a job has places. Threads that are more than the cores sleep at once: who watches has a core that others could use.
  void watch(int own) {
    const auto until = std::chrono::steady_clock::now() + (places_ <= 0 && own < cores() ? kWatch : kWatch.zero());
    while (places_ <= 0) {
      for (int n = 0; n < 64 && places_ <= 0; ++n) pause();
      if (places_ > 0 || std::chrono::steady_clock::now() < until) continue;
      std::unique_lock<std::mutex> lock(beds_);
      ++asleep_;
      alarm_.wait(lock, [&] { return places_ > 0; });
      --asleep_;
    }
  }

  // A place in the oldest job that has one: its number; 0 for none.
  int join(Job*& job, int own) {
    const std::lock_guard<Spinning> lock(list_);
    for (Job* one : open_) {
      if (one->places == 0) continue;
      job = one;
      --one->places, --places_, ++one->inside;
      return one->take(own);
    }
    return 0;
  }

  Spinning list_;  // held for some instructions only
  std::vector<Job*> open_;
  std::atomic<int> places_{0}, started_{0}, asleep_{0};
  std::mutex beds_;
  std::condition_variable alarm_;
};

std::atomic<Pool*> pool{nullptr};
std::atomic<void*> team_parallel{nullptr}, team_number{nullptr};

// A child that was forked has none of its parent's threads: it starts anew, and does not touch what they may have held.
void forget() {
  pool = nullptr;
  team_parallel = nullptr;
}

// Never destroyed: its threads end with the process.
Pool& the_pool() {
  Pool* here = pool;
  if (here) return *here;
  Pool* fresh = new Pool;
  if (pool.compare_exchange_strong(here, fresh)) return *fresh;
  delete fresh;
  return *here;
}

// A job for OpenMP's team: the first of its threads are wanted, the others go back at once.
struct Shift {
  void (*work)(void*, int);
  void* data;
  int threads;
  int (*number)();

  static void enter(void* shift) {
    const Shift& here = *static_cast<Shift*>(shift);
    const int number = here.number();  // the one who called has 0
    if (number < here.threads) here.work(here.data, number);
  }
};

}  // namespace

void prepare_pool() { in_children(forget); }

void set_team(void* parallel, void* number) {
  team_number = number;
  team_parallel = parallel;
}

void together(int threads, int team, void (*work)(void*, int), void* data) {
  if (threads <= 1) return work(data, 0);
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  const auto parallel = reinterpret_cast<Parallel>(team_parallel.load());
  if (!parallel || team < threads) return the_pool().run(threads, work, data);
  // always the whole team: OpenMP ends the threads of a larger one, and starts them again for the next
  Shift shift{work, data, threads, reinterpret_cast<int (*)()>(team_number.load())};
  parallel(Shift::enter, &shift, unsigned(team), 0);
}

}  // namespace clearhead
