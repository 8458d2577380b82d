// Few queries over many keys: keys are read once, where they lie, split into pieces that threads share and merge. Keys that
// nobody sees are not read.
#pragma once
#include "softmax.h"
#include "stream.h"
#include "threads.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

constexpr int64_t kFewRows = 4;     // queries that share a key head, up to which reading beats packing
constexpr int64_t kPiece = 512;     // keys in a piece: fixed, so that the result does not depend on the threads
constexpr int kAtOnce = 4;          // keys read together: their sums do not wait for one another
constexpr int kPowers = 4;          // vectors of exponentials side by side

inline bool decodes(const Call& call) {
  return call.queries * call.group() <= kFewRows && call.keys >= 1 && !call.wanted.second_look();
}

// The sums over one piece of keys, for one query: as in `softmax.h`, for one row. No values: the row sees none of the keys.
template <class T> struct Piece {
  T largest = -std::numeric_limits<T>::infinity(), total = 0, weighted = 0;
  std::vector<T> values;
};

// Rows of the caller's array, kAtOnce at a time.
template <class T> class Reader {
 public:
  Reader(const View& view, int64_t b, int64_t h, int64_t columns)
      : view_(view), base_(view.at(b, h)), columns_(columns), scratch_(kAtOnce * columns),
        direct_(view.col == int64_t(sizeof(T)) && view.type == kOwn<T>) {}

  // One row, into place `slot` of the scratch room; the caller's own memory where it can be used as it lies.
  const T* row(int64_t r, int slot) {
    const char* at = base_ + r * view_.row;
    if (direct_) return reinterpret_cast<const T*>(at);
    read_row<T>(at, view_.type, view_.col, columns_, scratch_.data() + slot * columns_);
    return scratch_.data() + slot * columns_;
  }

  const char* at(int64_t r) const { return base_ + r * view_.row; }

 private:
  const View& view_;
  const char* base_;
  int64_t columns_;
  std::vector<T> scratch_;
  bool direct_;
};

// Dot products of one query with some keys.
template <class T, int count> inline void dots(const T* q, int64_t columns, const T* const* keys, T* out) {
  constexpr int lanes = kLanes<T>;
  Vec<T> sums[count] = {}, more[count] = {};
  int64_t c = 0;
  for (; c + 2 * lanes <= columns; c += 2 * lanes)
    for (int x = 0; x < count; ++x) {
      sums[x] += load<T>(q + c) * load<T>(keys[x] + c);
      more[x] += load<T>(q + c + lanes) * load<T>(keys[x] + c + lanes);
    }
  for (; c + lanes <= columns; c += lanes)
    for (int x = 0; x < count; ++x) sums[x] += load<T>(q + c) * load<T>(keys[x] + c);
  for (int x = 0; x < count; ++x) sums[x] += more[x];
  if constexpr (count == 4) sums_of_four<T>(sums, out);
  else
    for (int x = 0; x < count; ++x) out[x] = sum<T>(sums[x]);
  for (; c < columns; ++c)
    for (int x = 0; x < count; ++x) out[x] += q[c] * keys[x][c];
}

// sums[column] += Σ weight · row[column], over some rows.
template <class T, int count>
inline void add_weighted(const T* weights, const T* const* rows, int64_t columns, T* sums) {
  constexpr int lanes = kLanes<T>;
  int64_t c = 0;
  for (; c + lanes <= columns; c += lanes) {
    Vec<T> total = load<T>(sums + c);
    for (int x = 0; x < count; ++x) total += weights[x] * load<T>(rows[x] + c);
    store<T>(sums + c, total);
  }
  for (; c < columns; ++c)
    for (int x = 0; x < count; ++x) sums[c] += weights[x] * rows[x][c];
}

// What the scores of row (head h, query i) become after the product: scale, softcap, bias, mask. `allowed` is filled where
// only some keys may be seen.
template <class T>
inline void finish_scores(const Call& call, const Units<T>& units, int64_t b, int64_t h, int64_t i, int64_t j0, int64_t j1,
                          bool some, T* s, uint8_t* allowed) {
  const Bias& bias = call.bias;
  if (!units.raw)
    for (int64_t j = j0; j < j1; ++j) {
      T x = s[j - j0] * T(call.scale);
      if (call.softcap != 0) x = T(call.softcap) * std::tanh(x / T(call.softcap));
      if (bias.length > 0) x += T(bias.by_distance[h * bias.length + bias.centre + bias.offset[b] + i - j]);
      else if (bias.array) x += read<T>(bias.array.at(b, h) + i * bias.array.row + j * bias.array.col, bias.array.type);
      s[j - j0] = x;
    }
  if (!some) return;
  Mask(call, b, h).tile(i, i + 1, j0, j1, 1, allowed);
  for (int64_t j = j0; j < j1; ++j)
    if (!allowed[j - j0]) s[j - j0] = -std::numeric_limits<T>::infinity();
}

