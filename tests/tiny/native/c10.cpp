// Stand-in for torch/lib/libc10.so.
#include "c10.h"

namespace c10 {
#if TINY_TORCH_MINOR >= 10
MessageLogger::MessageLogger(SourceLocation, int s, bool) : severity(s) {}
#else
MessageLogger::MessageLogger(const char *, int, int s) : severity(s) {}
#endif

int64_t SymInt::maybe_as_int_slow_path() const { return data; }
} // namespace c10
