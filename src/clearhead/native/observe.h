// What was attended to, gathered from weights[key][query] tile by tile: received, map, top, whole rows.
#pragma once
#include "best.h"
#include "keys.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// What can be asked for, by name, and read once for all of a call's observers. Rows of weights go where they belong: for each
// query that is wanted, a place among the rows.
struct Sought {
  struct Row { int64_t query, place; };

  int64_t top = 0;
  int64_t* top_indices = nullptr;  // (T, top)
  void* top_weights = nullptr;     // (T, top)
  int64_t received_from = 0;       // the first query that counts
  void* received = nullptr;        // (S)
  int64_t map_rows = 0, map_columns = 0;
  int64_t map_queries = 0, map_keys = 0, first_query = 0, first_key = 0;  // of the call that the map is of, and where these lie
  bool map_sums = false;           // of a part of that call: nothing is divided yet
  void* map_mean = nullptr;  // (map_rows, map_columns)
  void* map_max = nullptr;
  std::vector<Row> chosen;   // by query
  void* rows = nullptr;      // (chosen, S)
  void* matrix = nullptr;    // (T, S)
  SoughtByKey by_key;

  static std::vector<std::string> names() {
    return {"top", "received", "received_max", "removal", "map", "queries", "weights"};
  }

  explicit Sought(const Call& call) {
    for (const Asked& one : call.wanted.of_weights) {
      const std::vector<int64_t>& numbers = one.numbers;
      const std::vector<void*>& arrays = one.arrays;
      if (one.name == "top") {
        top = numbers[0], top_indices = static_cast<int64_t*>(arrays[0]), top_weights = arrays[1];
      } else if (one.name == "received" && arrays.size() > 1) {  // with a weight for each query
        by_key.weighted = arrays[0], by_key.emphasis = arrays[1];
      } else if (one.name == "received") {
        received_from = call.queries - numbers[0], received = arrays[0];
      } else if (one.name == "received_max") {
        by_key.most_from = call.queries - numbers[0], by_key.most = arrays[0];
      } else if (one.name == "removal") {
        by_key.removal_from = call.queries - numbers[0], by_key.removal = arrays[0];
      } else if (one.name == "map") {
        map_sums = numbers.size() > 2;
        map_queries = map_sums ? numbers[2] : call.queries, map_keys = map_sums ? numbers[3] : call.keys;
        if (map_sums) first_query = numbers[4], first_key = numbers[5];
        map_rows = std::min(numbers[0], map_queries), map_columns = std::min(numbers[1], map_keys);
        map_mean = arrays[0], map_max = arrays[1];
      } else if (one.name == "queries") {
        for (size_t place = 0; place < numbers.size(); ++place) chosen.push_back({numbers[place], int64_t(place)});
        std::sort(chosen.begin(), chosen.end(), [](const Row& a, const Row& b) { return a.query < b.query; });
        rows = arrays[0];
      } else if (one.name == "weights") {
        matrix = arrays[0];
      }
    }
  }
};

inline std::vector<std::string> observes() { return Sought::names(); }