// 2^((s − largest) · factor) in place; the sums of one piece. `count` is a multiple of kPowers vectors, filled up with −inf.
template <class T> inline Piece<T> exponentials(T* s, int64_t count, T factor, int64_t width) {
  constexpr int lanes = kLanes<T>, many = kPowers;
  constexpr T none = -std::numeric_limits<T>::infinity();
  Piece<T> piece;
  Vec<T> top[many];
  for (auto& x : top) x = all<T>(none);
  for (int64_t k = 0; k < count; k += many * lanes)
    for (int x = 0; x < many; ++x) top[x] = max(top[x], load<T>(s + k + x * lanes));
  for (int x = 1; x < many; ++x) top[0] = max(top[0], top[x]);
  piece.largest = top[0][0];
  for (int x = 1; x < lanes; ++x) piece.largest = top[0][x] <= piece.largest ? piece.largest : top[0][x];  // NaN stays
  const T shift = piece.largest == none ? T(0) : piece.largest;
  Vec<T> sums{}, spread{};
  for (int64_t k = 0; k < count; k += many * lanes) {
    Vec<T> e[many], limited[many];
    for (int x = 0; x < many; ++x) e[x] = (load<T>(s + k + x * lanes) - shift) * factor;
    exp2<T, many>(e, limited);
    for (int x = 0; x < many; ++x) {
      sums += e[x];
      spread += e[x] * limited[x];
      store<T>(s + k + x * lanes, e[x]);
    }
  }
  piece.total = sum<T>(sums);
  piece.weighted = sum<T>(spread);
  piece.values.assign(width, T(0));
  return piece;
}

template <class T>
void decode_piece(const Call& call, int64_t b, int64_t head, int64_t j0, int64_t j1, Piece<T>* pieces) {
  const Units<T> units(call);
  const int64_t group = call.group(), rows = group * call.queries;
  const int64_t count = rounded(j1 - j0, kPowers * kLanes<T>);  // room for each row
  std::vector<T> q(rows * call.features), s(rows * count, -std::numeric_limits<T>::infinity());
  std::vector<uint8_t> allowed(call.mask.empty() ? 0 : rows * count);
  Verdict verdicts[kFewRows];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t h = head * group + r / call.queries, i = r % call.queries;
    verdicts[r] = Mask(call, b, h).decide(i, i + 1, j0, j1);
    read_row<T>(call.q.at(b, h) + i * call.q.row, call.q.type, call.q.col, call.features, q.data() + r * call.features);
  }
  Reader<T> keys(call.k, b, head, call.features), values(call.v, b, head, call.width);
  const T* lines[kAtOnce];
  SharedRows<T> key_rows(call.k, call.features, rows > 1), value_rows(call.v, call.width, rows > 1);
  const Streaming<T>&key_stream = key_rows.stream(), &value_stream = value_rows.stream();
  if (key_stream.dots)
    key_rows.each(keys.at(j0), j1 - j0, [&](const char* at, int64_t stride, int64_t from, int64_t some) {
      for (int64_t r = 0; r < rows; ++r)
        if (verdicts[r] != kNone)
          key_stream.dots(q.data() + r * call.features, call.features, at, stride, some, s.data() + r * count + from);
    });
  for (int64_t j = j0; !key_stream.dots && j < j1; j += kAtOnce) {
    const int64_t real = std::min<int64_t>(kAtOnce, j1 - j);
    for (int x = 0; x < real; ++x) lines[x] = keys.row(j + x, x);
    for (int64_t r = 0; r < rows; ++r) {
      if (verdicts[r] == kNone) continue;
      T* out = s.data() + r * count + (j - j0);
      if (real == kAtOnce) dots<T, kAtOnce>(q.data() + r * call.features, call.features, lines, out);
      else
        for (int x = 0; x < real; ++x) dots<T, 1>(q.data() + r * call.features, call.features, lines + x, out + x);
    }
  }
  const auto allowed_to = [&](int64_t r) { return verdicts[r] == kSome ? allowed.data() + r * count : nullptr; };
  for (int64_t r = 0; r < rows; ++r) {
    if (verdicts[r] == kNone) continue;
    finish_scores<T>(call, units, b, head * group + r / call.queries, r % call.queries, j0, j1, verdicts[r] == kSome,
                     s.data() + r * count, allowed_to(r));
    pieces[r] = exponentials<T>(s.data() + r * count, count, units.factor, call.width);
  }
  if (value_stream.add)
    value_rows.each(values.at(j0), j1 - j0, [&](const char* at, int64_t stride, int64_t from, int64_t some) {
      for (int64_t r = 0; r < rows; ++r)
        if (verdicts[r] != kNone)
          value_stream.add(s.data() + r * count + from, allowed_to(r) ? allowed_to(r) + from : nullptr, call.width, at, stride, some,
                           pieces[r].values.data());
    });
  for (int64_t j = j0; !value_stream.add && j < j1; j += kAtOnce) {
    const int64_t real = std::min<int64_t>(kAtOnce, j1 - j);
    for (int x = 0; x < real; ++x) lines[x] = values.row(j + x, x);
    for (int64_t r = 0; r < rows; ++r) {
      if (verdicts[r] == kNone) continue;
      const T* weights = s.data() + r * count + (j - j0);
      const uint8_t* seen = verdicts[r] == kSome ? allowed_to(r) + (j - j0) : nullptr;
      T* sums = pieces[r].values.data();
      bool all = real == kAtOnce;
      for (int x = 0; x < real; ++x) all = all && (!seen || seen[x]);
      if (all) add_weighted<T, kAtOnce>(weights, lines, call.width, sums);
      else
        for (int x = 0; x < real; ++x)
          if (!seen || seen[x]) add_weighted<T, 1>(weights + x, lines + x, call.width, sums);  // padding may be NaN
    }
  }
}

