// Few queries over many keys: keys are read once, where they lie, split into pieces that threads share and merge. Keys that
// nobody sees are not read. Products of bfloat16 go by tiles where there are tiles for it, all else is the same.
#pragma once
#include <optional>

#include "abreast.h"
#include "threads.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// Queries of a head, up to which reading keys as they lie beats packing them for panels that are half empty.
template <class T> constexpr int64_t kFewQueries = kPanel<T> / 2 < 8 ? kPanel<T> / 2 : 8;
constexpr int64_t kPiece = 512;     // keys in a piece, for few rows; for more it is smaller, so that there are pieces for many
constexpr int64_t kPieceRows = 4;   // threads. It depends on the call only, and so does the result.
constexpr int64_t kPieces = 32;     // of a call with many queries to a key head, if there are keys for them
constexpr int64_t kPieceScores = 1 << 14;  // that stay in the second cache
constexpr int64_t kMuchToMerge = 1 << 16;  // numbers of pieces that are worth threads
constexpr int kPowers = 4;          // vectors of exponentials side by side
template <class T> constexpr bool kByTiles = kFewTiled && sizeof(T) == 4;
static_assert(!kFewTiled || kPowers * kLanes<float> % kTileRows == 0);  // scores have room for whole tiles of keys

template <class T> inline bool decodes(const Call& call) {
  return call.queries <= kFewQueries<T> && call.keys >= 1 && !call.panels && !call.wanted.second_look();
}

// Queries that share a key head.
inline int64_t rows_of(const Call& call) { return call.group() * call.queries; }

template <class T> inline bool by_tiles(const Call& call) { return kByTiles<T> && FewTiles::takes(call, rows_of(call)); }

// Whether queries go side by side: there are enough of them, and what they are multiplied with fills a block.
template <class T> inline bool side_by_side(const Call& call) {
  const bool fills = call.features > 0 && rounded(call.width, kLanes<T>) >= kRows;
  return fills && enough_abreast<T>(rows_of(call), call.k.type) && !by_tiles<T>(call);
}

// Keys in a piece, of so many that are seen in all heads together.
template <class T> inline int64_t piece_of(const Call& call, int64_t seen) {
  if (side_by_side<T>(call)) {
    const int64_t panels = (rows_of(call) + kPanel<T> - 1) / kPanel<T>, most = std::max(kPiece / panels / kShared, int64_t(1));
    return std::clamp(rounded(seen / kPieces, kShared), kShared, most * kShared);
  }
  const int64_t rows = std::max<int64_t>(rows_of(call), 1), shares = (rows + kPieceRows - 1) / kPieceRows;
  const int64_t least = std::max(kPiece / shares / kShared, int64_t(1)) * kShared;
  const int64_t most = std::min(kPiece, kPieceScores / rows / kShared * kShared);
  return std::clamp(rounded(seen / kPieces, kShared), least, std::max(least, most));
}

// The sums over one piece of keys, for one row: as in `softmax.h`. Its weighted values lie elsewhere.
template <class T> struct Piece {
  T largest = -std::numeric_limits<T>::infinity(), total = 0, weighted = 0;
  bool seen = false;  // false: the row sees none of the keys
};

// What the scores of row (head h, query i), `step` apart, become after the product, unless they are kept as they are: scale,
// softcap, bias.
template <class T>
inline void shape_scores(const Call& call, int64_t b, int64_t h, int64_t i, int64_t j0, int64_t j1, T* s, int64_t step) {
  const Bias& bias = call.bias;
  for (int64_t j = j0; j < j1; ++j, s += step) {
    T x = *s * T(call.scale);
    if (call.softcap != 0) x = T(call.softcap) * std::tanh(x / T(call.softcap));
    if (bias.length > 0) x += T(bias.by_distance[h * bias.length + bias.centre + bias.offset[b] + i - j]);
    else if (bias.array) x += read<T>(bias.array.at(b, h) + i * bias.array.row + j * bias.array.col, bias.array.type);
    *s = x;
  }
}

