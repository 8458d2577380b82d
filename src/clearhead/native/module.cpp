// The door to Python: a Call is filled in field by field, then run without the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#if defined(CLEARHEAD_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <tuple>

#include "cpu.h"
#include "described.h"
#include "fork.h"
#include "glance.h"
#include "kernel.h"
#include "pages.h"
#include "pool.h"
#include "xla.h"

namespace nb = nanobind;
using namespace clearhead;

namespace {

template <class T> using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;

template <class T> std::vector<T> copied(const Array<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

View view(uintptr_t address, int type, Array<int64_t> batch, int64_t head, int64_t row, int64_t col) {
  return View{static_cast<char*>(pointer(address)), type, copied(batch), head, row, col};
}

#if defined(CLEARHEAD_HAS_AMX)
// True where the CPU has AMX for bfloat16 and Linux lets this process use it, which it must be asked for once.
bool has_amx() {
  constexpr long ask = 0x1023, tiles = 18;  // ARCH_REQ_XCOMP_PERM, the state that tiles are
  static const bool granted = Cpu::here().amx && syscall(SYS_arch_prctl, ask, tiles) == 0;
  return granted;
}
#endif

const Kernel* chosen(const std::string& name) {
  std::vector<const Kernel*> able;
#if defined(CLEARHEAD_HAS_NEON_BF16)
  if (Cpu::here().bf16) able.push_back(neon_bf16::kernel());
#endif
#if defined(CLEARHEAD_HAS_NEON_FP16)
  if (Cpu::here().fp16) able.push_back(neon_fp16::kernel());
#endif
#if defined(CLEARHEAD_HAS_NEON)
  able.push_back(neon::kernel());
#endif
#if defined(CLEARHEAD_HAS_X86)
  if (Cpu::here().avx512) {
#if defined(CLEARHEAD_HAS_AMX)
    if (has_amx()) able.push_back(amx::kernel());
#endif
#if defined(CLEARHEAD_HAS_AVX512_BF16)
    if (Cpu::here().avx512_bf16) able.push_back(avx512_bf16::kernel());
#endif
    able.push_back(avx512::kernel());
  }
  if (Cpu::here().avx2) able.push_back(avx2::kernel());
#endif
  able.push_back(portable::kernel());
#if defined(CLEARHEAD_HAS_TILES_BY_HAND)
  able.push_back(amx::kernel());
#endif
  if (name.empty()) return able.front();
  for (const Kernel* kernel : able)
    if (name == kernel->name) return kernel;
  return nullptr;
}

template <auto Field> void set_pointer(nb::class_<Call>& call, const char* name) {
  call.def_prop_rw(
      name, [](const Call& c) { return reinterpret_cast<uintptr_t>(c.*Field); },
      [](Call& c, uintptr_t address) { c.*Field = static_cast<std::decay_t<decltype(c.*Field)>>(pointer(address)); });
}

}  // namespace

const Kernel* clearhead::named(const std::string& isa) {
  static const Kernel* const first = chosen("");
  const Kernel* kernel = isa.empty() ? first : chosen(isa);
  if (!kernel) throw std::invalid_argument("this machine does not have the instruction set " + isa);
  return kernel;
}

namespace {

// {axis: {name: size}}: everything at whose border something happens.
nb::dict sizes(const std::string& isa, bool wide) {
  nb::dict found;
  for (const Size& size : named(isa)->sizes(wide)) {
    if (!found.contains(size.axis)) found[size.axis] = nb::dict();
    nb::cast<nb::dict>(found[size.axis])[size.name] = size.size;
  }
  return found;
}

// Counts and tiles, as the bytes of 32-bit numbers, and whether each query is certain to see something; of a call that has sizes and
// a mask.
nb::tuple tile_lists(const Call& call, int64_t batch, int64_t heads, int64_t rows, int64_t columns, bool turned, int threads) {
  const TileLists found = named("")->tile_lists(call, {batch, heads, rows, columns, turned}, threads);
  const auto bytes = [](const std::vector<int32_t>& numbers) { return nb::bytes(numbers.data(), numbers.size() * 4); };
  return nb::make_tuple(bytes(found.counts), bytes(found.tiles), found.certain);
}

// While the interpreter ends, it ends the threads that ask for its lock, in the middle of C++, which no program survives. So
// from `end` on, which it calls before, threads other than its main one do not come back; those on their way have arrived when
// `end` returns. Since 3.14 the interpreter itself lets them sleep.
std::atomic<bool> ending{false};
std::atomic<int> arriving{0};

void end() {
  ending = true;
  nb::gil_scoped_release released;
  while (arriving > 0) std::this_thread::yield();
}

// The interpreter's lock is given up here and had again afterwards.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released() {
    ++arriving;
    if (ending && std::this_thread::get_id() != main_) {
      --arriving;
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
    PyEval_RestoreThread(state_);
    --arriving;
  }