// One observer watches a chunk of queries of one head. Rows are written where they belong; what is summed over queries
// (received, map) is kept apart for each chunk and added up in the order of chunks, so that the result is the same bit by
// bit whatever the number of threads.
template <class T> class Observer {
 public:
  static constexpr int panel = kPanel<T>, lanes = kLanes<T>;
  static constexpr int64_t kStep = 8;               // keys whose largest weight is kept
  static constexpr int64_t kSome = 8, kMany = 16;   // how many are sought at most, where a bar is found first

  Observer(const Call& call, const Sought& sought, int64_t b, int64_t h, int64_t first, int64_t last)
      : call_(call), want_(sought), b_(b), h_(h), last_(last), by_key_(call, sought.by_key, b, h) {
    if (want_.received) received_.assign(call.keys, T(0));
    if (want_.map_rows) {
      first_bin_ = bin(first);
      const int64_t bins = bin(last - 1) - first_bin_ + 1;
      sums_.assign(bins * want_.map_columns, T(0));
      tops_.assign(bins * want_.map_columns, T(0));
    }
  }

  void see(const T* weights, const Packed<T>& packed, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    by_key_.see(weights, packed, i0, i1, j0, j1);
    const bool received = want_.received && i1 > want_.received_from, pooled = want_.map_rows > 0, ranked = want_.top > 0;
    if (received && i0 < want_.received_from) {  // some of the panel's queries count and some do not
      receive_some(weights, i0, j0, j1);
      walk<false>(weights, i0, i1, j0, j1, pooled, ranked);
    } else if (received) {
      walk<true>(weights, i0, i1, j0, j1, pooled, ranked);
    } else if (pooled || ranked) {
      walk<false>(weights, i0, i1, j0, j1, pooled, ranked);
    }
    if (want_.rows || want_.matrix) copy(weights, i0, i1, j0, j1);
  }

  // The row of query i is NaN: it has no largest weights, and says so.
  void spoil(int64_t i, T nan) {
    by_key_.spoil();
    if (want_.top) std::fill_n(best(i), want_.top, nan);
  }

  // All panels have shown their weights for keys [j0, j1).
  void end_tile(int64_t j0, int64_t j1) { by_key_.end_tile(j0, j1); }

  int64_t bytes() const {
    return int64_t((received_.size() + sums_.size() + tops_.size()) * sizeof(T)) + by_key_.bytes();
  }

  // Add what this chunk summed to the results; chunks of a head come in order.
  void add() const {
    const int64_t head = b_ * call_.heads + h_;
    by_key_.add();
    if (want_.received) {
      T* out = static_cast<T*>(want_.received) + head * call_.keys;
      for (int64_t j = 0; j < call_.keys; ++j) out[j] += received_[j];
    }
    if (want_.map_rows) {
      const int64_t at = (head * want_.map_rows + first_bin_) * want_.map_columns;
      T* mean = static_cast<T*>(want_.map_mean) + at;
      T* top = static_cast<T*>(want_.map_max) + at;
      for (size_t x = 0; x < sums_.size(); ++x) {
        mean[x] += sums_[x];
        top[x] = larger(top[x], tops_[x]);
      }
      if (last_ == call_.queries && !want_.map_sums) divide(head);
    }
  }

 private:
  // Of the steps of a tile: the largest weight for each query, and the key after each. A thread has one for all its observers.
  struct Steps {
    Buffer<T> most = Buffer<T>(kTile * panel);
    std::vector<int64_t> ends = std::vector<int64_t>(kTile);

    static Steps& here() {
      static thread_local Steps own;
      return own;
    }
  };

  // The larger of two, or NaN.
  static T larger(T a, T b) { return a >= b || a != a ? a : b; }

  int64_t bin(int64_t i) const { return (i + want_.first_query) * want_.map_rows / want_.map_queries; }

  // Sums over the cells of a map become means: all of the head's chunks were added.
  void divide(int64_t head) const {
    const auto length = [](int64_t place, int64_t bins, int64_t count) {
      return ((place + 1) * count + bins - 1) / bins - (place * count + bins - 1) / bins;
    };
    T* mean = static_cast<T*>(want_.map_mean) + head * want_.map_rows * want_.map_columns;
    for (int64_t row = 0; row < want_.map_rows; ++row)
      for (int64_t column = 0; column < want_.map_columns; ++column, ++mean) {
        const int64_t cells = length(row, want_.map_rows, call_.queries) * length(column, want_.map_columns, call_.keys);
        *mean = T(double(*mean) / double(cells));
      }
  }

  void receive_some(const T* weights, int64_t i0, int64_t j0, int64_t j1) {
    for (int64_t k = 0; k < j1 - j0; ++k)
      for (int64_t x = want_.received_from - i0; x < panel; ++x) received_[j0 + k] += weights[k * panel + x];
  }

  // Once through the tile for everything that looks at each weight. Keys go in steps that do not cross a column of the map; the
  // largest weights of the steps tell which of them can hold any of the best.
  template <bool received>
  void walk(const T* weights, int64_t i0, int64_t i1, int64_t j0, int64_t j1, bool pooled, bool ranked) {
    int64_t places[panel];  // of each query's row in the map
    for (int64_t i = i0; pooled && i < i1; ++i) places[i - i0] = (bin(i) - first_bin_) * want_.map_columns;
    T* const got = received ? received_.data() + j0 : nullptr;
    int64_t steps = 0;
    for (int64_t j = j0; j < j1;) {
      const int64_t column = pooled ? (j + want_.first_key) * want_.map_columns / want_.map_keys : 0;
      const int64_t after = pooled ? ((column + 1) * want_.map_keys + want_.map_columns - 1) / want_.map_columns : 0;
      const int64_t border = pooled ? std::min(j1, after - want_.first_key) : j1;
      Vec<T> total[kVecs] = {}, top[kVecs] = {};
      while (j < border) {
        const int64_t end = std::min(j + kStep, border);
        Vec<T> most[kVecs] = {};
        const auto take = [&](int64_t k) CLEARHEAD_LAMBDA {  // what all queries give a key, in as many parts as there are lanes
          Vec<T> all = {};
          for (int x = 0; x < kVecs; ++x) {
            const Vec<T> w = load<T>(weights + k * panel + x * lanes);
            total[x] += w;
            most[x] = max(most[x], w);
            if (received) all = x ? all + w : w;
          }
          return all;
        };
        int64_t k = j - j0;
        for (; k + 4 <= end - j0; k += 4) {
          const Vec<T> given[4] = {take(k), take(k + 1), take(k + 2), take(k + 3)};
          T four[4];
          if (received) sums_of_four<T>(given, four);
          for (int n = 0; received && n < 4; ++n) got[k + n] += four[n];
        }
        for (; k < end - j0; ++k) {
          const Vec<T> given = take(k);
          if (received) got[k] += sum<T>(given);
        }
        for (int x = 0; x < kVecs; ++x) top[x] = max(top[x], most[x]);
        if (ranked) {
          for (int x = 0; x < kVecs; ++x) store<T>(steps_.most.data() + steps * panel + x * lanes, most[x]);
          steps_.ends[steps++] = end;
        }
        j = end;
      }
      if (pooled) pool(total, top, int(i1 - i0), places, column);
    }
    if (ranked) rank(weights, steps, i0, i1, j0);
  }

  void pool(const Vec<T>* total, const Vec<T>* top, int queries, const int64_t* places, int64_t column) {
    const auto put = [&](int64_t at, T sum, T most) {
      sums_[at] += sum;
      tops_[at] = larger(tops_[at], sum == sum ? most : sum);  // a vector's maximum may lose NaN
    };
    for (int part = 0, x = 0; x < queries; ++part, x += lanes)
      if (x + lanes <= queries && places[x] == places[x + lanes - 1]) {
        put(places[x] + column, sum<T>(total[part]), largest<T>(top[part]));
      } else {
        for (int lane = 0; lane < std::min(lanes, queries - x); ++lane)
          put(places[x + lane] + column, total[part][lane], top[part][lane]);
      }
  }

  // Of the keys of a tile those that are among the best. As many steps as there are best ones, each with a weight of at least
  // `bar`, leave no place for one below it; most rows then meet few weights that are replaced by later ones.
  void rank(const T* weights, int64_t steps, int64_t i0, int64_t i1, int64_t j0) {
    T least[panel], bar[panel];
    std::fill(least, least + panel, std::numeric_limits<T>::infinity());
    std::fill(bar, bar + panel, T(0));
    for (int64_t i = i0; i < i1; ++i) least[i - i0] = best(i)[want_.top - 1];
    if (want_.top <= steps && want_.top <= kSome) find_bar<kSome>(steps, least, bar);
    else if (want_.top <= steps && want_.top <= kMany) find_bar<kMany>(steps, least, bar);
    T low[panel];  // what is among the best is no less
    for (int x = 0; x < panel; ++x) low[x] = std::max(bar[x], next_above(least[x]));
    T* const all = best(i0);
    int64_t* const keys = want_.top_indices + (call_.row_of(b_, h_) + i0) * want_.top;
    int64_t first = j0;
    for (int64_t n = 0; n < steps; first = steps_.ends[n++])
      for (uint64_t news = lanes_from<T>(steps_.most.data() + n * panel, low); news; news &= news - 1) {
        const int x = __builtin_ctzll(news);
        const T* const column = weights + (first - j0) * panel + x;
        const int64_t count = steps_.ends[n] - first;
        uint32_t found = count == kStep ? no_less<kStep>(column, low[x]) : no_less(column, low[x], count);
        for (; found; found &= found - 1)
          if (const int64_t k = __builtin_ctz(found); column[k * panel] > least[x])
            least[x] = insert(all + x * want_.top, keys + x * want_.top, want_.top, column[k * panel], first + k);
      }
  }

  // The number after one that is no less than 0, where there is one.
  static T next_above(T x) {
    typename Bits<T>::type bits;
    if (!(x < std::numeric_limits<T>::infinity())) return x;
    std::memcpy(&bits, &x, sizeof(T));
    ++bits;
    std::memcpy(&x, &bits, sizeof(T));
    return x;
  }

  // Which of a query's weights are no less than `low`, a bit for each; nobody could foresee a branch for each.
  static uint32_t no_less(const T* column, T low, int64_t count) {
    uint32_t found = 0;
    for (int64_t k = 0; k < count; ++k) found |= uint32_t(column[k * panel] >= low) << k;
    return found;
  }
  template <int64_t count> static CLEARHEAD_INLINE uint32_t no_less(const T* column, T low) {
    return bits_of(column, low, std::make_integer_sequence<int, int(count)>());
  }
  template <int... k> static CLEARHEAD_INLINE uint32_t bits_of(const T* column, T low, std::integer_sequence<int, k...>) {
    return ((uint32_t(column[k * panel] >= low) << k) | ...);
  }

  template <int64_t most> void find_bar(int64_t steps, const T* least, T* bar) const {
    for (int x = 0; x < kVecs; ++x) {
      Best<T, most> sorted;
      for (int64_t n = 0; n < steps; n += kTogetherBest)
        sorted.add(steps_.most.data() + n * panel + x * lanes, panel, steps - n, load<T>(least + x * lanes));
      store<T>(bar + x * lanes, sorted.at(want_.top - 1));
    }
  }

  T* best(int64_t i) const { return static_cast<T*>(want_.top_weights) + (call_.row_of(b_, h_) + i) * want_.top; }

  // Put a weight into its place among a query's best; the least of them comes back.
  static T insert(T* weights, int64_t* indices, int64_t top, T weight, int64_t key) {
    int64_t place = top - 1;
    for (; place > 0 && weights[place - 1] < weight; --place) {
      weights[place] = weights[place - 1];
      indices[place] = indices[place - 1];
    }
    weights[place] = weight;
    indices[place] = key;
    return weights[top - 1];
  }

  void copy(const T* weights, int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    const int64_t head = b_ * call_.heads + h_;
    const auto write = [&](T* row, int64_t i) {
      for (int64_t j = j0; j < j1; ++j) row[j] = weights[(j - j0) * panel + (i - i0)];
    };
    T* const matrix = static_cast<T*>(want_.matrix) + head * call_.queries * call_.keys;
    for (int64_t i = i0; want_.matrix && i < i1; ++i) write(matrix + i * call_.keys, i);
    T* const rows = static_cast<T*>(want_.rows) + head * int64_t(want_.chosen.size()) * call_.keys;
    const auto first = std::lower_bound(want_.chosen.begin(), want_.chosen.end(), i0,
                                        [](const Sought::Row& row, int64_t i) { return row.query < i; });
    for (auto row = first; row != want_.chosen.end() && row->query < i1; ++row) write(rows + row->place * call_.keys, row->query);
  }

  const Call& call_;
  const Sought& want_;
  const int64_t b_, h_, last_;
  int64_t first_bin_ = 0;
  ByKey<T> by_key_;
  Buffer<T> received_, sums_, tops_;
  Steps& steps_ = Steps::here();
};

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
