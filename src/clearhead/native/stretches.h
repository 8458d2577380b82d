// All keys of a call, cut where what some queries see of them changes: none of the pairs, some, or all.
#pragma once
#include "isa.h"
#include "mask.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// keys for which a mask is decided at once, whole blocks of them; gaps that are shorter are not worth a stretch of their own
constexpr int64_t kMaskStep = 32 / kRows * kRows;

struct Stretch { int64_t end; Verdict verdict; };  // keys up to `end`, from where the one before it ends

// All keys, cut where the verdict changes.
class Stretches {
 public:
  Stretches() = default;
  // A copy has what is seen, and no room for parts.
  Stretches(const Stretches& other) : all_(other.all_), keys_(other.keys_), cursor_(other.cursor_) {}
  Stretches& operator=(const Stretches& other) {
    all_ = other.all_, keys_ = other.keys_, cursor_ = other.cursor_;
    return *this;
  }

  void begin(int64_t keys) { keys_ = keys, all_.clear(), cursor_ = 0; }
  void add(int64_t end, Verdict verdict) {
    end = std::min(end, keys_);
    const int64_t start = all_.empty() ? 0 : all_.back().end;
    if (end <= start) return;
    if (!all_.empty() && all_.back().verdict == verdict) all_.back().end = end;
    else all_.push_back({end, verdict});
  }

  // What holds of keys [j0, j1), which lie where `each` or `on_to` was asked for last, or behind it.
  Verdict over(int64_t j0, int64_t j1) const {
    size_t n = cursor_;
    while (all_[n].end <= j0) ++n;
    const Verdict first = all_[n].verdict;
    for (; all_[n].end < j1; ++n)
      if (all_[n + 1].verdict != first) return kSome;
    return first;
  }

  // use(j0, j1) for the parts of [low, high) of which something is seen; to be asked in ascending order.
  template <class Use> void each(int64_t low, int64_t high, Use use) {
    on_to(low);
    int64_t from = low, start = -1, stop = 0;
    for (size_t n = cursor_; n < all_.size() && from < high; ++n) {
      const int64_t end = std::min(all_[n].end, high);
      if (all_[n].verdict != kNone) {
        if (start >= 0 && from - stop >= kMaskStep) use(start, stop), start = -1;
        if (start < 0) start = from;
        stop = end;
      }
      from = end;
    }
    if (start >= 0) use(start, stop);
  }
  void again() { cursor_ = 0; }
  // Where one is, back to there, and on to what holds from `low` on.
  size_t mark() const { return cursor_; }
  void back(size_t mark) { cursor_ = mark; }
  void on_to(int64_t low) {
    while (cursor_ < all_.size() && all_[cursor_].end <= low) ++cursor_;
  }

  // The first key from `low` on of which something is seen; all keys where there is none.
  int64_t next(int64_t low) const {
    int64_t from = low;
    for (size_t n = cursor_; n < all_.size(); ++n) {
      if (all_[n].end > from && all_[n].verdict != kNone) return from;
      from = std::max(from, all_[n].end);
    }
    return keys_;
  }

  // use(tile) for the tiles of so many keys in [low, high) of which something is seen.
  template <class Use> void each_tile(int64_t low, int64_t high, int64_t tile, Use use) const {
    int64_t from = low, next = 0;
    for (size_t n = cursor_; n < all_.size() && from < high; ++n) {
      const int64_t end = std::min(all_[n].end, high);
      if (all_[n].verdict != kNone)
        for (next = std::max(next, from / tile); next * tile < end; ++next) use(next);
      from = std::max(from, end);
    }
  }

  // How far one can go from `low` on until `most` keys are seen, what lies between them counted where it is short.
  int64_t reach(int64_t low, int64_t most) const {
    int64_t from = low;
    for (size_t n = cursor_; n < all_.size() && from < keys_; ++n) {
      if (all_[n].end <= from) continue;
      const int64_t count = all_[n].end - from;
      const int64_t cost = all_[n].verdict != kNone ? count : std::min(count, kMaskStep);
      if (cost > most) return from + most;
      most -= cost, from = all_[n].end;
    }
    return keys_;
  }

  // use(from, end, verdict) for all stretches of which something is seen.
  template <class Use> void each_with_verdict(Use use) const {
    int64_t from = 0;
    for (const Stretch& one : all_) {
      if (one.verdict != kNone) use(from, one.end, one.verdict);
      from = one.end;
    }
  }

  int64_t size() const { return int64_t(all_.size()); }

  // How many keys are seen.
  int64_t count() const {
    int64_t found = 0;
    each_with_verdict([&found](int64_t from, int64_t end, Verdict) { found += end - from; });
    return found;
  }

  // How many keys are seen by either of two, and by one of them only, added to both numbers.
  static void compare(const Stretches& left, const Stretches& right, int64_t& either, int64_t& apart) {
    int64_t from = 0;
    for (size_t x = 0, y = 0; x < left.all_.size() && y < right.all_.size();) {
      const Stretch l = left.all_[x], r = right.all_[y];
      const int64_t end = std::min(l.end, r.end);
      if (l.verdict != kNone || r.verdict != kNone) either += end - from;
      if ((l.verdict != kNone) != (r.verdict != kNone)) apart += end - from;
      x += l.end <= r.end, y += r.end <= l.end, from = end;
    }
  }

  // Room for one of two that are joined into this one, to be begun; it is kept for the next time.
  Stretches& part(int n) {
    if (parts_.empty()) parts_.resize(2);
    return parts_[n];
  }
  void turn() {
    for (Stretch& one : all_) one.verdict = one.verdict == kAll ? kNone : one.verdict == kNone ? kAll : kSome;
  }
  // What both allow, or at least one.
  void join(const Stretches& left, const Stretches& right, bool both) {
    for (size_t x = 0, y = 0; x < left.all_.size() && y < right.all_.size();) {
      const Stretch l = left.all_[x], r = right.all_[y];
      add(std::min(l.end, r.end), both ? std::min(l.verdict, r.verdict) : std::max(l.verdict, r.verdict));
      x += l.end <= r.end, y += r.end <= l.end;
    }
  }

 private:
  std::vector<Stretch> all_;
  std::vector<Stretches> parts_;
  int64_t keys_ = 0;
  size_t cursor_ = 0;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
