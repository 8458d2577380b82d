// Rows of numbers that stream by, in the type and place in which they lie: their products with a query, their weighted sums.
#pragma once
#include "pack.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// Rows as they lie in the caller's memory, one after the other, in the caller's type: reading is all that decoding does, and
// memory is read fastest in its own order. `vecs` vectors of the query, or of the sums, stay in registers while the rows stream
// by, where that is the whole row (`whole`); longer rows have the rest of it in the first cache.
constexpr int kStretch = 16;

template <class T, int type> inline Vec<T> load_number(const char* p) {
  if constexpr (type == kOwn<T>) return load<T>(reinterpret_cast<const T*>(p));
  else return load_as<type>(p);
}

template <class T, int type> struct Rowwise {
  static constexpr int lanes = kLanes<T>, bytes = lanes * (type == kFloat64 ? 8 : type == kFloat32 ? 4 : 2);
  static Vec<T> at(const char* row, int64_t vec) { return load_number<T, type>(row + vec * bytes); }

  // out[row] = the product of each row with the query.
  template <int vecs, bool whole>
  static void dots(const T* q, int64_t columns, const char* rows, int64_t stride, int64_t count, T* out) {
    constexpr int sets = vecs < 4 ? vecs : 4;  // sums, so that none waits for the one before
    const int64_t all = columns / lanes;
    Vec<T> query[vecs];
    for (int x = 0; x < vecs; ++x) query[x] = load<T>(q + x * lanes);
    const auto one = [&](const char* row) CLEARHEAD_LAMBDA {
      Vec<T> part[sets] = {};
      for (int x = 0; x < vecs; ++x) part[x % sets] += query[x] * at(row, x);
      for (int64_t c = vecs; !whole && c < all; c += vecs)
        for (int x = 0; x < vecs; ++x) part[x % sets] += load<T>(q + (c + x) * lanes) * at(row, c + x);
      for (int x = 1; x < sets; ++x) part[0] += part[x];
      return part[0];
    };
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
      const Vec<T> sums[4] = {one(rows + j * stride), one(rows + (j + 1) * stride), one(rows + (j + 2) * stride),
                              one(rows + (j + 3) * stride)};
      sums_of_four<T>(sums, out + j);
    }
    if (j == count) return;
    Vec<T> sums[4] = {};
    for (int64_t n = 0; j + n < count; ++n) sums[n] = one(rows + (j + n) * stride);
    T four[4];
    sums_of_four<T>(sums, four);
    std::copy(four, four + (count - j), out + j);
  }

  // sums[column] += Σ weight · row[column], over the rows that are allowed; null: over all
  template <int vecs, bool whole>
  static void add(const T* weights, const uint8_t* allowed, int64_t columns, const char* rows, int64_t stride, int64_t count,
                  T* sums) {
    constexpr int sets = vecs < 8 ? 8 / vecs : 1;  // as above
    const int64_t all = columns / lanes;
    Vec<T> total[sets][vecs] = {};
    for (int x = 0; x < vecs; ++x) total[0][x] = load<T>(sums + x * lanes);
    const auto one = [&](int64_t j, Vec<T>* into) CLEARHEAD_LAMBDA {
      const char* row = rows + j * stride;
      for (int x = 0; x < vecs; ++x) into[x] += weights[j] * at(row, x);
      for (int64_t c = vecs; !whole && c < all; ++c) {
        T* place = sums + c * lanes;
        store<T>(place, load<T>(place) + weights[j] * at(row, c));
      }
    };
    int64_t j = 0;
    if (!allowed)
      for (; j + sets <= count; j += sets)
        for (int n = 0; n < sets; ++n) one(j + n, total[n]);
    for (; j < count; ++j)
      if (!allowed || allowed[j]) one(j, total[0]);  // also keeps NaN in padding out
    for (int n = 1; n < sets; ++n)
      for (int x = 0; x < vecs; ++x) total[0][x] += total[n][x];
    for (int x = 0; x < vecs; ++x) store<T>(sums + x * lanes, total[0][x]);
  }
};

// The two for rows of one kind; null where they do not stream: columns that do not lie side by side, or are no whole vectors.
template <class T> struct Streaming {
  void (*dots)(const T*, int64_t, const char*, int64_t, int64_t, T*) = nullptr;
  void (*add)(const T*, const uint8_t*, int64_t, const char*, int64_t, int64_t, T*) = nullptr;

  Streaming(const View& view, int64_t columns) {
    if (view.type == kOwn<T>) choose<kOwn<T>>(view, columns);
    if constexpr (sizeof(T) == 4) {
      if (view.type == kFloat16) choose<kFloat16>(view, columns);
      if (view.type == kBFloat16) choose<kBFloat16>(view, columns);
    }
  }

 private:
  template <int type> void choose(const View& view, int64_t columns) {
    const int64_t vecs = columns / kLanes<T>;
    if (columns % kLanes<T> || view.col * kLanes<T> != Rowwise<T, type>::bytes) return;
    if (vecs == 1) take<type, 1, true>();
    else if (vecs == 2) take<type, 2, true>();
    else if (vecs == 4) take<type, 4, true>();
    else if (vecs == 8) take<type, 8, true>();
    else if (vecs == kStretch) take<type, kStretch, true>();
    else if (vecs && vecs % kStretch == 0) take<type, kStretch, false>();
  }
  template <int type, int vecs, bool whole> void take() {
    dots = Rowwise<T, type>::template dots<vecs, whole>;
    add = Rowwise<T, type>::template add<vecs, whole>;
  }
};

constexpr int64_t kShared = 64;  // rows that stay in the first cache until all have read them

// Rows of a view, in stretches that can be streamed: `act(rows, stride, from, count)` for each. Where more than one reads them
// they are short, and those of another type are converted first.
template <class T> class SharedRows {
 public:
  SharedRows(const View& view, int64_t columns, bool shared)
      : view_(view), columns_(columns), shared_(shared), own_(view, columns) {
#if defined(CLEARHEAD_NEON)
    constexpr bool by_reading = true;  // bfloat16 is shifted as it is read, which is cheaper than a copy
#else
    constexpr bool by_reading = false;
#endif
    if (!shared || view.type == kOwn<T> || !own_.dots || (by_reading && view.type == kBFloat16)) return;
    View turned = view;
    turned.type = kOwn<T>, turned.col = int64_t(sizeof(T));
    own_ = Streaming<T>(turned, columns);
    converted_.resize(kShared * columns);
  }

  const Streaming<T>& stream() const { return own_; }

  template <class Act> void each(const char* rows, int64_t count, Act act) {
    for (int64_t from = 0, step = shared_ ? kShared : count; from < count; from += step) {
      const int64_t some = std::min(step, count - from);
      if (converted_.empty()) {
        act(rows + from * view_.row, view_.row, from, some);
        continue;
      }
      for (int64_t r = 0; r < some; ++r)
        read_row<T>(rows + (from + r) * view_.row, view_.type, view_.col, columns_, converted_.data() + r * columns_);
      act(reinterpret_cast<const char*>(converted_.data()), columns_ * int64_t(sizeof(T)), from, some);
    }
  }

 private:
  const View& view_;
  int64_t columns_;
  bool shared_;
  Streaming<T> own_;
  Buffer<T> converted_;
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