// Pieces of one row, merged in their order.
template <class T> Piece<T> merged(Piece<T>* pieces, int64_t count, int64_t step, T factor) {
  Piece<T> whole;
  for (int64_t n = 0; n < count; ++n) {
    Piece<T>& next = pieces[n * step];
    if (next.values.empty() || (next.total == 0 && !whole.values.empty())) continue;
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

template <class T> void write_query(const Call& call, int64_t b, int64_t h, int64_t i, const Piece<T>& piece) {
  const Units<T> units(call);
  const Ending<T> end = ending<T>(piece.largest, piece.total, piece.weighted, units, sink_of(call, h));
  write_ending<T>(call, units, call.row_of(b, h) + i, end);
  std::vector<T> row(call.width, T(0));
  for (size_t c = 0; c < piece.values.size(); ++c) row[c] = piece.values[c] * end.share;
  write_row<T>(row.data(), call.width, call.out.at(b, h) + i * call.out.row, call.out.type, call.out.col);
}

struct Part { int64_t head, low, high; };  // a head of keys, counted over the batch, and some of its keys

// The pieces of all heads that somebody sees, those of one head together; `first` says where each head's begin.
inline std::vector<Part> pieces_seen(const Call& call, std::vector<int64_t>& first) {
  std::vector<Part> parts;
  for (int64_t n = 0; n < call.batch * call.key_heads; ++n) {
    first.push_back(int64_t(parts.size()));
    const int64_t b = n / call.key_heads, h0 = n % call.key_heads * call.group();
    int64_t low = call.keys, high = 0;
    for (int64_t h = h0; h < h0 + call.group(); ++h) {
      const Span span = Mask(call, b, h).span(0, call.queries);
      if (span.low < span.high) low = std::min(low, span.low), high = std::max(high, span.high);
    }
    for (int64_t j0 = low; j0 < high; j0 += kPiece) {
      const int64_t j1 = std::min(j0 + kPiece, high);
      bool seen = false;
      for (int64_t h = h0; !seen && h < h0 + call.group(); ++h)
        seen = Mask(call, b, h).decide(0, call.queries, j0, j1) != kNone;
      if (seen) parts.push_back({n, j0, j1});
    }
  }
  first.push_back(int64_t(parts.size()));
  return parts;
}

template <class T> void decode(const Call& call, int threads) {
  const int64_t heads = call.batch * call.key_heads, rows = call.group() * call.queries;
  std::vector<int64_t> first;
  const std::vector<Part> parts = pieces_seen(call, first);
  std::vector<Piece<T>> pieces(parts.size() * rows);
  call.uses(int64_t(pieces.size()) * int64_t(sizeof(Piece<T>) + call.width * sizeof(T)));
  parallel(call, int64_t(parts.size()), threads, [&](int) {
    return [&](int64_t task) {
      const Part& part = parts[task];
      decode_piece<T>(call, part.head / call.key_heads, part.head % call.key_heads, part.low, part.high,
                      pieces.data() + task * rows);
    };
  });
  for (int64_t n = 0; n < heads; ++n)
    for (int64_t r = 0; r < rows; ++r)
      write_query<T>(call, n / call.key_heads, n % call.key_heads * call.group() + r / call.queries, r % call.queries,
                   merged<T>(pieces.data() + first[n] * rows + r, first[n + 1] - first[n], rows, Units<T>(call).factor));
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