// That and the mask; `allowed` is filled where only some keys may be seen.
template <class T>
inline void finish_scores(const Call& call, const Units<T>& units, int64_t b, int64_t h, int64_t i, int64_t j0, int64_t j1,
                          bool some, T* s, uint8_t* allowed) {
  if (!units.raw) shape_scores<T>(call, b, h, i, j0, j1, s, 1);
  if (!some) return;
  Mask(call, b, h).tile(i, i + 1, j0, j1, 1, allowed);
  for (int64_t j = j0; j < j1; ++j)
    if (!allowed[j - j0]) s[j - j0] = -std::numeric_limits<T>::infinity();
}

// 2^((s − largest) · factor) in place; the sums of one piece. `count` is a multiple of kPowers vectors, filled up with −inf.
template <class T> inline Piece<T> exponentials(T* s, int64_t count, T factor) {
  constexpr int lanes = kLanes<T>, many = kPowers;
  constexpr T none = -std::numeric_limits<T>::infinity();
  Piece<T> piece;
  Vec<T> top[many];
  for (auto& x : top) x = all<T>(none);
  for (int64_t k = 0; k < count; k += many * lanes)
    for (int x = 0; x < many; ++x) top[x] = max(top[x], load<T>(s + k + x * lanes));
  for (int x = 1; x < many; ++x) top[0] = max(top[0], top[x]);
  piece.largest = largest<T>(top[0]);  // or less, where some are NaN: the total is NaN then
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
  piece.total = sum_by_halves<T>(sums);
  piece.weighted = sum_by_halves<T>(spread);
  piece.seen = true;
  return piece;
}

// What a thread has of its own.
template <class T> struct DecodeRoom {
  Buffer<T> q, s;
  std::vector<uint8_t> allowed;
  std::vector<Verdict> verdicts;
  SharedRows<T> keys, values;
  std::conditional_t<kByTiles<T>, FewTiles, std::nullptr_t> tiles{};
  const bool by_tiles;
  Abreast<T> abreast;
  int64_t asked = -1;  // whose queries the tiles hold, or lie side by side: a head of keys, counted over the batch

  DecodeRoom(const Call& call, int64_t piece)
      : verdicts(rows_of(call)), keys(call.k, call.features, rows_of(call), call.q.type, side_by_side<T>(call)),
        values(call.v, call.width, rows_of(call), -1, side_by_side<T>(call)), by_tiles(CLEARHEAD_ISA::by_tiles<T>(call)) {
    const int64_t rows = rows_of(call);
    if constexpr (kByTiles<T>)
      if (by_tiles) tiles.begin(call, rows);
    if (side_by_side<T>(call)) abreast.begin(rows, call.features, values.columns(), piece);
    if (side_by_side<T>(call) && call.mask.empty()) return;
    q.resize(by_tiles ? 0 : rows * keys.columns());
    s.resize(rounded(rows, by_tiles ? 4 : 1) * rounded(piece, kPowers * kLanes<T>));
    allowed.resize(call.mask.empty() ? 0 : s.size());
  }

  int64_t bytes() const {
    return int64_t((q.size() + s.size()) * sizeof(T) + allowed.size()) + abreast.bytes() + keys.bytes() + values.bytes();
  }
};

// A query head that shares keys with others: that of row r.
inline int64_t head_of(const Call& call, int64_t head, int64_t r) { return head * call.group() + r / call.queries; }

// Where the query of row r lies.
inline const char* query_at(const Call& call, int64_t b, int64_t head, int64_t r) {
  return call.q.at(b, head_of(call, head, r)) + r % call.queries * call.q.row;
}

// What is read after the keys or the values of a piece: its values, and most often the keys that come next.
inline const char* read_after(const Call& call, const char* next) { return call.k.row == call.v.row ? next : nullptr; }

