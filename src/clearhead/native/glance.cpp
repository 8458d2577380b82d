// Tensors are asked by the table of functions that DLPack 1.3 has for it; what else there is to ask PyTorch, by its own functions.
#include "glance.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cores.h"
#include "fork.h"

namespace nb = nanobind;

namespace clearhead {
namespace {

constexpr int32_t kOnCpu = 1, kMostAxes = 6;
constexpr size_t kMostKinds = 512, kFewKinds = 64;  // that are known; the same of masks with arrays, which may be others in every call
constexpr uint64_t kFnvStart = 0xcbf29ce484222325, kFnvFactor = 0x100000001b3;

// What a library gives in `__dlpack_c_exchange_api__`, as DLPack 1.x lays it out; it says 0 where it has looked.
struct Exchange {
  uint32_t major, minor;
  void* before;
  void* others[3];
  int (*look)(void* object, nb::dlpack::dltensor* found);
};

// PyTorch, as it was met.
struct Met {
  const Exchange* exchange;
  nb::object tensor;                             // the class
  nb::object autocasts, modes, transforms, overridden;  // each says whether a call is heard of by somebody else
  nb::object forward_mode;                       // the module that counts derivatives forward
  nb::object learns, threads, empty_like;
};

// What a call depends on, but for its numbers: sizes, strides and types, the mask that was given, the scale.
struct Kind {
  int64_t numbers[3 * (2 + 2 * kMostAxes) + 3];
  int count = 0;

  void add(int64_t number) { numbers[count++] = number; }
  bool operator==(const Kind& other) const {
    return count == other.count && !std::memcmp(numbers, other.numbers, count * sizeof(int64_t));
  }
};

struct KindHash {
  size_t operator()(const Kind& kind) const {
    uint64_t found = kFnvStart;
    for (int n = 0; n < kind.count; ++n) found = (found ^ uint64_t(kind.numbers[n])) * kFnvFactor, found ^= found >> 29;
    return size_t(found);
  }
};

// An array of a mask as it was: who likes can write to it, or give it another shape.
class Numbers {
 public:
  explicit Numbers(nb::object array) : array_(std::move(array)) {
    const Lent now(array_);
    if (!now) nb::raise_python_error();
    format_ = now->format, shape_.assign(now->shape, now->shape + now->ndim);
    bytes_.assign(now.begin(), now.begin() + now->len);
  }

  bool same() const {
    const Lent now(array_);
    if (!now) PyErr_Clear();
    return now && now->format == format_ && size_t(now->ndim) == shape_.size() &&
           std::equal(shape_.begin(), shape_.end(), now->shape) && size_t(now->len) == bytes_.size() &&
           !std::memcmp(now.begin(), bytes_.data(), bytes_.size());
  }

 private:
  // Its memory, for as long as one looks.
  class Lent {
   public:
    explicit Lent(nb::handle array) : has_(!PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) {}
    ~Lent() {
      if (has_) PyBuffer_Release(&buffer_);
    }
    Lent(const Lent&) = delete;
    explicit operator bool() const { return has_; }
    const Py_buffer* operator->() const { return &buffer_; }
    const char* begin() const { return static_cast<const char*>(buffer_.buf); }

   private:
    Py_buffer buffer_;
    const bool has_;
  };

  nb::object array_;
  std::string format_;
  std::vector<Py_ssize_t> shape_;
  std::vector<char> bytes_;
};

struct Known {
  nb::object owner, mask, shape;  // held on to: of the call, of who is told apart by its address, of the output
  Call* call;
  int wanted;  // threads
  bool longer, like;  // somebody may want to interrupt it; the output lies as q does
  std::vector<Numbers> arrays;  // of the mask

