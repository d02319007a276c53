// The declarations that an extension is compiled against. TINY_TORCH_MINOR picks the signatures of that torch release:
// names and argument types are those of torch's own headers c10/util/Logging.h, c10/core/SymInt.h and
// c10/cuda/CUDAException.h.
#pragma once
#include <cstdint>

#ifndef TINY_TORCH_MINOR
#define TINY_TORCH_MINOR 9
#endif

namespace c10 {
struct SourceLocation {
    const char *function;
    const char *file;
    uint32_t line;
};

class MessageLogger {
  public:
#if TINY_TORCH_MINOR >= 10
    MessageLogger(SourceLocation source_location, int severity, bool exit_on_fatal);
#else
    MessageLogger(const char *file, int line, int severity);
#endif
    int severity;
};

class SymInt {
  public:
    int64_t maybe_as_int_slow_path() const;
    int64_t data;
};

namespace cuda {
#if TINY_TORCH_MINOR >= 10
using line_number = uint32_t;
#else
using line_number = int;
#endif
void c10_cuda_check_implementation(const int32_t err, const char *filename, const char *function_name,
                                   const line_number line, const bool include_device_assertions);
} // namespace cuda
} // namespace c10