// The products of keys [j0, j1) of a head with all rows, which lie `count` apart; −inf behind the last key.
template <class T>
void decode_products(const Call& call, int64_t b, int64_t head, int64_t j0, int64_t j1, int64_t count, DecodeRoom<T>& room) {
  constexpr T none = -std::numeric_limits<T>::infinity();
  const int64_t rows = rows_of(call), features = room.keys.columns();
  const char* const keys = call.k.at(b, head) + j0 * call.k.row;
  const auto query = [&](int64_t r) { return query_at(call, b, head, r); };
  if constexpr (kByTiles<T>)
    if (room.by_tiles) {
      const int64_t asked = std::exchange(room.asked, b * call.key_heads + head);
      for (int64_t r = 0; r < rows && asked != room.asked; ++r) room.tiles.ask(r, query(r), call.q.col, call.features);
      room.tiles.scores(keys, call.k.row, j1 - j0, call.v.at(b, head) + j0 * call.v.row, call.v.row, room.s.data(), count);
      for (int64_t r = 0; r < rows; ++r) std::fill(room.s.data() + r * count + j1 - j0, room.s.data() + (r + 1) * count, none);
      return;
    }
  std::fill_n(room.q.data(), rows * features, T(0));
  for (int64_t r = 0; r < rows; ++r) std::fill(room.s.data() + r * count + j1 - j0, room.s.data() + (r + 1) * count, none);
  for (int64_t r = 0; r < rows; ++r) read_row<T>(query(r), call.q.type, call.q.col, call.features, room.q.data() + r * features);
  if (room.keys.stream().parted)
    for (int64_t r = 0; r < rows; ++r) part_row<T>(room.q.data() + r * features, features);
  const char* const next = read_after(call, call.v.at(b, head) + j0 * call.v.row);
  room.keys.each(keys, j1 - j0, next, [&](const char* at, int64_t stride, int64_t ahead, int64_t from, int64_t some) {
    room.keys.stream().dots(room.q.data(), rows, features, at, stride, ahead, some, room.s.data() + from, count);
  });
}

// The weighted values of keys [j0, j1) by tiles; false where they do not go this way, and `sums` hold zeros.
template <class T>
bool decode_tiles(const Call& call, int64_t b, int64_t head, int64_t j0, int64_t j1, int64_t count, DecodeRoom<T>& room, T* sums) {
  if constexpr (kByTiles<T>) {
    if (!room.by_tiles) return false;
    const int64_t rows = rows_of(call), width = room.values.columns();
    for (int64_t r = 0; r < rows; ++r)
      if (room.verdicts[r] == kNone) std::fill_n(room.s.data() + r * count, count, T(0));
    // after these values most threads read the keys that come next
    if (room.tiles.values(room.s.data(), count, call.v.at(b, head) + j0 * call.v.row, call.v.row, j1 - j0,
                          call.k.at(b, head) + j1 * call.k.row, call.k.row, sums, width))
      return true;
    std::fill_n(sums, rows * width, T(0));
  }
  return false;
}

// Keys [j0, j1) of a head for rows side by side, of which each sees them all.
template <class T>
void decode_abreast(const Call& call, int64_t b, int64_t head, int64_t j0, int64_t j1, DecodeRoom<T>& room, Piece<T>* pieces,
                    T* sums) {
  const Units<T> units(call);
  const int64_t here = b * call.key_heads + head;
  const char *const keys = call.k.at(b, head) + j0 * call.k.row, *const values = call.v.at(b, head) + j0 * call.v.row;
  if (std::exchange(room.asked, here) != here)
    room.abreast.ask([&](int64_t r) { return query_at(call, b, head, r); }, call.q.type, call.q.col);
  room.keys.each(keys, j1 - j0, read_after(call, values), [&](const char* at, int64_t stride, int64_t, int64_t from, int64_t some) {
    room.abreast.score(at, stride, from, some);
  });
  for (int64_t r = 0; r < rows_of(call) && !units.raw; ++r)
    shape_scores<T>(call, b, head_of(call, head, r), r % call.queries, j0, j1, room.abreast.score_of(r), kPanel<T>);
  room.abreast.weigh(j1 - j0, units.factor, call.wanted.entropy, [&](int64_t r, const Rows<T>& found, int64_t lane) {
    pieces[r] = {found.largest[lane], found.total[lane], found.weighted[lane], true};
  });
  const char* const next = read_after(call, call.k.at(b, head) + j1 * call.k.row);
  room.values.each(values, j1 - j0, next, [&](const char* at, int64_t stride, int64_t, int64_t from, int64_t some) {
    room.abreast.add(at, stride, from, some);
  });
  room.abreast.finish(sums);
}