  bool same() const { return std::all_of(arrays.begin(), arrays.end(), [](const Numbers& one) { return one.same(); }); }
};

using Kinds = std::unordered_map<Kind, std::shared_ptr<const Known>, KindHash>;

// How many threads a call may have while the surroundings are these, as Python found out.
struct Crew {
  uint64_t surroundings = 0;
  int named = 0, own = 0;
  unsigned long main = 0;  // the thread in which Python runs the handlers of signals
  bool team = false;
};

struct State {
  std::mutex lock;  // of what follows
  std::shared_ptr<const Met> met;
  Kinds known, with_arrays;
  Crew crew;
};

// Never destroyed: what it holds is Python's.
State* const state = new State;

// Also where there is no answer: what cannot be asked is unusual.
bool truly(nb::handle object) {
  if (object.is(Py_False)) return false;
  const int found = object.is_valid() ? PyObject_IsTrue(object.ptr()) : -1;
  if (found < 0) PyErr_Clear();
  return found != 0;
}

// Adds a tensor's sizes, strides and type; where it lies, or nothing where it is not plainly in memory.
void* look(const Met& met, nb::handle tensor, Kind* kind) {
  nb::dlpack::dltensor one;
  if (met.exchange->look(tensor.ptr(), &one)) {
    PyErr_Clear();
    return nullptr;
  }
  if (one.device.device_type != kOnCpu || one.ndim > kMostAxes || !one.data || !one.strides) return nullptr;
  if (kind) {
    kind->add(one.ndim);
    kind->add(one.dtype.code | one.dtype.bits << 8 | one.dtype.lanes << 16);
    for (int n = 0; n < one.ndim; ++n) kind->add(one.shape[n]), kind->add(one.strides[n]);
  }
  return static_cast<char*>(one.data) + one.byte_offset;
}

bool add_options(nb::handle mask, nb::handle scale, Kind& kind) {
  kind.add(int64_t(reinterpret_cast<intptr_t>(mask.ptr())));
  if (!scale.is_none() && !PyFloat_CheckExact(scale.ptr())) return false;
  const double number = scale.is_none() ? 0.0 : PyFloat_AsDouble(scale.ptr());
  int64_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  kind.add(scale.is_none()), kind.add(bits);
  return true;
}

// Is it a call that nobody else hears of, and that wants no gradients, on tensors whose memory holds what they are?
bool usual(const Met& met, nb::handle q, nb::handle k, nb::handle v) {
  static const nb::object level = nb::steal(PyUnicode_InternFromString("_current_level"));
  static const nb::object is_neg = nb::steal(PyUnicode_InternFromString("is_neg"));
  static const nb::object wants = nb::steal(PyUnicode_InternFromString("requires_grad"));
  if (truly(met.autocasts()) || truly(met.modes()) || truly(met.transforms()) || truly(met.overridden(q, k, v))) return false;
  if (nb::cast<int64_t>(met.forward_mode.attr(level)) >= 0) return false;
  bool learns = false;
  for (const nb::handle tensor : {q, k, v}) {
    if (truly(nb::steal(PyObject_CallMethodObjArgs(tensor.ptr(), is_neg.ptr(), nullptr)))) return false;
    learns |= truly(tensor.attr(wants));
  }
  return !learns || !truly(met.learns());
}

// The output, of a kind of call that was remembered; None for any other, and while another thread has that call.
nb::object attend(nb::handle q, nb::handle k, nb::handle v, nb::handle mask, nb::handle scale) {
  State& all = *state;
  std::shared_ptr<const Met> met;
  {
    const std::lock_guard<std::mutex> held(all.lock);
    met = all.met;
  }
  if (!met) return nb::none();
  for (const nb::handle tensor : {q, k, v})
    if (!tensor.type().is(met->tensor)) return nb::none();
  Kind kind;
  void* places[3] = {};
  for (int n = 0; n < 3; ++n)
    if (!(places[n] = look(*met, n == 0 ? q : n == 1 ? k : v, &kind))) return nb::none();
  if (!add_options(mask, scale, kind)) return nb::none();
  std::shared_ptr<const Known> known;
  Crew crew;
  {
    const std::lock_guard<std::mutex> held(all.lock);
    for (const Kinds* const kinds : {&all.known, &all.with_arrays})
      if (const auto found = kinds->find(kind); !known && found != kinds->end()) known = found->second;
    crew = all.crew;
  }
  if (!known || !usual(*met, q, k, v) || !known->same()) return nb::none();
  bool main = false;
  int threads = 1, team = 0;
  if (known->wanted > 1 || known->longer) {
    if (crew.surroundings != surroundings()) return nb::none();
    main = PyThread_get_thread_ident() == crew.main;
    const int theirs = nb::cast<int>(met->threads());
    threads = std::min(crew.named ? crew.named : std::min(crew.own, theirs), std::max(known->wanted, 1));
    team = main && crew.team ? theirs : 0;
  }
  nb::object output = known->like ? met->empty_like(q) : nb::object(q.attr("new_empty")(known->shape));
  void* const out = look(*met, output, nullptr);
  if (!out || !run_again(*known->call, places[0], places[1], places[2], out, threads, team, main && known->longer)) return nb::none();
  return output;
}

// Keep a call that has run for the next one of its kind; a mask is known by its address, and never changes but for its arrays.
void remember(nb::handle q, nb::handle k, nb::handle v, nb::object mask, nb::handle scale, nb::object call, int wanted, bool longer,
              nb::object shape, bool like, nb::list arrays) {
  State& all = *state;
  Kinds gone;  // let go of without the lock
  std::shared_ptr<const Met> met;
  {
    const std::lock_guard<std::mutex> held(all.lock);
    met = all.met;
  }
  Kind kind;
  if (!met || !look(*met, q, &kind) || !look(*met, k, &kind) || !look(*met, v, &kind) || !add_options(mask, scale, kind)) return;
  Known one{call, mask, shape, nb::cast<Call*>(call), wanted, longer, like, {}};
  for (const nb::handle array : arrays) one.arrays.emplace_back(nb::borrow(array));
  Kinds& kinds = one.arrays.empty() ? all.known : all.with_arrays;
  const size_t most = one.arrays.empty() ? kMostKinds : kFewKinds;
  std::shared_ptr<const Known> made = std::make_shared<const Known>(std::move(one));
  const std::lock_guard<std::mutex> held(all.lock);
  if (kinds.size() >= most) gone.swap(kinds);
  kinds[kind].swap(made);
}

void meet(nb::object tensor, nb::capsule exchange, nb::object autocasts, nb::object modes, nb::object transforms,
          nb::object overridden, nb::object forward_mode, nb::object learns, nb::object threads, nb::object empty_like) {
  const auto* const table = static_cast<const Exchange*>(exchange.data("dlpack_exchange_api"));
  if (table->major != 1 || !table->look) return;
  auto met = std::make_shared<const Met>(Met{table, tensor, autocasts, modes, transforms, overridden, forward_mode, learns, threads,
                                             empty_like});
  const std::lock_guard<std::mutex> held(state->lock);
  state->met.swap(met);
}

void tell_crew(uint64_t surroundings, int named, int own, unsigned long main, bool team) {
  const std::lock_guard<std::mutex> held(state->lock);
  state->crew = {surroundings, named, own, main, team};
}

}  // namespace

uint64_t surroundings() {
  uint64_t found = kFnvStart;
  const auto add = [&](const char* text) {
    const char* at = text ? text : "\1";
    do found = (found ^ uint8_t(*at)) * kFnvFactor;
    while (*at++);
  };
  add(std::getenv("CLEARHEAD_THREADS"));
  add(std::getenv("OMP_NUM_THREADS"));
  return (found ^ uint64_t(cores())) * kFnvFactor | 1;  // never 0
}

void add_glance(nb::module_& m) {
  around_forks([] { state->lock.lock(); }, [] { state->lock.unlock(); },
               [] {  // whose first thread may be another one
                 state->crew = {};
                 state->lock.unlock();
               });
  m.def("surroundings", surroundings);
  m.def("meet", meet);
  m.def("tell_crew", tell_crew);
  const auto any = nb::arg().none();
  m.def("remember", remember, any, any, any, any, any, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
  m.def("attend", attend, any, any, any, any, any);
}

}  // namespace clearhead
