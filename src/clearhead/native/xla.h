// What XLA's foreign function interface hands to a function: the part of its C interface that we read, written out.
//
// A wheel that was built where there is no JAX must work where there is one, so XLA's own header is not needed here. The
// interface only ever grows at the end of its structures, each of which says its size; what is below has been the same
// from version 0.1 (jaxlib 0.5) to 0.3 (jaxlib 0.10). A test compiles xla.cpp beside that header, which compares them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "described.h"

namespace clearhead::xla {

constexpr int kMajor = 0, kOldestMinor = 1, kNewestMinor = 3;

struct Extension {
  size_t struct_size;
  int type;  // 1: metadata are asked for
  Extension* next;
};

struct Version {
  size_t struct_size;
  Extension* extensions;
  int major, minor;
};

struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct ErrorArguments {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int code;
};

struct Error;

struct StreamArguments {
  size_t struct_size;
  Extension* extensions;
  void* context;
  void* stream;  // what is asked for
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*error_create)(ErrorArguments*);
  const void *error_message, *error_destroy, *handler_register;
  Error* (*stream_get)(StreamArguments*);
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

// Arguments and results alike.
struct Buffers {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;  // 1: a buffer
  void** buffers;
};

struct Text {
  const char* letters;
  size_t length;
};

struct Scalar {
  int dtype;
  void* value;
};

struct Array {
  int dtype;
  size_t size;
  void* data;
};

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;  // 1: an array, 3: a scalar
  Text** names;
  void** values;
};

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  int stage;  // 3: to be executed
  Buffers arguments, results;
  Attributes attributes;
};

// The minor version that XLA is told, when it is handed the function below.
void tell_minor(int version);

// Attention, forward or backward, as a handler that JAX is told of.
Error* attend(CallFrame* frame);

// A handler that hands the call on, to whoever lends the arrays to kernels elsewhere: the number that the program was given
// for it, the stream that it runs on (null on a CPU), what is read and what is written. It throws what is to be said.
using Lender = void (*)(int64_t number, void* stream, const std::vector<Given>& given, const std::vector<Given>& results);
void tell_lender(Lender lender);
Error* lend(CallFrame* frame);

}  // namespace clearhead::xla