 private:
  PyThreadState* state_;
  static inline const std::thread::id main_ = std::this_thread::get_id();  // which imports this, most likely
};

void run(const Call& call, const std::string& isa, int threads, bool back) {
  const Kernel* kernel = named(isa);
  const auto interrupted = [] {
    nb::gil_scoped_acquire held;
    return PyErr_CheckSignals() != 0;
  };
  bool stopped;
  {
    const Released released;
    if (call.interruptible) call.stop.listen(interrupted);
    ask_for_large_pages(call, back);
    try {
      (back ? kernel->backward : kernel->forward)(call, threads);
    } catch (const Stopped&) {
    }
    stopped = call.stop.stopped();
  }
  if (stopped) throw nb::python_error();  // what the signal's handler raised
}

// Where an array's numbers lie, by the buffer protocol: of NumPy arrays, for which asking in Python takes longer.
void* address(nb::handle array) {
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_STRIDED_RO)) throw nb::python_error();
  void* at = view.buf;
  PyBuffer_Release(&view);
  return at;
}

// A described call on arrays whose addresses, types and sizes are said; see described.h.
using Place = std::tuple<uintptr_t, int, std::vector<int64_t>>;

void run_described(Array<int64_t> numbers, double scale, double softcap, const std::vector<Place>& given,
                   const std::vector<Place>& results, int threads, bool interruptible) {
  const auto arrays = [](const std::vector<Place>& places) {
    std::vector<Given> found;
    for (const auto& [address, type, dims] : places) found.push_back({pointer(address), type, dims});
    return found;
  };
  Described described(numbers.data(), int64_t(numbers.size()), scale, softcap, arrays(given), arrays(results));
  described.call.interruptible = interruptible;
  run(described.call, "", std::min(described.wanted, threads), described.back);
  described.finish();
}

// Who in Python lends arrays of XLA's programs to other kernels; kept for good, since programs may outlive whatever holds it.
PyObject* lends = nullptr;

void lend(int64_t number, void* stream, const std::vector<Given>& given, const std::vector<Given>& results) {
  if (ending) throw std::runtime_error("the interpreter is ending");
  const nb::gil_scoped_acquire held;
  const auto places = [](const std::vector<Given>& arrays) {
    std::vector<Place> found;
    for (const Given& one : arrays) found.emplace_back(reinterpret_cast<uintptr_t>(one.data), one.type, one.dims);
    return found;
  };
  try {
    const nb::handle call{lends};
    call(number, reinterpret_cast<uintptr_t>(stream), places(given), places(results));
  } catch (nb::python_error& raised) {
    throw std::runtime_error(raised.what());  // while the lock is held, with which it is let go
  }
}

}  // namespace

// A call that was kept runs again, where nobody else has it: `tell` says where its arrays lie now.
template <class Tell> static bool again(Call& call, int threads, int team, bool interruptible, Tell tell) {
  if (call.busy.exchange(true)) return false;
  call.team = team, call.interruptible = interruptible;
  tell();
  call.stop.reset();
  try {
    run(call, "", threads, false);
  } catch (...) {
    call.busy = false;
    throw;
  }
  call.busy = false;
  return true;
}

bool clearhead::run_again(Call& call, void* q, void* k, void* v, void* out, int threads, int team, bool interruptible) {
  return again(call, threads, team, interruptible, [&] {
    void* const places[] = {q, k, v, out};
    View* const views[] = {&call.q, &call.k, &call.v, &call.out};
    for (int n = 0; n < 4; ++n) views[n]->data = static_cast<char*>(places[n]);
  });
}

