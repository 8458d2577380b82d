// The compiled kernel as a function that XLA calls: arrays and attributes of a program into a described call, and run.
#include "xla.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "described.h"
#include "kernel.h"

#if __has_include(<xla/ffi/api/c_api.h>)
#include <xla/ffi/api/c_api.h>

// What xla.h writes out is what XLA has.
namespace clearhead::xla {
#define SAME(ours, our_field, theirs, their_field) \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field), #theirs "." #their_field " lies elsewhere")
SAME(Extension, type, XLA_FFI_Extension_Base, type);
SAME(Extension, next, XLA_FFI_Extension_Base, next);
SAME(Version, major, XLA_FFI_Api_Version, major_version);
SAME(Version, minor, XLA_FFI_Api_Version, minor_version);
SAME(Metadata, version, XLA_FFI_Metadata, api_version);
SAME(Metadata, traits, XLA_FFI_Metadata, traits);
SAME(MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);
SAME(ErrorArguments, message, XLA_FFI_Error_Create_Args, message);
SAME(ErrorArguments, code, XLA_FFI_Error_Create_Args, errc);
SAME(Api, version, XLA_FFI_Api, api_version);
SAME(Api, error_create, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME(Api, stream_get, XLA_FFI_Api, XLA_FFI_Stream_Get);
SAME(StreamArguments, context, XLA_FFI_Stream_Get_Args, ctx);
SAME(StreamArguments, stream, XLA_FFI_Stream_Get_Args, stream);
SAME(Buffer, dtype, XLA_FFI_Buffer, dtype);
SAME(Buffer, data, XLA_FFI_Buffer, data);
SAME(Buffer, rank, XLA_FFI_Buffer, rank);
SAME(Buffer, dims, XLA_FFI_Buffer, dims);
SAME(Buffers, size, XLA_FFI_Args, size);
SAME(Buffers, types, XLA_FFI_Args, types);
SAME(Buffers, buffers, XLA_FFI_Args, args);
SAME(Buffers, buffers, XLA_FFI_Rets, rets);
SAME(Text, length, XLA_FFI_ByteSpan, len);
SAME(Scalar, value, XLA_FFI_Scalar, value);
SAME(Array, size, XLA_FFI_Array, size);
SAME(Array, data, XLA_FFI_Array, data);
SAME(Attributes, size, XLA_FFI_Attrs, size);
SAME(Attributes, types, XLA_FFI_Attrs, types);
SAME(Attributes, names, XLA_FFI_Attrs, names);
SAME(Attributes, values, XLA_FFI_Attrs, attrs);
SAME(CallFrame, api, XLA_FFI_CallFrame, api);
SAME(CallFrame, context, XLA_FFI_CallFrame, ctx);
SAME(CallFrame, stage, XLA_FFI_CallFrame, stage);
SAME(CallFrame, arguments, XLA_FFI_CallFrame, args);
SAME(CallFrame, results, XLA_FFI_CallFrame, rets);
SAME(CallFrame, attributes, XLA_FFI_CallFrame, attrs);
#undef SAME
static_assert(XLA_FFI_API_MAJOR == kMajor, "XLA's interface has another major version than xla.h was written for");
static_assert(XLA_FFI_Extension_Metadata == 1 && XLA_FFI_ExecutionStage_EXECUTE == 3 && XLA_FFI_ArgType_BUFFER == 1 &&
              XLA_FFI_RetType_BUFFER == 1 && XLA_FFI_AttrType_ARRAY == 1 && XLA_FFI_AttrType_SCALAR == 3);
static_assert(XLA_FFI_DataType_PRED == 1 && XLA_FFI_DataType_S32 == 4 && XLA_FFI_DataType_S64 == 5 && XLA_FFI_DataType_F16 == 10 &&
              XLA_FFI_DataType_F32 == 11 && XLA_FFI_DataType_F64 == 12 && XLA_FFI_DataType_BF16 == 16);
static_assert(XLA_FFI_Error_Code_INVALID_ARGUMENT == 3 && XLA_FFI_Error_Code_INTERNAL == 13);
}  // namespace clearhead::xla
#endif

namespace clearhead::xla {
namespace {

enum : int { kMetadataAsked = 1, kExecute = 3, kIsBuffer = 1, kIsArray = 1, kIsScalar = 3, kS64 = 5, kF64 = 12, kInvalid = 3, kInternal = 13 };

int type_of(int dtype) {
  switch (dtype) {
    case 1: return kBool;
    case 4: return kInt32;
    case kS64: return kInt64;
    case 10: return kFloat16;
    case 11: return kFloat32;
    case kF64: return kFloat64;
    case 16: return kBFloat16;
  }
  throw std::invalid_argument("attention is given an array of a type that it has no use for");
}

std::vector<Given> given(const Buffers& all) {
  std::vector<Given> found;
  for (int64_t n = 0; n < all.size; ++n) {
    const Buffer* const one = static_cast<const Buffer*>(all.buffers[n]);
    if (all.types[n] != kIsBuffer || one->struct_size < sizeof(Buffer)) throw std::invalid_argument("attention is given what is no array");
    found.push_back({one->data, type_of(one->dtype), std::vector<int64_t>(one->dims, one->dims + one->rank)});
  }
  return found;
}

void* attribute(const Attributes& all, const std::string& name, int type) {
  for (int64_t n = 0; n < all.size; ++n)
    if (all.types[n] == type && name == std::string(all.names[n]->letters, all.names[n]->length)) return all.values[n];
  throw std::invalid_argument("attention lacks the attribute " + name);
}

double real(const Attributes& all, const std::string& name) {
  const Scalar* const one = static_cast<const Scalar*>(attribute(all, name, kIsScalar));
  if (one->dtype != kF64) throw std::invalid_argument("the attribute " + name + " is no float64");
  return *static_cast<const double*>(one->value);
}

void run(const CallFrame& frame) {
  const Array* const numbers = static_cast<const Array*>(attribute(frame.attributes, "numbers", kIsArray));
  if (numbers->dtype != kS64) throw std::invalid_argument("the attribute numbers is not of int64");
  Described described(static_cast<const int64_t*>(numbers->data), int64_t(numbers->size), real(frame.attributes, "scale"),
                      real(frame.attributes, "softcap"), given(frame.arguments), given(frame.results));
  const Kernel* const kernel = named("");
  (described.back ? kernel->backward : kernel->forward)(described.call, std::min(described.wanted, allowed_threads()));
  described.finish();
}

Error* error(const Api* api, int code, const char* message) {
  ErrorArguments arguments{sizeof(ErrorArguments), nullptr, message, code};
  return api->error_create(&arguments);
}

// What is read is the same in all versions from the oldest to the newest: which of them is told is for XLA to be content with.
std::atomic<int> minor{kNewestMinor};

// XLA asks for the version that a function was written for, once, before it takes it.
void tell(MetadataExtension* asked) {
  Version& told = asked->metadata->version;
  told.struct_size = sizeof(Version);
  told.extensions = nullptr;
  told.major = kMajor;
  told.minor = minor;
  asked->metadata->traits = 0;
}

std::atomic<Lender> lender{nullptr};

int64_t whole(const Attributes& all, const std::string& name) {
  const Scalar* const one = static_cast<const Scalar*>(attribute(all, name, kIsScalar));
  if (one->dtype != kS64) throw std::invalid_argument("the attribute " + name + " is no int64");
  return *static_cast<const int64_t*>(one->value);
}

void hand_on(const CallFrame& frame) {
  StreamArguments asked{sizeof(StreamArguments), nullptr, frame.context, nullptr};
  // whatever XLA says of a stream that is not to be had is a leak of a few bytes in a call that fails
  if (whole(frame.attributes, "on_stream") && frame.api->stream_get(&asked))
    throw std::runtime_error("XLA does not say which stream it runs on");
  lender.load()(whole(frame.attributes, "number"), asked.stream, given(frame.arguments), given(frame.results));
}

// What every handler answers to XLA, around what it does.
Error* handled(CallFrame* frame, void (*act)(const CallFrame&)) {
  if (frame->extensions && frame->extensions->type == kMetadataAsked) {
    tell(reinterpret_cast<MetadataExtension*>(frame->extensions));
    return nullptr;
  }
  if (frame->stage != kExecute) return nullptr;
  if (frame->struct_size < sizeof(CallFrame)) return error(frame->api, kInvalid, "XLA's call frame is older than attention knows");
  try {
    act(*frame);
  } catch (const std::invalid_argument& wrong) {
    return error(frame->api, kInvalid, wrong.what());
  } catch (const std::exception& failed) {
    return error(frame->api, kInternal, failed.what());
  }
  return nullptr;
}

}  // namespace

void tell_minor(int version) { minor = version; }

void tell_lender(Lender one) { lender = one; }

Error* attend(CallFrame* frame) { return handled(frame, run); }

Error* lend(CallFrame* frame) { return handled(frame, hand_on); }

}  // namespace clearhead::xla
