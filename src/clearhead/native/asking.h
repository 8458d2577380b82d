// What gradients ask with: panels of queries and their output gradients, packed, and what the softmax knows of each.
#pragma once
#include "forward.h"
#include "keysums.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

static_assert(kBackTile <= kTile);  // the scorer remembers what was allowed in a tile of at most that many keys

// A panel of queries.
template <class T> struct Asking {
  Rows<T> rows;
  alignas(64) T spread[kPanel<T>];
  int64_t first = 0, last = 0;
  uint8_t odd[kPanel<T>];    // for each: the query or its gradient holds a number that is not finite
  bool alive = false;        // one of them attends to something
  bool spoiled = false;      // something of some query is not finite

  int64_t count() const { return last - first; }
  int vecs() const { return int((count() + kLanes<T> - 1) / kLanes<T>); }
};

// How a call is cut for its gradients.
template <class T> struct BackwardPanels : Panels {
  BackwardPanels(const Call& call, const Sights& sights)
      : Panels(call.queries, kPanel<T>, Borders(call, sights, kLanes<T>).of_queries(), kPanel<T>) {}

  // Room for dq of one head: [query panel][feature][query].
  int64_t room(const Call& call) const { return count() * kPanel<T> * rounded(call.features, kRows); }

  // Blocks of panels that go together.
  int64_t blocks() const { return (count() + kTogether - 1) / kTogether; }
};

// kTogether panels of queries of a head, packed in both ways in which products read them.
template <class T> class Together {
 public:
  static constexpr int64_t panel = kPanel<T>, wide = kSumColumns<T>, all = kTogether * panel;
  Asking<T> panels[kTogether];

  static int64_t numbers(const Call& call) {
    return all * (call.features + call.width + rounded(call.features, wide) + rounded(call.width, wide));
  }

  Together(const Call& call, T* room)
      : call_(&call), q_(room), dout_(q_ + all * call.features), q_columns_(dout_ + all * call.width),
        dout_columns_(q_columns_ + all * rounded(call.features, wide)) {}

  const T* q(int64_t p) const { return q_ + p * panel * call_->features; }                // [feature][query]
  const T* dout(int64_t p) const { return dout_ + p * panel * call_->width; }
  const T* q_columns() const { return q_columns_; }                                       // [feature block][query][feature]
  const T* dout_columns() const { return dout_columns_; }

  // Queries [first, last) as panel `p`: zeros for those that attend to nothing. `scratch` and `output` have room for a panel.
  void take(int64_t p, int64_t b, int64_t h, int64_t first, int64_t last, T* scratch, T* output) {
    const Call& call = *call_;
    Asking<T>& ask = panels[p];
    ask.first = first, ask.last = last;
    const int64_t at = call.row_of(b, h), count = ask.count();
    T *const q = q_ + p * panel * call.features, *const dout = dout_ + p * panel * call.width;
    std::fill_n(ask.odd, panel, uint8_t(0));
    pack_rows<T>(call.q, b, h, first, count, call.features, panel, scratch, q, ask.odd);
    pack_rows<T>(call.dout, b, h, first, count, call.width, panel, scratch, dout, ask.odd);
    pack_rows<T>(call.out, b, h, first, count, call.width, panel, scratch, output);
    pack_columns<T, wide>(call.q, b, h, first, count, call.features, all * wide, scratch, q_columns_ + p * panel * wide);
    pack_columns<T, wide>(call.dout, b, h, first, count, call.width, all * wide, scratch, dout_columns_ + p * panel * wide);
    for (int64_t lane = count; lane < panel; ++lane) blank_columns(p, lane);
    ask.rows = Rows<T>();
    ask.alive = false;
    for (int64_t lane = 0; lane < count; ++lane) {
      const T total = static_cast<const T*>(call.total)[at + first + lane];
      if (total == 0) {
        for (int64_t c = 0; c < call.features; ++c) q[c * panel + lane] = 0;
        for (int64_t c = 0; c < call.width; ++c) dout[c * panel + lane] = output[c * panel + lane] = 0;
        blank_columns(p, lane);
        ask.odd[lane] = 0;
        continue;
      }
      ask.rows.largest[lane] = static_cast<const T*>(call.peak)[at + first + lane];
      ask.rows.total[lane] = total;
      ask.alive = true;
    }
    for (int x = 0; x < panel; x += kLanes<T>) {
      Vec<T> spread{};
      for (int64_t c = 0; c < call.width; ++c) spread += load<T>(output + c * panel + x) * load<T>(dout + c * panel + x);
      store<T>(ask.spread + x, spread);
    }
    if (call.dlse)
      for (int64_t lane = 0; lane < count; ++lane)
        if (ask.rows.total[lane] != 0) ask.spread[lane] -= static_cast<const T*>(call.dlse)[at + first + lane];
    ask.spoiled = ask.rows.spoiled();
    for (int64_t lane = 0; lane < count; ++lane) {
      ask.spoiled = ask.spoiled || ask.odd[lane] || is_odd(ask.spread + lane, 1);
      if (ask.odd[lane]) blank_columns(p, lane);  // those that are not finite are added to dk and dv key by key
    }
  }

 private:
  // Zeros for one query of a panel, where it is summed over.
  void blank_columns(int64_t p, int64_t lane) {
    const auto blank = [&](T* columns, int64_t count) {
      for (int64_t i = 0; i < rounded(count, wide) / wide; ++i)
        std::fill_n(columns + ((i * kTogether + p) * panel + lane) * wide, wide, T(0));
    };
    blank(q_columns_, call_->features);
    blank(dout_columns_, call_->width);
  }

  const Call* call_;
  T *q_, *dout_, *q_columns_, *dout_columns_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
