/*
 * A stub libcuda.so.1: a stand-in for hardware, for test images only.
 *
 * It contains nothing of NVIDIA's driver. It exports what real extension modules link against, so that they load on
 * a node without a GPU exactly as they load on one with the driver installed, and answers as a driver does that
 * finds no device: CUDA_ERROR_NO_DEVICE. It computes nothing. Never install it on a machine that has GPUs.
 *
 * The list is every undefined cu[A-Z]* symbol of the shared objects with DT_NEEDED libcuda.so.1 in the wheels
 * torch 2.9.1, 2.10.0 and 2.11.0, sgl-kernel 0.3.21, sglang-kernel 0.4.2.post2 and nvidia-cutlass-dsl 4.8.1, plus
 * cuInit and cuDeviceGetCount for callers that use dlsym.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#define API __attribute__((visibility("default")))

typedef int CUresult;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_NO_DEVICE = 100, CUDA_ERROR_NOT_FOUND = 500 };

/* The x86-64 and AArch64 calling conventions let a function ignore its arguments, so one body serves all. */
#define NO_DEVICE(function) \
    API CUresult function(void) { return CUDA_ERROR_NO_DEVICE; }

NO_DEVICE(cuInit)
NO_DEVICE(cuDeviceGetCount)

NO_DEVICE(cuCtxFromGreenCtx)
NO_DEVICE(cuCtxGetCurrent)
NO_DEVICE(cuCtxGetId)
NO_DEVICE(cuCtxPopCurrent_v2)
NO_DEVICE(cuCtxPushCurrent_v2)
NO_DEVICE(cuCtxSetCurrent)
NO_DEVICE(cuDevResourceGenerateDesc)
NO_DEVICE(cuDevSmResourceSplitByCount)
NO_DEVICE(cuDeviceGet)
NO_DEVICE(cuDeviceGetAttribute)
NO_DEVICE(cuDeviceGetDevResource)
NO_DEVICE(cuDevicePrimaryCtxGetState)
NO_DEVICE(cuDevicePrimaryCtxRetain)
NO_DEVICE(cuFuncGetAttribute)
NO_DEVICE(cuFuncSetAttribute)
NO_DEVICE(cuFuncSetCacheConfig)
NO_DEVICE(cuGetExportTable)
NO_DEVICE(cuGreenCtxCreate)
NO_DEVICE(cuGreenCtxDestroy)
NO_DEVICE(cuGreenCtxGetDevResource)
NO_DEVICE(cuLaunchCooperativeKernel)
NO_DEVICE(cuLaunchKernel)
NO_DEVICE(cuLinkAddData_v2)
NO_DEVICE(cuLinkComplete)
NO_DEVICE(cuLinkCreate_v2)
NO_DEVICE(cuMemAddressFree)
NO_DEVICE(cuMemGetAddressRange_v2)
NO_DEVICE(cuMemRelease)
NO_DEVICE(cuMemRetainAllocationHandle)
NO_DEVICE(cuMemSetAccess)
NO_DEVICE(cuMemUnmap)
NO_DEVICE(cuModuleGetFunction)
NO_DEVICE(cuModuleLoad)
NO_DEVICE(cuModuleLoadData)
NO_DEVICE(cuModuleLoadDataEx)
NO_DEVICE(cuModuleUnload)
NO_DEVICE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NO_DEVICE(cuPointerGetAttribute)
NO_DEVICE(cuStreamCreate)
NO_DEVICE(cuTensorMapEncodeTiled)

/* These three work in the real driver without a device, and the CUDA runtime asks them first. */

API CUresult cuDriverGetVersion(int *version) {
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = 13000;
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
    switch (error) {
    case CUDA_SUCCESS: *text = "no error"; return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_VALUE: *text = "invalid argument"; return CUDA_SUCCESS;
    case CUDA_ERROR_NO_DEVICE: *text = "no CUDA-capable device is detected"; return CUDA_SUCCESS;
    case CUDA_ERROR_NOT_FOUND: *text = "named symbol not found"; return CUDA_SUCCESS;
    default: *text = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult no_device(void) { return CUDA_ERROR_NO_DEVICE; }

/*
 * The runtime fetches several hundred entry points through here. Those this file does not export all get the same
 * answer, "no device", which is what they would say.
 */
API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int cuda_version, unsigned long long flags,
                                 int *found) {
    (void)cuda_version;
    (void)flags;
    if (!symbol || !function || strncmp(symbol, "cu", 2))
        return CUDA_ERROR_INVALID_VALUE;
    if (!strcmp(symbol, "cuGetProcAddress"))
        symbol = "cuGetProcAddress_v2";
    Dl_info self;
    void *library = dladdr((void *)no_device, &self) ? dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    void *known = library ? dlsym(library, symbol) : NULL;
    if (library)
        dlclose(library);
    *function = known ? known : (void *)no_device;
    if (found)
        *found = 0; /* CU_GET_PROC_ADDRESS_SUCCESS */
    return CUDA_SUCCESS;
}
