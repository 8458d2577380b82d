// Calls of the compiled kernel, read from standard input and answered on standard output: how a kernel built for another
// machine is run under emulation. `emulated.py` writes what this reads; every array is dense and in order. With the name of an
// instruction set and `float` or `double` it prints that kernel's sizes instead, and ends with 5 where there is no such set.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cpu.h"
#include "kernel.h"

using namespace clearhead;

namespace {

template <class T> T take() {
  T value;
  if (std::fread(&value, sizeof(T), 1, stdin) != 1) std::exit(3);
  return value;
}

template <class T> std::vector<T> take_many() {
  std::vector<T> values(take<int64_t>());
  if (!values.empty() && std::fread(values.data(), sizeof(T), values.size(), stdin) != values.size()) std::exit(3);
  return values;
}

void give(const void* data, size_t bytes) {
  if (bytes && std::fwrite(data, 1, bytes, stdout) != bytes) std::exit(4);
}

int size_of(int type) { return type == kFloat64 ? 8 : type == kFloat32 ? 4 : type == kBool ? 1 : 2; }

// A dense array (batch, heads, rows, columns) and the view of it.
struct Held {
  std::vector<char> bytes;
  View view;
};

Held take_array() {
  Held held;
  const int type = int(take<int64_t>());
  const int64_t batch = take<int64_t>(), heads = take<int64_t>(), rows = take<int64_t>(), columns = take<int64_t>();
  held.bytes = take_many<char>();
  const int64_t col = size_of(type), row = columns * col, head = rows * row;
  if (held.bytes.empty()) held.bytes.resize(1);  // an address that is not null
  held.view = View{held.bytes.data(), type, {}, head, row, col};
  for (int64_t b = 0; b < batch; ++b) held.view.batch.push_back(b * heads * head);
  return held;
}

const Kernel* chosen(const std::string& name) {
#if defined(CLEARHEAD_TILES_BY_HAND)
  const Kernel* const only = CLEARHEAD_ISA::kernel();
  return name == only->name || name.empty() ? only : nullptr;
#else
#if defined(__aarch64__)
#if defined(CLEARHEAD_HAS_NEON_FP16)
  if (name == "neon_fp16" && Cpu::here().fp16) return neon_fp16::kernel();
#endif
#if defined(CLEARHEAD_HAS_NEON_BF16)
  if ((name == "neon_bf16" || name.empty()) && Cpu::here().bf16) return neon_bf16::kernel();
#endif
  if (name == "neon" || name.empty()) return neon::kernel();
#else
#if defined(CLEARHEAD_HAS_AVX512_BF16)
  if (name == "avx512_bf16" && Cpu::here().avx512_bf16) return avx512_bf16::kernel();
#endif
  if (name == "avx512" && Cpu::here().avx512) return avx512::kernel();
  if ((name == "avx2" || name.empty()) && Cpu::here().avx2) return avx2::kernel();
#endif
  return name == "portable" ? portable::kernel() : nullptr;
#endif
}

// One call; the number of bytes goes before them.
int answer() {
  const auto name_bytes = take_many<char>();
  const Kernel* kernel = chosen(std::string(name_bytes.begin(), name_bytes.end()));
  if (!kernel) return 5;
  Call call;
  const bool back = take<int64_t>();
  call.wide = take<int64_t>();
  call.panels = take<int64_t>();
  for (int64_t* size : {&call.batch, &call.heads, &call.key_heads, &call.queries, &call.keys, &call.features, &call.width})
    *size = take<int64_t>();
  call.scale = take<double>();
  call.softcap = take<double>();
  std::vector<Held> held(9);
  View* views[] = {&call.q, &call.k, &call.v, &call.out, &call.dout, &call.dq, &call.dk, &call.dv, &call.bias.array};
  for (int i = 0; i < 9; ++i)
    if (take<int64_t>()) {
      held[i] = take_array();
      *views[i] = held[i].view;
    }
  call.bias.by_distance = take_many<double>();
  call.bias.length = take<int64_t>();
  call.bias.centre = take<int64_t>();
  call.bias.offset = take_many<int64_t>();
  call.sinks = take_many<double>();

  const int64_t count = take<int64_t>();
  std::vector<MaskNode> nodes;
  std::vector<Held> mask_arrays(count);
  for (int64_t n = 0; n < count; ++n) {
    MaskNode node;
    node.kind = int(take<int64_t>());
    node.left = int(take<int64_t>());
    node.right = int(take<int64_t>());
    node.constant = take<int64_t>();
    for (int64_t fields = take<int64_t>(); fields > 0; --fields) {
      const int64_t each = take<int64_t>();
      auto numbers = take_many<int64_t>();
      auto flags = take_many<uint8_t>();
      node.fields.push_back(numbers.empty() ? Field::of(std::move(flags), each) : Field::of(std::move(numbers), each));
    }
    if (take<int64_t>()) {
      mask_arrays[n] = take_array();
      node.array = mask_arrays[n].view;
    }
    nodes.push_back(node);
  }
  call.mask = std::move(nodes);

  int64_t rooms = 7;
  for (int64_t left = take<int64_t>(); left > 0; --left) {
    const auto name = take_many<char>();
    Asked asked{std::string(name.begin(), name.end()), take_many<int64_t>(), {}};
    asked.arrays.resize(take<int64_t>());
    rooms += int64_t(asked.arrays.size());
    call.wanted.of_weights.push_back(std::move(asked));
  }
  // flat results, as they were before the call: lse, peak, total, dsinks, max_score, entropy; dlse, which is read only; and
  // the arrays of what is asked of the weights, in order
  std::vector<std::vector<char>> flat(rooms);
  std::vector<char> given;
  for (auto& room : flat) {
    room = take_many<char>();
    given.push_back(!room.empty());
    if (room.empty()) room.resize(8);
  }
  call.lse = flat[0].data(), call.peak = flat[1].data(), call.total = flat[2].data(), call.dsinks = flat[3].data();
  if (given[4]) call.wanted.max_score = flat[4].data(), call.wanted.entropy = flat[5].data();
  if (given[6]) call.dlse = flat[6].data();
  auto room = flat.begin() + 7;
  for (Asked& asked : call.wanted.of_weights)
    for (void*& array : asked.arrays) array = (room++)->data();

  (back ? kernel->backward : kernel->forward)(call, 2);
  std::vector<const std::vector<char>*> parts;
  for (int i : {3, 5, 6, 7}) parts.push_back(&held[i].bytes);
  for (const auto& room : flat) parts.push_back(&room);
  int64_t bytes = 0;
  for (const auto* part : parts) bytes += int64_t(part->size());
  give(&bytes, sizeof bytes);
  for (const auto* part : parts) give(part->data(), part->size());
  std::fflush(stdout);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count == 3) {
    const Kernel* kernel = chosen(words[1]);
    if (!kernel) return 5;
    for (const Size& size : kernel->sizes(words[2] == std::string("double")))
      std::printf("%s,%s,%lld\n", size.axis, size.name, static_cast<long long>(size.size));
    return 0;
  }
  for (int next; (next = std::getc(stdin)) != EOF;) {
    std::ungetc(next, stdin);
    if (const int failed = answer()) return failed;
  }
}
