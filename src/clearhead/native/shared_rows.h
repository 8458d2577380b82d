// Rows of keys or values for all queries that share them: where they lie, or copied a few at a time as they can be streamed.
#pragma once
#include "stream.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kConverted = 8;  // rows that lie one after the other, converted together

// They come in stretches that can be streamed: `act(rows, stride, ahead, from, count)` for each. After the last of them those from
// `next` on are read; null where that is not known. Rows that do not stream as they lie are copied, filled up with zeros to
// `columns`; so are those of another type that many queries read, and for queries `side_by_side` all that do not lie one after
// the other.
template <class T> class SharedRows {
 public:
  SharedRows(const View& view, int64_t columns, int64_t queries, int query_type = -1, bool side_by_side = false)
      : view_(view), real_(columns), columns_(std::max<int64_t>(rounded(columns, kLanes<T>), kLanes<T>)), one_(queries == 1),
        copied_(!Streaming<T>::takes(view, columns) || (side_by_side && view.row != columns * int64_t(sizeof(T))) ||
                (view.type != kOwn<T> && (side_by_side || queries > read_again(view.type)))),
        stream_(copied_ ? kOwn<T> : view.type, columns_) {
    if (!side_by_side && query_type == view.type && Streaming<T>::takes(view, columns) && stream_.dot(view.type, columns_))
      copied_ = false;
    if (copied_) rows_.resize(kShared * columns_), std::fill_n(rows_.data(), kShared * columns_, T(0));
  }

  int64_t columns() const { return columns_; }
  const Streaming<T>& stream() const { return stream_; }
  int64_t bytes() const { return int64_t(rows_.size() * sizeof(T)); }

  template <class Act> void each(const char* rows, int64_t count, const char* next, Act act) {
    for (int64_t from = 0, step = one_ && !copied_ ? count : kShared; from < count; from += step) {
      const int64_t some = std::min(step, count - from);
      const char* const here = rows + from * view_.row;
      if (!copied_) {
        act(here, view_.row, next && from + some == count ? next - here : some * view_.row, from, some);
        continue;
      }
      const bool dense = view_.col > 0 && view_.col <= int64_t(sizeof(double)) && real_ > 0;  // of others a line each is asked for
      const char* const after = from + some < count ? here + some * view_.row : next ? next : here;
      const Soon soon(here, view_.row, some, dense ? view_.col * real_ : 1, after);
      if (view_.col == 2 && view_.type == kFloat16) copy<kFloat16>(here, some, soon);
      else if (view_.col == 2 && view_.type == kBFloat16) copy<kBFloat16>(here, some, soon);
      else copy<kOwn<T>>(here, some, soon);
      act(reinterpret_cast<const char*>(rows_.data()), columns_ * int64_t(sizeof(T)), 0, from, some);
    }
  }

 private:
  // Rows of halves whose type is told take a third of the time of others, and less where they lie one after the other.
  template <int type> void copy(const char* rows, int64_t count, const Soon& soon) {
    constexpr bool own = type == kOwn<T>;
    const int64_t together = !own && real_ == columns_ && view_.row == 2 * columns_ ? kConverted : 1;
    for (int64_t r = 0, some; r < count; r += some) {
      some = std::min(together, count - r);
      for (int64_t x = r; x < r + some; ++x) soon.ask(rows + x * view_.row, soon.from(x));
      read_row<T>(rows + r * view_.row, own ? view_.type : type, own ? view_.col : 2, some * real_, rows_.data() + r * columns_);
    }
  }

  const View& view_;
  int64_t real_, columns_;
  bool one_, copied_;
  Streaming<T> stream_;
  Buffer<T> rows_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