// Keys [j0, j1) of a head, for all rows: their sums into `pieces`, their weighted values into `sums`, a row after the other.
template <class T>
void decode_piece(const Call& call, int64_t b, int64_t head, int64_t j0, int64_t j1, DecodeRoom<T>& room, Piece<T>* pieces,
                  T* sums) {
  const Units<T> units(call);
  const int64_t rows = rows_of(call), width = room.values.columns();
  const int64_t count = rounded(j1 - j0, kPowers * kLanes<T>);  // room for each row
  std::optional<TileUnit> unit;
  if (room.by_tiles) unit.emplace();
  bool all = true;
  for (int64_t r = 0; r < rows; ++r) {
    room.verdicts[r] = Mask(call, b, head_of(call, head, r)).decide(r % call.queries, r % call.queries + 1, j0, j1);
    all = all && room.verdicts[r] == kAll;
  }
  if (all && side_by_side<T>(call)) return decode_abreast<T>(call, b, head, j0, j1, room, pieces, sums);
  std::fill_n(sums, rows * width, T(0));
  decode_products<T>(call, b, head, j0, j1, count, room);
  const auto allowed_to = [&](int64_t r) { return room.verdicts[r] == kSome ? room.allowed.data() + r * count : nullptr; };
  for (int64_t r = 0; r < rows; ++r) {
    if (room.verdicts[r] == kNone) continue;
    T* const s = room.s.data() + r * count;
    finish_scores<T>(call, units, b, head_of(call, head, r), r % call.queries, j0, j1, room.verdicts[r] == kSome, s, allowed_to(r));
    pieces[r] = exponentials<T>(s, count, units.factor);
  }
  if (decode_tiles<T>(call, b, head, j0, j1, count, room, sums)) return;
  // rows that see every key go together
  const auto together = [&](int64_t r) {
    int64_t n = 0;
    while (n < kQueries && r + n < rows && room.verdicts[r + n] == kAll) ++n;
    return n;
  };
  const char* const next = read_after(call, call.k.at(b, head) + j1 * call.k.row);
  room.values.each(call.v.at(b, head) + j0 * call.v.row, j1 - j0, next,
                   [&](const char* at, int64_t stride, int64_t ahead, int64_t from, int64_t some) {
    for (int64_t r = 0, n = 1; r < rows; r += n) {
      n = std::max<int64_t>(together(r), 1);
      if (room.verdicts[r] == kNone) continue;
      room.values.stream().add(room.s.data() + r * count + from, count, n, allowed_to(r) ? allowed_to(r) + from : nullptr, width,
                               at, stride, r < kTwice ? ahead : 0, some, sums + r * width);
    }
  });
  if (room.values.stream().parted)
    for (int64_t r = 0; r < rows; ++r) join_row<T>(sums + r * width, width);
}

// Pieces of one row, `step` apart, merged into the first that is not empty; where it is. `worths` has room for each.
template <class T>
int64_t merged(Piece<T>* pieces, T* sums, int64_t count, int64_t step, int64_t width, T factor, std::vector<T>& worths) {
  constexpr T none = -std::numeric_limits<T>::infinity();
  int64_t into = -1, full = 0;
  T largest = none;
  for (int64_t n = 0; n < count; ++n) {
    const Piece<T>& piece = pieces[n * step];
    if (!piece.seen) continue;
    if (into < 0 || (piece.total != 0 && !full)) into = n;
    if (piece.total != 0) ++full, largest = std::max(largest, piece.largest);
  }
  if (full < 2) return into;
  Piece<T> whole{largest, 0, 0, true};
  for (int64_t n = 0; n < count; ++n) {
    const Piece<T>& piece = pieces[n * step];
    const bool empty = !piece.seen || piece.total == 0;
    const T apart = empty ? none : (piece.largest - largest) * factor;
    worths[n] = empty ? T(0) : std::exp2(apart);
    if (empty) continue;
    whole.weighted += worths[n] * (piece.weighted + piece.total * apart);
    whole.total += worths[n] * piece.total;
  }
  for (int64_t c = 0; c < width; c += kLanes<T>) {
    Vec<T> sum{};
    for (int64_t n = into; n < count; ++n)
      if (pieces[n * step].seen && pieces[n * step].total != 0) sum += worths[n] * load<T>(sums + n * step * width + c);
    store<T>(sums + into * step * width + c, sum);
  }
  pieces[into * step] = whole;
  return into;
}

