// Whether a call is still wanted: every thread asks between tiles, and the one that called asks the interpreter now and then.
#pragma once
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

namespace clearhead {

struct Stopped : std::exception {
  const char* what() const noexcept override { return "the call was interrupted"; }
};

class Stop {
 public:
  // From now on the thread that calls this also asks `interrupted`, which takes the interpreter's lock: not often, and not in
  // a call that ends before.
  void listen(std::function<bool()> interrupted) {
    interrupted_ = std::move(interrupted);
    caller_ = std::this_thread::get_id();
    next_ = Clock::now() + kEvery;
  }

  // As if nobody had asked yet.
  void reset() {
    stopped_ = false;
    interrupted_ = nullptr;
  }

  bool asked() {
    if (stopped_.load(std::memory_order_relaxed)) return true;
    if (!interrupted_ || std::this_thread::get_id() != caller_ || Clock::now() < next_) return false;
    if (interrupted_()) stopped_ = true;
    next_ = Clock::now() + kEvery;
    return stopped_;
  }

  bool stopped() const { return stopped_; }

  void check() {
    if (asked()) throw Stopped();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kEvery{40};
  std::atomic<bool> stopped_{false};
  std::function<bool()> interrupted_;
  std::thread::id caller_;
  Clock::time_point next_;
};

}  // namespace clearhead