// The same of an observed call. Its arrays: q, k, v, output; log-sum-exp, peak, total, largest score, entropy; and what was asked
// for of the weights, in the order in which it was.
static bool observe_again(Call& call, const std::vector<uintptr_t>& places, int threads, int team, bool interruptible) {
  size_t count = 9;
  for (const Asked& one : call.wanted.of_weights) count += one.arrays.size();
  if (places.size() != count) throw std::invalid_argument("an observed call has another number of arrays");
  return again(call, threads, team, interruptible, [&] {
    View* const views[] = {&call.q, &call.k, &call.v, &call.out};
    void** const rows[] = {&call.lse, &call.peak, &call.total, &call.wanted.max_score, &call.wanted.entropy};
    auto place = places.begin();
    for (View* view : views) view->data = static_cast<char*>(pointer(*place++));
    for (void** row : rows) *row = pointer(*place++);
    for (Asked& one : call.wanted.of_weights)
      for (void*& array : one.arrays) array = pointer(*place++);
  });
}

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // prepared calls, and those of threads that the end of the process meets at work
  // Now, and not at the first call: a fork in the middle of it would leave the child waiting for a thread that it has not.
  prepare_pool();
  named("");
  in_children([] { arriving = 0; });
  m.doc() = "The compiled kernel: see clearhead.kernels.compiled.";

  nb::class_<View>(m, "View")
      .def("__init__", [](View* self, uintptr_t address, int type, Array<int64_t> batch, int64_t head, int64_t row,
                          int64_t col) { new (self) View(view(address, type, batch, head, row, col)); });

  nb::class_<MaskNode>(m, "MaskNode")
      .def("__init__", [](MaskNode* self, int kind, int left, int right, int64_t constant) {
        new (self) MaskNode{kind, left, right, constant, {}, {}};
      })
      .def_rw("array", &MaskNode::array)
      .def("add_number", [](MaskNode& n, int64_t number) { n.fields.push_back(Field{{number}, {}, 0, {1}}); })
      .def("add_numbers",
           [](MaskNode& n, Array<int64_t> a, int64_t each) { n.fields.push_back(Field::of(copied(a), each)); })
      .def("add_flags", [](MaskNode& n, Array<uint8_t> a, int64_t each) { n.fields.push_back(Field::of(copied(a), each)); });

  nb::class_<Call> call(m, "Call");
  call.def(nb::init<>())
      .def("set_sizes",
           [](Call& c, int64_t batch, int64_t heads, int64_t key_heads, int64_t queries, int64_t keys, int64_t features,
              int64_t width) {
             c.batch = batch, c.heads = heads, c.key_heads = key_heads;
             c.queries = queries, c.keys = keys, c.features = features, c.width = width;
           })
      .def_ro("bytes", &Call::bytes)
      .def_rw("scale", &Call::scale)
      .def_rw("softcap", &Call::softcap)
      .def_rw("wide", &Call::wide)
      .def_rw("panels", &Call::panels)
      .def_rw("known", &Call::known)
      .def_rw("reads_values", &Call::reads_values)
      .def_rw("interruptible", &Call::interruptible)
      .def_rw("team", &Call::team)
      .def_rw("q", &Call::q)
      .def_rw("k", &Call::k)
      .def_rw("v", &Call::v)
      .def_rw("out", &Call::out)
      .def_rw("dout", &Call::dout)
      .def_rw("dq", &Call::dq)
      .def_rw("dk", &Call::dk)
      .def_rw("dv", &Call::dv)
      .def("set_mask", [](Call& c, std::vector<MaskNode> nodes) { c.mask = std::move(nodes); })
      .def("set_bias_array", [](Call& c, const View& array) { c.bias.array = array; })
      .def("set_bias_by_distance",
           [](Call& c, Array<double> table, int64_t length, int64_t centre, Array<int64_t> offset) {
             c.bias.by_distance = copied(table), c.bias.offset = copied(offset);
             c.bias.length = length, c.bias.centre = centre;
           })
      .def("set_sinks", [](Call& c, Array<double> sinks) { c.sinks = copied(sinks); })
      .def("want_rows", [](Call& c, uintptr_t largest, uintptr_t entropy) {
        c.wanted.max_score = pointer(largest), c.wanted.entropy = pointer(entropy);
      })
      .def("want", [](Call& c, std::string name, std::vector<int64_t> numbers, const std::vector<uintptr_t>& arrays) {
        Asked asked{std::move(name), std::move(numbers), {}};
        for (const uintptr_t address : arrays) asked.arrays.push_back(pointer(address));
        c.wanted.of_weights.push_back(std::move(asked));
      })
      .def("again", [](Call& c, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, int threads, int team, bool interruptible) {
        return run_again(c, pointer(q), pointer(k), pointer(v), pointer(out), threads, team, interruptible);
      })
      .def("again_on", [](Call& c, nb::handle q, nb::handle k, nb::handle v, nb::handle out, int threads, int team, bool interruptible) {
        return run_again(c, address(q), address(k), address(v), address(out), threads, team, interruptible);
      })
      .def("observe_again", observe_again)
      .def("tile_lists", tile_lists)
      .def("forward", [](const Call& c, const std::string& isa, int threads) { run(c, isa, threads, false); })
      .def("backward", [](const Call& c, const std::string& isa, int threads) { run(c, isa, threads, true); });
  set_pointer<&Call::lse>(call, "lse");
  set_pointer<&Call::peak>(call, "peak");
  set_pointer<&Call::total>(call, "total");
  set_pointer<&Call::dlse>(call, "dlse");
  set_pointer<&Call::dsinks>(call, "dsinks");

  add_glance(m);
  m.def("instruction_set", [] { return std::string(chosen("")->name); });
  m.def("set_team", [](uintptr_t parallel, uintptr_t number) { set_team(pointer(parallel), pointer(number)); });
  m.def("end", end);
  m.def("run_described", run_described);
  m.def("allow_threads", allow_threads);
  m.def("allowed_threads", allowed_threads);
  m.def("xla_minors", [] { return std::make_tuple(xla::kOldestMinor, xla::kNewestMinor); });
  m.def("xla_handler", [](int minor) {
    xla::tell_minor(minor);
    return nb::capsule(reinterpret_cast<void*>(xla::attend));
  });
  m.def("xla_lender", [](int minor, nb::object called) {
    xla::tell_minor(minor);
    lends = called.release().ptr();
    xla::tell_lender(lend);
    return nb::capsule(reinterpret_cast<void*>(xla::lend));
  });
  m.def("sizes", sizes);
  m.def("observes", [] { return chosen("")->observes(); });
  m.def("has", [](const std::string& name) { return chosen(name) != nullptr; });
}
