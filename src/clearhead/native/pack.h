// Packing: the caller's numbers, in any type and with any strides, laid out in the order in which the product reads them.
#pragma once
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "half.h"
#include "problem.h"

namespace clearhead {
namespace CLEARHEAD_ISA {

// Memory that starts a cache line, so that no vector in it lies across two; what is not given a value has none.
template <class T> struct Lines {
  using value_type = T;
  static constexpr std::align_val_t line{64};
  Lines() = default;
  template <class U> Lines(const Lines<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), line)); }
  void deallocate(T* at, size_t) { ::operator delete(at, line); }
  void construct(T*) {}
  void construct(T* at, const T& value) { *at = value; }
  bool operator==(const Lines&) const { return true; }
  bool operator!=(const Lines&) const { return false; }
};
template <class T> using Buffer = std::vector<T, Lines<T>>;

template <class T> inline T read(const char* p, int type) {
  switch (type) {
    case kFloat32: { float x; std::memcpy(&x, p, 4); return T(x); }
    case kFloat64: { double x; std::memcpy(&x, p, 8); return T(x); }
    case kFloat16: { uint16_t x; std::memcpy(&x, p, 2); return T(half_to_float(x)); }
    default: { uint16_t x; std::memcpy(&x, p, 2); return T(bfloat_to_float(x)); }
  }
}

template <class T> inline void write(char* p, int type, T value) {
  switch (type) {
    case kFloat32: { const float x = float(value); std::memcpy(p, &x, 4); break; }
    case kFloat64: { const double x = double(value); std::memcpy(p, &x, 8); break; }
    case kFloat16: { const uint16_t x = float_to_half(float(value)); std::memcpy(p, &x, 2); break; }
    default: { const uint16_t x = float_to_bfloat(float(value)); std::memcpy(p, &x, 2); break; }
  }
}

// One row of `count` numbers, converted.
template <class T> inline void read_row(const char* p, int type, int64_t stride, int64_t count, T* out) {
  if (stride == int64_t(sizeof(T)) && type == kOwn<T>) {
    std::memcpy(out, p, count * sizeof(T));
    return;
  }
  int64_t i = 0;
  if constexpr (sizeof(T) == 4)
    if (stride == 2 && (type == kFloat16 || type == kBFloat16))
      for (; i + kLanes<T> <= count; i += kLanes<T>)
        store<T>(out + i, type == kFloat16 ? load_as<kFloat16>(p + 2 * i) : load_as<kBFloat16>(p + 2 * i));
  for (; i < count; ++i) out[i] = read<T>(p + i * stride, type);
}

// The same the other way.
template <class T> inline void write_row(const T* row, int64_t count, char* p, int type, int64_t stride) {
  if (stride == int64_t(sizeof(T)) && type == kOwn<T>) {
    std::memcpy(p, row, count * sizeof(T));
    return;
  }
  int64_t i = 0;
  if constexpr (sizeof(T) == 4)
    if (stride == 2 && (type == kFloat16 || type == kBFloat16))
      for (; i + kLanes<T> <= count; i += kLanes<T>)
        type == kFloat16 ? store_as<kFloat16>(p + 2 * i, load<T>(row + i)) : store_as<kBFloat16>(p + 2 * i, load<T>(row + i));
  for (; i < count; ++i) write<T>(p + i * stride, type, row[i]);
}

// Numbers of two vectors of four, by their places in both; Clang has had this always, GCC since 12.
#if defined(__clang__)
#define CLEARHEAD_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Places __attribute__((vector_size(16)));
#define CLEARHEAD_PICK(a, b, ...) __builtin_shuffle(a, b, Places{__VA_ARGS__})
#endif

typedef float F4 __attribute__((vector_size(16), aligned(4), may_alias));
inline F4& four(float* at) { return *reinterpret_cast<F4*>(at); }
inline const F4& four(const float* at) { return *reinterpret_cast<const F4*>(at); }

// Four rows of four numbers, turned: out[column · stride + row] = row[column].
inline void turn4(F4 one, F4 two, F4 three, F4 last, float* out, int64_t stride) {
  const F4 a = CLEARHEAD_PICK(one, two, 0, 4, 1, 5), b = CLEARHEAD_PICK(three, last, 0, 4, 1, 5);
  const F4 c = CLEARHEAD_PICK(one, two, 2, 6, 3, 7), d = CLEARHEAD_PICK(three, last, 2, 6, 3, 7);
  four(out) = CLEARHEAD_PICK(a, b, 0, 1, 4, 5);
  four(out + stride) = CLEARHEAD_PICK(a, b, 2, 3, 6, 7);
  four(out + 2 * stride) = CLEARHEAD_PICK(c, d, 0, 1, 4, 5);
  four(out + 3 * stride) = CLEARHEAD_PICK(c, d, 2, 3, 6, 7);
}

