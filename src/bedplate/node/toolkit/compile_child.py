"""The probe that builds and runs a small CUDA program. Runs in the node's own Python, as the unprivileged user.

Not imported by the checks: child.py runs its source. Every tool has a time limit of its own, so that the answer says
which one did not end; the parent kills the whole session besides.
"""

from __future__ import annotations

import base64
import ctypes
import os
import subprocess
from typing import Any

KERNEL = "bedplate_probe"
PROGRAM_LIMIT = 3 * 1024 * 1024  # bytes of a program that are sent back; it has about 1 MB

# Every device is asked for a value that only the kernel can have computed.
SOURCE = r"""
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>

extern "C" __global__ void bedplate_probe(const int *in, int *out)
{
    out[threadIdx.x] = 3 * in[threadIdx.x] + 1;
}

static int run(int device)
{
    int host[64], *in = nullptr, *out = nullptr;
    for (int i = 0; i < 64; ++i) host[i] = i + device;
    cudaError_t error = cudaSetDevice(device);
    if (!error) error = cudaMalloc(&in, sizeof host);
    if (!error) error = cudaMalloc(&out, sizeof host);
    if (!error) error = cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice);
    if (!error) bedplate_probe<<<1, 64>>>(in, out);
    if (!error) error = cudaGetLastError();
    if (!error) error = cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost);
    int wrong = 0;
    for (int i = 0; !error && i < 64; ++i) wrong += host[i] != 3 * (i + device) + 1;
    printf("device %d %d %d\n", device, (int)error, wrong);
    return error || wrong;
}

int main(int argc, char **argv)
{
    int runtime = 0, driver = 0, devices = 0;
    cudaRuntimeGetVersion(&runtime);
    printf("runtime %d\n", runtime);
    fflush(stdout);
    if (argc < 2 || strcmp(argv[1], "kernel")) return 0;
    cudaDriverGetVersion(&driver);
    cudaError_t error = cudaGetDeviceCount(&devices);
    printf("driver %d\ndevices %d %d\n", driver, (int)error, devices);
    fflush(stdout);
    int failed = 0;
    for (int device = 0; !error && device < devices; ++device) failed |= run(device);
    return failed;
}
"""


def run(command: list[str], timeout_s: float) -> dict[str, Any]:
    """Run a command; return exit_code (None: did not end in time, or could not be started) and its output's end."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"exit_code": None, "output": f"did not end within {timeout_s:.0f} s"}
    except OSError as error:
        return {"exit_code": None, "output": f"cannot be started: {error.strerror}"}
    return {"exit_code": done.returncode, "output": (done.stdout + done.stderr)[-8192:]}


def runtime_version(library: str) -> int | None:
    """Return what cudaRuntimeGetVersion of the shared runtime answers, such as 13000; None when it cannot be asked."""
    version = ctypes.c_int()
    try:
        error = ctypes.CDLL(library).cudaRuntimeGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # it does not load, or is another library of that name
        return None
    return version.value if error == 0 else None


def main(config: dict[str, Any], answer: Any, stage: Any) -> None:
    """Compile, link, and run; answer with what each step gave and the program's own bytes (base64).

    config: path (of the toolkit), arch (list of numbers), host_compiler (path), library (path of libcudart.so),
    step_s (seconds for each step), directory.
    """
    source = os.path.join(config["directory"], "probe.cu")
    program = os.path.join(config["directory"], "probe")
    with open(source, "w", encoding="utf-8") as stream:
        stream.write(SOURCE)
    stage("toolkit", "loading the runtime library")
    found: dict[str, Any] = {"shared_runtime": runtime_version(config["library"]) if config["library"] else None}
    stage("toolkit", "compiling")
    architectures = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in config["arch"]]
    compiler = ["-ccbin", config["host_compiler"]] if config["host_compiler"] else []
    nvcc = os.path.join(config["path"], "bin", "nvcc")
    found["compile"] = run([nvcc, "-no-compress", *compiler, *architectures, "-o", program, source], config["step_s"])
    answer(found)
    if found["compile"]["exit_code"] != 0:
        return
    with open(program, "rb") as stream:
        found["program"] = base64.b64encode(stream.read(PROGRAM_LIMIT)).decode("ascii")
    stage("toolkit", "running the program without a GPU")
    found["run"] = run([program], config["step_s"])
    answer(found)
    stage("toolkit", "running the kernel")
    found["kernel"] = run([program, "kernel"], config["step_s"])
    answer(found)
