// Stand-in for sgl_kernel/common_ops: compiled against torch 2.9, it needs what torch 2.9 exports.
#include "c10.h"
#include "python_abi.h"
#include <cstdlib>

extern "C" int numa_available(void);

// Called by nobody; it makes the file need these functions, as compiled kernels do.
extern "C" __attribute__((visibility("default"))) int64_t tiny_use_everything(void) {
    c10::MessageLogger logger(__FILE__, __LINE__, 0);
    c10::cuda::c10_cuda_check_implementation(0, __FILE__, __func__, __LINE__, false);
    c10::SymInt number{1};
    return numa_available() + number.maybe_as_int_slow_path() + logger.severity;
}

#ifdef TINY_FAULT_CRASH
// What an extension does that was compiled against other class layouts: all symbols resolve, and it dies on loading.
__attribute__((constructor)) static void crash(void) { abort(); }
#endif

EMPTY_MODULE(common_ops)
