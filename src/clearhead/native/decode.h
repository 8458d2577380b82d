// Few queries over many keys: keys are read once, where they lie, split into pieces that threads share and merge.
#pragma once
#include "softmax.h"
#include "threads.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kFewRows = 4;     // queries that share a key head, up to which reading beats packing
constexpr int64_t kPiece = 1024;    // keys in a piece: fixed, so that the result does not depend on the threads

inline bool decodes(const Call& call) {
  return call.queries * call.group() <= kFewRows && call.keys >= 1 && !call.wanted.second_look();
}

// The sums over one piece of keys, for one query: as in `softmax.h`, for one row.
template <class T> struct Piece {
  T largest = -std::numeric_limits<T>::infinity(), total = 0, weighted = 0;
  std::vector<T> values;
};

template <class T> class Reader {
 public:
  Reader(const View& view, int64_t b, int64_t h, int64_t columns)
      : view_(view), base_(view.at(b, h)), columns_(columns), scratch_(columns),
        direct_(view.col == int64_t(sizeof(T)) && view.type == (sizeof(T) == 4 ? kFloat32 : kFloat64)) {}

  // One row; the caller's own memory where it can be used as it lies.
  const T* row(int64_t r) {
    const char* at = base_ + r * view_.row;
    if (direct_) return reinterpret_cast<const T*>(at);
    read_row<T>(at, view_.type, view_.col, columns_, scratch_.data());
    return scratch_.data();
  }

 private:
  const View& view_;
  const char* base_;
  int64_t columns_;
  std::vector<T> scratch_;
  bool direct_;
};

// Dot products of one key with each of the rows q[row][column].
template <class T> inline void dots(const T* q, int64_t rows, int64_t columns, const T* key, T* out) {
  constexpr int lanes = kLanes<T>;
  for (int64_t r = 0; r < rows; ++r, q += columns) {
    Vec<T> sums[4] = {};
    int64_t c = 0;
    for (; c + 4 * lanes <= columns; c += 4 * lanes)
      for (int x = 0; x < 4; ++x) sums[x] += load<T>(q + c + x * lanes) * load<T>(key + c + x * lanes);
    for (; c + lanes <= columns; c += lanes) sums[0] += load<T>(q + c) * load<T>(key + c);
    T total = sum<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; c < columns; ++c) total += q[c] * key[c];
    out[r] = total;
  }
}

template <class T> inline void add_scaled(T weight, const T* row, int64_t columns, T* sums) {
  constexpr int lanes = kLanes<T>;
  int64_t c = 0;
  for (; c + lanes <= columns; c += lanes) store<T>(sums + c, load<T>(sums + c) + weight * load<T>(row + c));
  for (; c < columns; ++c) sums[c] += weight * row[c];
}

// What the scores of row (head h, query i) become after the product: scale, softcap, bias, mask.
template <class T>
inline void finish_scores(const Call& call, const Units<T>& units, int64_t b, int64_t h, int64_t i, int64_t j0, int64_t j1,
                          T* s) {
  const Bias& bias = call.bias;
  if (!units.raw)
    for (int64_t j = j0; j < j1; ++j) {
      T x = s[j - j0] * T(call.scale);
      if (call.softcap != 0) x = T(call.softcap) * std::tanh(x / T(call.softcap));
      if (bias.length > 0) x += T(bias.by_distance[h * bias.length + bias.centre + bias.offset[b] + i - j]);
      else if (bias.array) x += read<T>(bias.array.at(b, h) + i * bias.array.row + j * bias.array.col, bias.array.type);
      s[j - j0] = x;
    }
  const Mask mask(call, b, h);
  const Verdict verdict = mask.decide(i, i + 1, j0, j1);
  if (verdict == kAll) return;
  std::vector<uint8_t> allowed(j1 - j0, 0);
  if (verdict == kSome) mask.tile(i, i + 1, j0, j1, 1, allowed.data());
  for (int64_t j = j0; j < j1; ++j)
    if (!allowed[j - j0]) s[j - j0] = -std::numeric_limits<T>::infinity();
}

// 2^(s · factor − peak) in place; the sums of one piece.
template <class T> inline Piece<T> exponentials(T* s, int64_t count, T factor, int64_t width) {
  constexpr int lanes = kLanes<T>;
  Piece<T> piece;
  for (int64_t k = 0; k < count; ++k) piece.largest = s[k] > piece.largest || s[k] != s[k] ? s[k] : piece.largest;
  const T shift = piece.largest == -std::numeric_limits<T>::infinity() ? T(0) : piece.largest;
  Vec<T> sums{}, spread{};
  for (int64_t k = 0; k < count; k += lanes) {
    T tail[kLanes<T>];
    const int64_t real = std::min<int64_t>(lanes, count - k);
    for (int x = 0; x < lanes; ++x) tail[x] = x < real ? s[k + x] : -std::numeric_limits<T>::infinity();
    Vec<T> x = (load<T>(tail) - shift) * factor, limited;
    exp2<T, 1>(&x, &limited);
    sums += x;
    spread += x * limited;
    store<T>(tail, x);
    std::copy(tail, tail + real, s + k);
  }
  piece.total = sum<T>(sums);
  piece.weighted = sum<T>(spread);
  piece.values.assign(width, T(0));
  return piece;
}

