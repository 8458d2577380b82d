// Where queries, and keys, are cut into panels: at borders where a mask changes much, since a panel across one sees what both
// sides see.
#pragma once
#include "sight.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// Parts of [0, end), each at most as long as a panel is wide.
class Panels {
 public:
  Panels() = default;
  // Whole panels from each border on; borders ascend.
  Panels(int64_t end, int64_t width, const std::vector<int64_t>& borders) {
    for (size_t n = 0; n <= borders.size(); ++n) {
      const int64_t stop = n < borders.size() ? std::min(borders[n], end) : end;
      while (starts_.back() < stop) starts_.push_back(std::min(starts_.back() + width, stop));
    }
  }

  int64_t count() const { return int64_t(starts_.size()) - 1; }
  int64_t first(int64_t n) const { return starts_[n]; }
  int64_t last(int64_t n) const { return starts_[n + 1]; }
  int64_t length(int64_t n) const { return last(n) - first(n); }

  // The first panel that starts at `at` or behind it; `count` where none does.
  int64_t from(int64_t at) const { return std::lower_bound(starts_.begin(), starts_.end() - 1, at) - starts_.begin(); }

 private:
  std::vector<int64_t> starts_{0};
};

// The borders of a call's mask. They are sought leaf by leaf, and taken where, at those of them that are looked at, what the two
// sides see differs: speed depends on it, and nothing else.
class Borders {
 public:
  Borders(const Call& call, const Sights& sights, int64_t lanes) : call_(call), sights_(sights), lanes_(lanes) {}

  std::vector<int64_t> of_queries() const {
    return taken(call_.queries, 0, [this](const std::vector<int64_t>& found) { return queries_differ(found); });
  }

  std::vector<int64_t> of_keys() const {
    return taken(call_.keys, 1, [this](const std::vector<int64_t>& found) { return keys_differ(found); });
  }

 private:
  static constexpr int64_t kLooks = 32, kPlanes = 3;  // borders, or queries, that are looked at, and batch rows and heads

  // How many see something on one side of a border, or on both, and how many of them on one side only.
  struct Difference {
    int64_t either = 0, apart = 0;
    bool large() const { return 3 * apart > either; }
  };

  // `side` is 0 for queries and 1 for keys.
  template <class Differ> std::vector<int64_t> taken(int64_t end, int side, Differ differ) const {
    std::vector<int64_t> all;
    if (!call_.keys || !call_.queries || !call_.batch || !call_.heads) return all;
    for (size_t n = 0; n < call_.mask.size(); ++n) {
      std::vector<int64_t> found = apart(sights_.borders(n, side), end);
      if (!found.empty() && differ(found).large()) all.insert(all.end(), found.begin(), found.end());
    }
    return apart(std::move(all), end);
  }

  // Those that have at least a vector of queries or keys on both sides.
  std::vector<int64_t> apart(std::vector<int64_t> some, int64_t end) const {
    std::sort(some.begin(), some.end());
    some.erase(std::unique(some.begin(), some.end()), some.end());
    std::vector<int64_t> kept;
    for (size_t n = 0; n < some.size(); ++n) {
      const int64_t before = n ? some[n - 1] : 0, behind = n + 1 < some.size() ? some[n + 1] : end;
      if (some[n] - before >= lanes_ && behind - some[n] >= lanes_) kept.push_back(some[n]);
    }
    return kept;
  }

  template <class Look> void look(int64_t count, Look look) const {
    const int64_t step = (count + kLooks - 1) / kLooks, planes = std::min(call_.batch * call_.heads, kPlanes);
    for (int64_t n = 0; n < planes; ++n) {
      const int64_t plane = n * (call_.batch * call_.heads) / planes;
      for (int64_t x = 0; x < count; x += step) look(plane / call_.heads, plane % call_.heads, x);
    }
  }

  Difference queries_differ(const std::vector<int64_t>& found) const {
    Difference all;
    Stretches before, behind;
    look(int64_t(found.size()), [&](int64_t b, int64_t h, int64_t n) {
      sights_.see(b, h, found[n] - lanes_, found[n], before);
      sights_.see(b, h, found[n], found[n] + lanes_, behind);
      Stretches::compare(before, behind, all.either, all.apart);
    });
    return all;
  }

  Difference keys_differ(const std::vector<int64_t>& found) const {
    Difference all;
    Stretches seen;
    look(call_.queries / lanes_, [&](int64_t b, int64_t h, int64_t n) {
      sights_.see(b, h, n * lanes_, (n + 1) * lanes_, seen);
      for (const int64_t j : found) {
        seen.each(j - 1, j, [](int64_t, int64_t) {});  // on to this border
        const bool before = seen.over(j - 1, j) != kNone, behind = seen.over(j, j + 1) != kNone;
        all.either += before || behind, all.apart += before != behind;
      }
    });
    return all;
  }

  const Call& call_;
  const Sights& sights_;
  const int64_t lanes_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