// The same of rows in memory, from a column on.
template <class T> inline void turn4(const T* const* rows, int64_t column, T* out, int64_t stride) {
  if constexpr (sizeof(T) == 4) {
    turn4(four(rows[0] + column), four(rows[1] + column), four(rows[2] + column), four(rows[3] + column), out, stride);
  } else {
    for (int i = 0; i < 4; ++i)
      for (int c = 0; c < 4; ++c) out[c * stride + i] = rows[i][column + c];
  }
}

#if defined(CLEARHEAD_AVX512)
constexpr bool kTurnsSquares = true;
// `rows` vectors as one list of numbers, of which each round deals out the first half and the second by turns: in the end column
// lies after column. A round moves the first of an index's bits to its end.
template <class T, int rows> CLEARHEAD_INLINE void riffle(Vec<T>* x) {
#if !defined(__clang__)
  typedef typename Bits<T>::type Places __attribute__((vector_size(kBytes)));
#endif
  for (int round = 1; round < rows; round *= 2) {
    Vec<T> dealt[rows];
    for (int i = 0; i < rows / 2; ++i) {
      const Vec<T> a = x[i], b = x[i + rows / 2];
      if constexpr (sizeof(T) == 4) {
        dealt[2 * i] = CLEARHEAD_PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        dealt[2 * i + 1] = CLEARHEAD_PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      } else {
        dealt[2 * i] = CLEARHEAD_PICK(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
        dealt[2 * i + 1] = CLEARHEAD_PICK(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
      }
    }
    for (int i = 0; i < rows; ++i) x[i] = dealt[i];
  }
}
#else
constexpr bool kTurnsSquares = false;
template <class T, int rows> void riffle(Vec<T>*) {}
#endif

// `turn` of as many rows at a time as a vector has lanes, or of a block of keys, where there are so many; how many were turned.
template <class T>
inline int64_t turn_squares(const T* const* rows, int64_t count, int64_t columns, T* out, int64_t width) {
  constexpr int side = kLanes<T>;
  if (!kTurnsSquares || columns % side) return 0;
  Vec<T> x[side];
  if (width == kRows && count == kRows) {
    for (int64_t c = 0; c < columns; c += side) {
      for (int i = 0; i < kRows; ++i) x[i] = load<T>(rows[i] + c);
      riffle<T, kRows>(x);
      for (int i = 0; i < kRows; ++i) store<T>(out + c * kRows + i * side, x[i]);
    }
    return count;
  }
  int64_t r = 0;
  for (; r + side <= count; r += side)
    for (int64_t c = 0; c < columns; c += side) {
      for (int i = 0; i < side; ++i) x[i] = load<T>(rows[r + i] + c);
      riffle<T, side>(x);
      for (int i = 0; i < side; ++i) store<T>(out + (c + i) * width + r, x[i]);
    }
  return r;
}

// out[column · width + row] = in[row][column] for `count` rows, no more than `width`.
template <class T> inline void turn(const T* const* rows, int64_t count, int64_t columns, T* out, int64_t width) {
  int64_t r = turn_squares<T>(rows, count, columns, out, width);
  for (; r + 4 <= count; r += 4) {
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4) turn4<T>(rows + r, c, out + c * width + r, width);
    for (; c < columns; ++c)
      for (int i = 0; i < 4; ++i) out[c * width + r + i] = rows[r + i][c];
  }
  for (; r < count; ++r)
    for (int64_t c = 0; c < columns; ++c) out[c * width + r] = rows[r][c];
}

// True where a row holds a number that is not finite.
template <class T> inline bool is_odd(const T* row, int64_t count) {
  using Word = typename Bits<T>::type;
  constexpr Word exponent = sizeof(T) == 4 ? Word(0x7f800000) : Word(0x7ff0000000000000);
  Word found = 0;
  for (int64_t c = 0; c < count; ++c) {
    Word bits;
    std::memcpy(&bits, row + c, sizeof(T));
    found |= (bits & exponent) == exponent;
  }
  return found != 0;
}

// The rows of a view, converted into `scratch` where they cannot be read as they lie; `scratch` has room for each.
template <class T>
inline void point_to_rows(const View& view, int64_t b, int64_t h, int64_t first, int64_t count, int64_t columns, T* scratch,
                          const T** rows) {
  const bool direct = view.col == int64_t(sizeof(T)) && view.type == kOwn<T>;
  for (int64_t r = 0; r < count; ++r) {
    const char* at = view.at(b, h) + (first + r) * view.row;
    rows[r] = reinterpret_cast<const T*>(at);
    if (direct) continue;
    read_row<T>(at, view.type, view.col, columns, scratch + r * columns);
    rows[r] = scratch + r * columns;
  }
}

// Rows [first, first + count) as panels: out[panel][column][row in panel], rows past the end zero. `width` rows a panel.
// This is how queries go in (a panel wide) and keys (a block wide). `odd`, if given, learns which are not finite.
template <class T>
inline void pack_rows(const View& view, int64_t b, int64_t h, int64_t first, int64_t count, int64_t columns, int width,
                      T* scratch, T* out, uint8_t* odd = nullptr) {
  const T* rows[std::max(kPanel<T>, kRows)];
  for (int64_t p = 0; p < count; p += width) {
    T* panel = out + p * columns;
    const int64_t real = std::min<int64_t>(width, count - p);
    for (int64_t c = 0; real < width && c < columns; ++c) std::fill(panel + c * width + real, panel + (c + 1) * width, T(0));
    point_to_rows<T>(view, b, h, first + p, real, columns, scratch, rows);
    turn<T>(rows, real, columns, panel, width);
    if (odd)
      for (int64_t r = 0; r < real; ++r) odd[p + r] |= is_odd<T>(rows[r], columns);
  }
}

// Rows [first, first + count) as blocks of columns: out[block][row][column in block], columns past the end zero. This is how
// values go in. `stride` is the room for one block, rows × wide.
template <class T, int64_t wide = kRows>
inline void pack_columns(const View& view, int64_t b, int64_t h, int64_t first, int64_t count, int64_t columns,
                         int64_t stride, T* scratch, T* out, uint8_t* odd = nullptr) {
  const int64_t whole = columns / wide;
  for (int64_t r = 0; r < count; ++r) {
    const T* row;
    point_to_rows<T>(view, b, h, first + r, 1, columns, scratch, &row);
    T* at = out + r * wide;
    for (int64_t i = 0; i < whole; ++i) std::memcpy(at + i * stride, row + i * wide, wide * sizeof(T));
    for (int64_t c = whole * wide; c < columns; ++c) at[whole * stride + c % wide] = row[c];
    for (int64_t c = columns; c % wide; ++c) at[whole * stride + c % wide] = T(0);
    if (odd) odd[r] |= is_odd<T>(row, columns);
  }
}

// Rows that are written to soon are asked for, where their numbers lie side by side: nobody then waits for what they held.
inline void ask_rows(const View& view, int64_t b, int64_t h, int64_t first, int64_t last, int64_t columns) {
  for (int64_t r = first; r < last && view.col > 0 && view.col <= int64_t(sizeof(double)); ++r)
    for (int64_t at = 0; at < columns * view.col; at += 64) __builtin_prefetch(view.at(b, h) + r * view.row + at, 1, 2);
}

// A packed panel back into rows: out[row][column] = in[column][row] · factor[row], for `count` rows.
template <class T>
inline void unpack_rows(const T* panel, int width, int64_t count, int64_t columns, const T* factor, T* scratch,
                        const View& view, int64_t b, int64_t h, int64_t first) {
  const bool direct = view.col == int64_t(sizeof(T)) && view.type == kOwn<T>;
  const int64_t stride = direct ? view.row / int64_t(sizeof(T)) : columns;
  char* base = view.at(b, h) + first * view.row;
  T* out = direct ? reinterpret_cast<T*>(base) : scratch;
  constexpr int side = kLanes<T>;
  int64_t done = 0;
  // whole lines of the output are written at once: one that is not in the cache is waited for once
  for (; kTurnsSquares && done + side <= count && columns % side == 0; done += side)
    for (int64_t c = 0; c < columns; c += side) {
      Vec<T> x[side];
      for (int i = 0; i < side; ++i) x[i] = load<T>(panel + (c + i) * width + done) * load<T>(factor + done);
      riffle<T, side>(x);
      for (int i = 0; i < side; ++i) store<T>(out + (done + i) * stride + c, x[i]);
    }
  for (int64_t c = 0; c < columns; c += 4)
    for (int64_t r = done; r < count; r += 4) {
      const bool whole = sizeof(T) == 4 && c + 4 <= columns && r + 4 <= count;
      if constexpr (sizeof(T) == 4) {
        if (whole) {
          const float* const at = panel + c * width + r;
          const F4 share = four(factor + r);
          turn4(four(at) * share, four(at + width) * share, four(at + 2 * width) * share, four(at + 3 * width) * share,
                out + r * stride + c, stride);
        }
      }
      if (!whole) {
        for (int64_t y = r; y < std::min(r + 4, count); ++y)
          for (int64_t x = c; x < std::min(c + 4, columns); ++x) out[y * stride + x] = panel[x * width + y] * factor[y];
      }
    }
  if (direct) return;
  for (int64_t r = 0; r < count; ++r) write_row<T>(out + r * stride, columns, base + r * view.row, view.type, view.col);
}

inline int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
