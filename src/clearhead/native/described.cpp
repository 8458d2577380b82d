// Reading a described call: sizes, then options, the mask's nodes, and what is to be observed.
#include "described.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>

#include "cores.h"

namespace clearhead {
namespace {

std::atomic<int> most_threads{1};
std::atomic<bool> no_more_than_cores{false};

int64_t bytes_of(int type) {
  switch (type) {
    case kFloat64: case kInt64: return 8;
    case kFloat16: case kBFloat16: return 2;
    case kBool: return 1;
    default: return 4;
  }
}

[[noreturn]] void wrong(const char* what) { throw std::invalid_argument(std::string("a described call ") + what); }

// The numbers in order, and the arrays in order.
struct Reader {
  const int64_t* at;
  const int64_t* end;
  std::vector<Given> given, results;
  size_t next_given = 0, next_result = 0;

  int64_t number() {
    if (at == end) wrong("ends too early");
    return *at++;
  }
  int64_t count() {
    const int64_t n = number();
    if (n < 0 || n > end - at) wrong("counts more than it has");
    return n;
  }
  Given& array() {
    if (next_given == given.size()) wrong("lacks an array");
    return given[next_given++];
  }
  Given& result() {
    if (next_result == results.size()) wrong("lacks a result");
    return results[next_result++];
  }
};

// Where each batch row of an array begins, counted in its entries; `own` axes follow the batch axes.
std::vector<int64_t> starts(const Given& array, const std::vector<int64_t>& batch, size_t own) {
  if (array.dims.size() != batch.size() + own) wrong("has an array with other axes than were said");
  int64_t stride = 1;
  for (size_t axis = batch.size(); axis < array.dims.size(); ++axis) stride *= array.dims[axis];
  std::vector<int64_t> found{0};
  for (size_t axis = batch.size(); axis-- > 0;) {
    const int64_t here = array.dims[axis];
    if (here != 1 && here != batch[axis]) wrong("has an array for other batch rows than there are");
    std::vector<int64_t> all;
    all.reserve(found.size() * size_t(batch[axis]));
    for (int64_t n = 0; n < batch[axis]; ++n)
      for (const int64_t inner : found) all.push_back((here == 1 ? 0 : n * stride) + inner);
    found = std::move(all);
    stride *= here;
  }
  return found;
}

View view(const Given& array, const std::vector<int64_t>& batch) {
  View found;
  found.data = static_cast<char*>(array.data);
  found.type = array.type;
  found.batch = starts(array, batch, 3);
  const int64_t item = bytes_of(array.type);
  for (int64_t& start : found.batch) start *= item;
  const int64_t* const own = array.dims.data() + batch.size();
  found.col = own[2] == 1 ? 0 : item;
  found.row = own[1] == 1 ? 0 : own[2] * item;
  found.head = own[0] == 1 ? 0 : own[1] * own[2] * item;
  return found;
}

int64_t whole(const Given& array, int64_t n) {
  if (array.type == kInt32) return static_cast<const int32_t*>(array.data)[n];
  if (array.type == kInt64) return static_cast<const int64_t*>(array.data)[n];
  wrong("has an array of other than whole numbers");
}

double real(const Given& array, int64_t n) {
  if (array.type == kFloat32) return static_cast<const float*>(array.data)[n];
  if (array.type == kFloat64) return static_cast<const double*>(array.data)[n];
  wrong("has an array of other than real numbers");
}

std::vector<double> reals(const Given& array) {
  std::vector<double> found(size_t(array.size()));
  for (size_t n = 0; n < found.size(); ++n) found[n] = real(array, int64_t(n));
  return found;
}

// Numbers, or rows of `length` of them: one for all batch rows where the array has no more, else one for each.
template <class T, class Read>
std::vector<T> by_row(const Given& array, const std::vector<int64_t>& batch, size_t own, int64_t& each, Read read) {
  const int64_t length = own ? array.dims.back() : 1;
  std::vector<int64_t> from = starts(array, batch, own);
  const bool shared = std::all_of(array.dims.begin(), array.dims.begin() + int64_t(batch.size()), [](int64_t n) { return n == 1; });
  if (shared) from.assign(1, 0);
  each = shared ? 0 : length;
  std::vector<T> found;
  found.reserve(from.size() * size_t(length));
  for (const int64_t start : from)
    for (int64_t n = 0; n < length; ++n) found.push_back(read(array, start + n));
  return found;
}

enum FieldKind : int64_t { kNumber = 0, kNumbers = 1, kRows = 2, kTruths = 3 };

Field field(Reader& reader, const std::vector<int64_t>& batch) {
  const int64_t kind = reader.number();
  if (kind == kNumber) return Field{{reader.number()}, {}, 0, {1}};
  const Given& array = reader.array();
  int64_t each = 0;
  if (kind == kTruths) {
    if (array.type != kBool) wrong("has truth values of another type");
    auto flags = by_row<uint8_t>(array, batch, 1, each,
                                 [](const Given& a, int64_t n) { return static_cast<const uint8_t*>(a.data)[n]; });
    return Field::of(std::move(flags), each);
  }
  if (kind != kNumbers && kind != kRows) wrong("has a field of an unknown kind");
  auto numbers = by_row<int64_t>(array, batch, kind == kRows ? 1 : 0, each, whole);
  return Field::of(std::move(numbers), each);
}

MaskNode node(Reader& reader, const std::vector<int64_t>& batch, int64_t place) {
  MaskNode found;
  found.kind = int(reader.number());
  found.left = int(reader.number());
  found.right = int(reader.number());
  if (found.left >= place || found.right >= place) wrong("has a mask whose parts come after the whole");
  found.constant = reader.number();
  for (int64_t left = reader.count(); left > 0; --left) found.fields.push_back(field(reader, batch));
  if (reader.number()) found.array = view(reader.array(), batch);
  return found;
}

}  // namespace

void allow_threads(int count, bool by_cores) {
  most_threads = std::max(count, 1);
  no_more_than_cores = by_cores;
}

int allowed_threads() { return no_more_than_cores ? std::min<int>(most_threads, cores()) : most_threads.load(); }

Described::Described(const int64_t* numbers, int64_t count, double scale, double softcap, std::vector<Given> given,
                     std::vector<Given> results) {
  Reader reader{numbers, numbers + count, std::move(given), std::move(results)};
  back = reader.number() != 0;
  std::vector<int64_t> batch(size_t(reader.count()));
  call.batch = 1;
  for (int64_t& size : batch) call.batch *= size = reader.number();
  for (int64_t* size : {&call.heads, &call.key_heads, &call.queries, &call.keys, &call.features, &call.width})
    *size = reader.number();
  call.wide = reader.number() != 0, call.panels = reader.number() != 0;
  wanted = int(std::min<int64_t>(reader.number(), 1 << 20));
  call.softcap = softcap;
  call.q = view(reader.array(), batch), call.k = view(reader.array(), batch), call.v = view(reader.array(), batch);
  const bool with_lse = reader.number() != 0;
  call.scale = reader.number() ? real(reader.array(), 0) : scale;
  if (reader.number()) call.sinks = reals(reader.array());
  switch (reader.number()) {
    case 0: break;
    case 1: call.bias.array = view(reader.array(), batch); break;
    case 2: {
      call.bias.length = reader.number(), call.bias.centre = reader.number();
      call.bias.by_distance = reals(reader.array());
      int64_t each = 0;
      call.bias.offset = by_row<int64_t>(reader.array(), batch, 0, each, whole);
      if (!each) call.bias.offset.assign(size_t(call.batch), call.bias.offset[0]);
      break;
    }
    default: wrong("has a bias of an unknown kind");
  }
  const int64_t nodes = reader.count();
  for (int64_t n = 0; n < nodes; ++n) call.mask.push_back(node(reader, batch, n));
  const int64_t weighted = reader.number();  // which of what is asked for counts queries by a weight, from 1; 0: none
  void* const emphasis = weighted ? whole_rows(reader.array(), batch) : nullptr;

  if (back) {
    call.dout = view(reader.array(), batch), call.out = view(reader.array(), batch);
    call.peak = reader.array().data, call.total = reader.array().data;
    if (with_lse) call.dlse = reader.array().data;
    call.dq = view(reader.result(), batch), call.dk = view(reader.result(), batch), call.dv = view(reader.result(), batch);
    if (!call.sinks.empty()) call.dsinks = reader.result().data;
    return;
  }
  call.out = view(reader.result(), batch);
  call.lse = reader.result().data, call.peak = reader.result().data, call.total = reader.result().data;
  if (reader.number()) call.wanted.max_score = reader.result().data, call.wanted.entropy = reader.result().data;
  for (int64_t count = reader.count(), n = 1; n <= count; ++n) {
    Asked asked;
    for (int64_t letters = reader.count(); letters > 0; --letters) asked.name.push_back(char(reader.number()));
    for (int64_t more = reader.count(); more > 0; --more) asked.numbers.push_back(reader.number());
    bool empty = false;
    for (int64_t arrays = reader.count(); arrays > 0; --arrays) {
      const int64_t fill = reader.number();  // what is there where nobody attends to anything
      const Given& room = reader.result();
      const int64_t size = room.size();
      empty = empty || size == 0;
      if (room.type == kInt32) {
        narrowed_.push_back(std::make_unique<Narrowed>(Narrowed{std::vector<int64_t>(size_t(size), fill), static_cast<int32_t*>(room.data)}));
        asked.arrays.push_back(narrowed_.back()->wide.data());
        continue;
      }
      if (room.type == kInt64) std::fill_n(static_cast<int64_t*>(room.data), size, fill);
      else std::fill_n(static_cast<char*>(room.data), size * bytes_of(room.type), 0);
      asked.arrays.push_back(room.data);
    }
    if (n == weighted) asked.arrays.push_back(emphasis);
    if (!empty) call.wanted.of_weights.push_back(std::move(asked));
  }
}

// An array (*batch, heads, T) as it lies where all batch rows are there, else with each of them written out.
void* Described::whole_rows(const Given& array, const std::vector<int64_t>& batch) {
  const std::vector<int64_t> from = starts(array, batch, 2);
  const int64_t item = bytes_of(array.type), each = array.dims[batch.size()] * array.dims[batch.size() + 1];
  if (array.type != (call.wide ? kFloat64 : kFloat32) || each != call.heads * call.queries)
    wrong("has weights of queries of another type or size");
  if (array.size() == int64_t(from.size()) * each) return array.data;
  spread_.resize(from.size() * size_t(each * item));
  for (size_t row = 0; row < from.size(); ++row)
    std::copy_n(static_cast<const char*>(array.data) + from[row] * item, each * item, spread_.data() + int64_t(row) * each * item);
  return spread_.data();
}

void Described::finish() {
  for (const auto& one : narrowed_) std::copy(one->wide.begin(), one->wide.end(), one->into);
}

}  // namespace clearhead
