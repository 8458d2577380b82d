// Queries that share keys side by side, enough of them to fill vectors: no product is added up across a vector, and each number of a
// key or value is read once for all of them.
#pragma once
#include "shared_rows.h"
#include "softmax.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kStripRows = 16;  // values that are multiplied while the next of them are asked for

// Queries from which on this is faster than one by one: fewer leave much of a vector empty. Keys of half precision are converted
// for it, and one by one they need not be.
template <class T> constexpr int64_t kAbreast = sizeof(T) == 8 ? 6 : 12;
constexpr int64_t kHalvesAbreast = 16;
template <class T> inline bool enough_abreast(int64_t rows, int type) {
  return kAsItLies && rows >= (type == kOwn<T> ? kAbreast<T> : kHalvesAbreast);
}

// The queries of one head of keys, in panels as `score.h` has them.
template <class T> class Abreast {
 public:
  static constexpr int panel = kPanel<T>, lanes = kLanes<T>;

  // Room for so many queries, and for their scores of so many keys at once. Values have whole vectors of columns.
  void begin(int64_t rows, int64_t features, int64_t columns, int64_t keys) {
    rows_ = rows, features_ = features, columns_ = columns;
    panels_ = (rows + panel - 1) / panel;
    apart_ = (keys + kRows) * panel;  // the last block of keys may be a part of one
    q_.resize(panels_ * features * panel);
    row_.resize(panel * features);
    s_.resize(panels_ * apart_);
    values_.resize(panels_ * panel * rounded(columns, kRows));
  }

  int64_t bytes() const { return int64_t((q_.size() + row_.size() + s_.size() + values_.size()) * sizeof(T)); }

  // `query(r)` is where query r lies.
  template <class Query> void ask(Query query, int type, int64_t stride) {
    std::fill(q_.begin(), q_.end(), T(0));
    for (int64_t p = 0; p < panels_; ++p) {
      const T* rows[panel];
      for (int64_t r = 0; r < count(p); ++r) {
        rows[r] = row_.data() + r * features_;
        read_row<T>(query(p * panel + r), type, stride, features_, row_.data() + r * features_);
      }
      turn<T>(rows, count(p), features_, q_.data() + p * features_ * panel, panel);
    }
  }

  // The products with keys [from, from + some) of a piece, `stride` bytes apart.
  void score(const char* keys, int64_t stride, int64_t from, int64_t some) {
    const int64_t apart = stride / int64_t(sizeof(T));
    const T* const at = reinterpret_cast<const T*>(keys);
    for (int64_t p = 0; p < panels_; ++p)
      rows_product<T>(at, some, q_.data() + p * features_ * panel, features_, apart, scores(p) + from * panel, vecs(p),
                      p ? nullptr : at + some * apart);
  }

  // Where the score of query r with the first key is; those with the next are a panel apart.
  T* score_of(int64_t r) { return scores(r / panel) + r % panel; }

  // Scores become weights; `tell(r, rows, lane)` for each query.
  template <class Tell> void weigh(int64_t keys, T factor, bool entropy, Tell tell) {
    for (int64_t p = 0; p < panels_; ++p) {
      Rows<T> rows;
      rows.exponentiate(scores(p), keys, factor, entropy, nullptr, 0, vecs(p));
      for (int64_t lane = 0; lane < count(p); ++lane) tell(p * panel + lane, rows, lane);
    }
  }

  // The weighted values of keys [from, from + some) of a piece, at most kShared of them, added to those before.
  void add(const char* rows, int64_t stride, int64_t from, int64_t some) {
    const int64_t apart = stride / int64_t(sizeof(T)), whole = columns_ / kRows;
    Strip<T> strips[kShared / kStripRows], *last = strips;
    for (int64_t j = 0; j < some; j += kStripRows)
      *last++ = {reinterpret_cast<const T*>(rows) + j * apart, std::min(kStripRows, some - j)};
    const auto multiply = [&](int64_t blocks, int64_t first) {
      for (int64_t p = 0; p < panels_ && blocks; ++p)
        strips_product<T>(strips, last, Lain{apart, kRows}, blocks, scores(p) + from * panel, from > 0, values(p) + first * panel,
                          vecs(p));
    };
    multiply(whole, 0);
    if (whole * kRows == columns_) return;
    for (Strip<T>* strip = strips; strip < last; ++strip) strip->at += columns_ - kRows;
    multiply(1, whole * kRows);  // the last columns, some of which the block before them has, too
  }

  // sums[query][column] of all that was added.
  void finish(T* sums) {
    const T* columns[lanes];
    for (int64_t c = 0; c < columns_; c += lanes)
      for (int64_t p = 0; p < panels_; ++p) {
        for (int64_t x = 0; x < lanes; ++x) columns[x] = values(p) + place(c + x) * panel;
        turn<T>(columns, lanes, count(p), sums + p * panel * columns_ + c, int(columns_));
      }
  }

 private:
  int64_t count(int64_t p) const { return std::min<int64_t>(panel, rows_ - p * panel); }
  int vecs(int64_t p) const { return int((count(p) + lanes - 1) / lanes); }
  T* scores(int64_t p) { return s_.data() + p * apart_; }
  T* values(int64_t p) { return values_.data() + p * panel * rounded(columns_, kRows); }

  // Where a column's sums are.
  int64_t place(int64_t c) const {
    const int64_t whole = columns_ / kRows * kRows;
    return c < whole ? c : c - (columns_ - kRows) + whole;
  }

  int64_t rows_ = 0, features_ = 0, columns_ = 0, panels_ = 0, apart_ = 0;
  Buffer<T> q_;       // [panel][feature][query]
  Buffer<T> row_;     // queries of a panel, converted
  Buffer<T> s_;       // [panel][key][query]
  Buffer<T> values_;  // [panel][column][query]
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
