// Where queries are cut into panels: at borders where a mask changes much, since a panel across one sees what both sides see.
#pragma once
#include "sight.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// Parts of [0, end), each at most as long as a panel is wide.
class Panels {
 public:
  Panels() = default;
  // From each border to the next as few panels as there can be, of about as many vectors of `lanes` queries each: products with a
  // single vector are slow. Borders ascend.
  Panels(int64_t end, int64_t width, const std::vector<int64_t>& borders, int64_t lanes) {
    for (size_t n = 0; n <= borders.size(); ++n) {
      const int64_t stop = n < borders.size() ? std::min(borders[n], end) : end;
      for (int64_t left; (left = stop - starts_.back()) > 0;) {
        const int64_t panels = (left + width - 1) / width, vectors = (left + lanes - 1) / lanes;
        const int64_t length = std::min((vectors + panels - 1) / panels * lanes, width);
        starts_.push_back(std::min(starts_.back() + length, stop));
      }
    }
  }

  int64_t count() const { return int64_t(starts_.size()) - 1; }
  int64_t first(int64_t n) const { return starts_[n]; }
  int64_t last(int64_t n) const { return starts_[n + 1]; }
  int64_t length(int64_t n) const { return last(n) - first(n); }

 private:
  std::vector<int64_t> starts_{0};
};

// The borders of a call's mask. They are sought leaf by leaf, and taken where, at those of them that are looked at, what the two
// sides see differs: speed depends on it, and nothing else.
class Borders {
 public:
  Borders(const Call& call, const Sights& sights, int64_t lanes) : call_(call), sights_(sights), lanes_(lanes) {}

  std::vector<int64_t> of_queries() const {
    std::vector<int64_t> all;
    if (!call_.keys || !call_.queries || !call_.batch || !call_.heads) return all;
    for (size_t n = 0; n < call_.mask.size(); ++n) {
      const std::vector<int64_t> found = apart(sights_.borders(n));
      if (!found.empty() && differ(found)) all.insert(all.end(), found.begin(), found.end());
    }
    return apart(std::move(all));
  }

 private:
  static constexpr int64_t kLooks = 32, kPlanes = 3;  // borders that are looked at, and batch rows and heads

  // Those that have at least a vector of queries on both sides.
  std::vector<int64_t> apart(std::vector<int64_t> some) const {
    std::sort(some.begin(), some.end());
    some.erase(std::unique(some.begin(), some.end()), some.end());
    std::vector<int64_t> kept;
    for (size_t n = 0; n < some.size(); ++n) {
      const int64_t before = n ? some[n - 1] : 0, behind = n + 1 < some.size() ? some[n + 1] : call_.queries;
      if (some[n] - before >= lanes_ && behind - some[n] >= lanes_) kept.push_back(some[n]);
    }
    return kept;
  }

  // Whether many of the keys that are seen on one side of a border, or on both, are seen on one side only.
  bool differ(const std::vector<int64_t>& found) const {
    const int64_t count = int64_t(found.size()), step = (count + kLooks - 1) / kLooks;
    const int64_t all = call_.batch * call_.heads, planes = std::min(all, kPlanes);
    int64_t either = 0, apart = 0;
    Stretches before, behind;
    for (int64_t n = 0; n < planes; ++n)
      for (int64_t x = 0, plane = n * all / planes; x < count; x += step) {
        sights_.see(plane / call_.heads, plane % call_.heads, found[x] - lanes_, found[x], before);
        sights_.see(plane / call_.heads, plane % call_.heads, found[x], found[x] + lanes_, behind);
        Stretches::compare(before, behind, either, apart);
      }
    return 3 * apart > either;
  }

  const Call& call_;
  const Sights& sights_;
  const int64_t lanes_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