template <class T>
void decode_piece(const Call& call, int64_t b, int64_t head, int64_t j0, int64_t j1, Piece<T>* pieces) {
  const Units<T> units(call);
  const int64_t group = call.group(), rows = group * call.queries, count = j1 - j0;
  std::vector<T> q(rows * call.features), s(rows * count), at_key(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t h = head * group + r / call.queries, i = r % call.queries;
    read_row<T>(call.q.at(b, h) + i * call.q.row, call.q.type, call.q.col, call.features, q.data() + r * call.features);
  }
  Reader<T> keys(call.k, b, head, call.features), values(call.v, b, head, call.width);
  for (int64_t j = j0; j < j1; ++j) {
    dots<T>(q.data(), rows, call.features, keys.row(j), at_key.data());
    for (int64_t r = 0; r < rows; ++r) s[r * count + (j - j0)] = at_key[r];
  }
  for (int64_t r = 0; r < rows; ++r) {
    finish_scores<T>(call, units, b, head * group + r / call.queries, r % call.queries, j0, j1, s.data() + r * count);
    pieces[r] = exponentials<T>(s.data() + r * count, count, units.factor, call.width);
  }
  for (int64_t j = j0; j < j1; ++j) {
    const T* row = nullptr;
    for (int64_t r = 0; r < rows; ++r) {
      const T weight = s[r * count + (j - j0)];
      if (weight == 0) continue;  // also keeps NaN in padding out
      if (!row) row = values.row(j);
      add_scaled<T>(weight, row, call.width, pieces[r].values.data());
    }
  }
}

// Pieces of one row, merged in their order.
template <class T> Piece<T> merged(Piece<T>* pieces, int64_t count, int64_t step, T factor) {
  Piece<T> whole = std::move(pieces[0]);
  for (int64_t n = 1; n < count; ++n) {
    Piece<T>& next = pieces[n * step];
    if (next.total == 0) continue;
    if (whole.total == 0) { whole = std::move(next); continue; }
    const T largest = std::max(whole.largest, next.largest);
    const T mine = (whole.largest - largest) * factor, theirs = (next.largest - largest) * factor;
    const T my_worth = std::exp2(mine), their_worth = std::exp2(theirs);
    whole.weighted = my_worth * (whole.weighted + whole.total * mine) + their_worth * (next.weighted + next.total * theirs);
    whole.total = whole.total * my_worth + next.total * their_worth;
    for (size_t c = 0; c < whole.values.size(); ++c)
      whole.values[c] = whole.values[c] * my_worth + next.values[c] * their_worth;
    whole.largest = largest;
  }
  return whole;
}

template <class T> void write_row(const Call& call, int64_t b, int64_t h, int64_t i, const Piece<T>& piece) {
  const Units<T> units(call);
  const Ending<T> end = ending<T>(piece.largest, piece.total, piece.weighted, units, sink_of(call, h));
  write_ending<T>(call, units, call.row_of(b, h) + i, piece.largest, end);
  char* out = call.out.at(b, h) + i * call.out.row;
  for (int64_t c = 0; c < call.width; ++c) write<T>(out + c * call.out.col, call.out.type, piece.values[c] * end.share);
}

template <class T> void decode(const Call& call, int threads) {
  const int64_t heads = call.batch * call.key_heads, rows = call.group() * call.queries;
  const int64_t count = (call.keys + kPiece - 1) / kPiece;
  std::vector<Piece<T>> pieces(heads * count * rows);
  parallel(heads * count, threads, [&] {
    return [&](int64_t task) {
      const int64_t n = task / count, j0 = task % count * kPiece;
      decode_piece<T>(call, n / call.key_heads, n % call.key_heads, j0, std::min(j0 + kPiece, call.keys),
                      &pieces[task * rows]);
    };
  });
  for (int64_t n = 0; n < heads; ++n)
    for (int64_t r = 0; r < rows; ++r)
      write_row<T>(call, n / call.key_heads, n % call.key_heads * call.group() + r / call.queries, r % call.queries,
                   merged<T>(&pieces[n * count * rows + r], count, rows, Units<T>(call).factor));
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