template <class T> void write_query(const Call& call, int64_t b, int64_t h, int64_t i, const Piece<T>& piece, T* sums) {
  const Units<T> units(call);
  const Ending<T> end = ending<T>(piece.largest, piece.total, piece.weighted, units, sink_of(call, h), told(call));
  write_ending<T>(call, units, call.row_of(b, h) + i, end);
  for (int64_t c = 0; c < call.width; ++c) sums[c] *= end.share;
  write_row<T>(sums, call.width, call.out.at(b, h) + i * call.out.row, call.out.type, call.out.col);
}

struct Part { int64_t head, low, high; };  // a head of keys, counted over the batch, and some of its keys

// For each head of keys, from the first that somebody sees to the last.
inline std::vector<Span> spans_seen(const Call& call) {
  std::vector<Span> spans;
  for (int64_t n = 0; n < call.batch * call.key_heads; ++n) {
    const int64_t b = n / call.key_heads, h0 = n % call.key_heads * call.group();
    Span whole{call.keys, 0};
    for (int64_t h = h0; h < h0 + call.group(); ++h) {
      const Span span = Mask(call, b, h).span(0, call.queries);
      if (span.low < span.high) whole.low = std::min(whole.low, span.low), whole.high = std::max(whole.high, span.high);
    }
    spans.push_back(whole);
  }
  return spans;
}

// The pieces of all heads that somebody sees, those of one head together; `first` says where each head's begin.
inline std::vector<Part> pieces_seen(const Call& call, const std::vector<Span>& spans, int64_t piece, std::vector<int64_t>& first) {
  std::vector<Part> parts;
  for (int64_t n = 0; n < int64_t(spans.size()); ++n) {
    first.push_back(int64_t(parts.size()));
    const int64_t b = n / call.key_heads, h0 = n % call.key_heads * call.group();
    for (int64_t j0 = spans[n].low; j0 < spans[n].high; j0 += piece) {
      const int64_t j1 = std::min(j0 + piece, spans[n].high);
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
  const int64_t heads = call.batch * call.key_heads, rows = rows_of(call);
  const int64_t width = rounded(std::max<int64_t>(call.width, 1), kLanes<T>);
  const std::vector<Span> spans = spans_seen(call);
  const auto add = [](int64_t sum, const Span& span) { return sum + std::max<int64_t>(span.high - span.low, 0); };
  const int64_t piece = piece_of<T>(call, std::accumulate(spans.begin(), spans.end(), int64_t(0), add));
  std::vector<int64_t> first;
  const std::vector<Part> parts = pieces_seen(call, spans, piece, first);
  std::vector<Piece<T>> pieces(parts.size() * rows);
  Buffer<T> sums;
  sums.resize(pieces.size() * width);
  std::atomic<int64_t> each{0};  // bytes of a thread's room
  parallel(call, int64_t(parts.size()), threads, [&](int) {
    auto room = std::make_unique<DecodeRoom<T>>(call, piece);
    each = room->bytes();
    return [&, room = std::move(room)](int64_t task) {
      const Part& part = parts[task];
      decode_piece<T>(call, part.head / call.key_heads, part.head % call.key_heads, part.low, part.high, *room,
                      pieces.data() + task * rows, sums.data() + task * rows * width);
    };
  });
  const int64_t rooms = std::min<int64_t>(threads, int64_t(parts.size()));
  call.uses(int64_t(pieces.size() * sizeof(Piece<T>) + sums.size() * sizeof(T)) + rooms * each);
  const auto end = [&](int64_t task) {
    const int64_t n = task / rows, r = task % rows, many = first[n + 1] - first[n], at = first[n] * rows + r;
    std::vector<T> worths(many);
    const int64_t into = merged<T>(pieces.data() + at, sums.data() + at * width, many, rows, width, Units<T>(call).factor, worths);
    std::vector<T> nothing(into < 0 ? width : 0, T(0));
    write_query<T>(call, n / call.key_heads, n % call.key_heads * call.group() + r / call.queries, r % call.queries,
                   into < 0 ? Piece<T>() : pieces[at + into * rows],
                   into < 0 ? nothing.data() : sums.data() + (at + into * rows) * width);
  };
  if (int64_t(sums.size()) >= kMuchToMerge) parallel(call, heads * rows, threads, [&](int) { return end; });
  else
    for (int64_t task = 0; task < heads * rows; ++task) end(task);
}

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
