// One attention call as the kernels see it: views of the caller's arrays, a mask as a small tree, a bias, sizes.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stop.h"

namespace clearhead {

enum Type : int { kFloat32, kFloat64, kFloat16, kBFloat16, kBool };

// An array of (batch, head, row, column) in the caller's memory. Strides are in bytes and may be zero or negative; the
// batch axes are flattened, and `batch[b]` is the byte offset of batch row b.
struct View {
  char* data = nullptr;
  int type = kFloat32;
  std::vector<int64_t> batch;
  int64_t head = 0, row = 0, col = 0;

  explicit operator bool() const { return data != nullptr; }
  char* at(int64_t b, int64_t h) const { return data + batch[b] + h * head; }
};

// Whole numbers or truth values that a mask's node looks at: one row of them for all batch rows, or one for each.
struct Field {
  std::vector<int64_t> numbers;
  std::vector<uint8_t> flags;
  int64_t each = 0;                // entries of a batch row; 0: all rows share them
  std::vector<uint8_t> ascending;  // for each row of numbers: they never descend

  static Field of(std::vector<int64_t> numbers, int64_t each) {
    Field field{std::move(numbers), {}, each, {}};
    const int64_t all = int64_t(field.numbers.size()), length = each ? each : all;
    for (int64_t at = 0; at < all; at += length) {
      const auto row = field.numbers.begin() + at;
      field.ascending.push_back(std::is_sorted(row, row + length));
    }
    return field;
  }
  static Field of(std::vector<uint8_t> flags, int64_t each) { return {{}, std::move(flags), each, {}}; }

  int64_t number(int64_t b) const { return numbers[b * each]; }
  const int64_t* row(int64_t b) const { return numbers.data() + b * each; }
  const uint8_t* flag_row(int64_t b) const { return flags.data() + b * each; }
  bool ascends(int64_t b) const { return ascending.empty() || ascending[each ? b : 0]; }  // none descend without numbers
};

// One node of a mask, of a kind that `mask.h` knows. Leaves look at their fields or array, others at the nodes `left` and
// `right`, which come before them. The last node is the root.
struct MaskNode {
  int kind = 0;
  int left = -1, right = -1;
  int64_t constant = 0;
  std::vector<Field> fields;
  View array;
};

// What is added to the scores: an array, or a number for each head and distance query − key.
struct Bias {
  View array;
  std::vector<double> by_distance;  // (heads, length); entry query + offset − key + centre
  int64_t length = 0, centre = 0;
  std::vector<int64_t> offset;      // one for each batch row

  explicit operator bool() const { return array || length > 0; }
};

// One thing to observe of the weights, which observe.h knows by its name: the numbers that were asked for, and where its
// arrays lie, (batch, heads, …), with what is there where nobody attends to anything.
struct Asked {
  std::string name;
  std::vector<int64_t> numbers;
  std::vector<void*> arrays;
};

// What to observe beyond the output; null pointers are not wanted. All are (batch, heads, …), in the working precision.
struct Wanted {
  void* max_score = nullptr;  // (T)
  void* entropy = nullptr;    // (T)
  std::vector<Asked> of_weights;

  bool second_look() const { return !of_weights.empty(); }
};

// What a kernel found out about a call and can use again when the call comes again: by whom, since each has its own.
struct Kept {
  const void* by = nullptr;
  std::shared_ptr<const void> what;
};

struct Call {
  int64_t batch = 0, heads = 0, key_heads = 0, queries = 0, keys = 0, features = 0, width = 0;
  double scale = 1.0, softcap = 0.0;  // softcap 0: none
  bool wide = false;                  // work in double
  View q, k, v, out;
  std::vector<MaskNode> mask;
  Bias bias;
  std::vector<double> sinks;  // one for each head; empty: none
  void* lse = nullptr;        // (batch, heads, T); null: neither this nor the next two are wanted
  void* peak = nullptr;
  void* total = nullptr;
  Wanted wanted;
  bool panels = false;        // also few queries go by panels: a second look, or gradients, are to see the same scores
  bool known = false;         // peak and total are given, those of more keys than are here: it is only looked a second time
  bool reads_values = false;  // a second look that follows reads values, for which they lie in rows
  // backward only
  View dout, dq, dk, dv;
  void* dlse = nullptr;    // (batch, heads, T): the gradient of the log-sum-exp; null: none
  void* dsinks = nullptr;  // (batch, heads)

  mutable Kept kept;          // of its mask, which stays as it is
  mutable int64_t bytes = 0;  // the most memory that the call had of its own
  bool interruptible = false; // the thread that calls hears signals
  int team = 0;               // how many threads PyTorch's OpenMP has, whose team may do the work; 0: it may not
  std::atomic<bool> busy{false};  // it is running, where it is kept to be run again
  mutable Stop stop;

  void uses(int64_t now) const { bytes = now > bytes ? now : bytes; }
  int64_t group() const { return key_heads ? heads / key_heads : 0; }
  int64_t head_of(int64_t b, int64_t h) const { return b * heads + h; }
  int64_t row_of(int64_t b, int64_t h) const { return head_of(b, h) * queries; }
};

}  // namespace clearhead
