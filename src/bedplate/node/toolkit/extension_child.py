"""The probe that builds a torch extension, C++ and CUDA, as sglang and flashinfer do when they compile kernels.

Not imported by the checks: child.py runs its source in the interpreter of the stack.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
from typing import Any

# One file for nvcc that includes torch's own headers: what breaks in the field is nvcc, host compiler and these headers
# together. The operator works without a GPU as well, so that the extension is loaded and called in any case.
SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <cuda_runtime.h>
#include <torch/library.h>

__global__ void bedplate_triple_kernel(const float *in, float *out, long count)
{
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < count) out[i] = 3 * in[i] + 1;
}

static at::Tensor triple(const at::Tensor &in)
{
    at::Tensor out = at::empty_like(in);
    const float *from = in.const_data_ptr<float>();
    float *to = out.mutable_data_ptr<float>();
    if (in.is_cuda())
        bedplate_triple_kernel<<<(in.numel() + 63) / 64, 64>>>(from, to, in.numel());
    else
        for (long i = 0; i < in.numel(); ++i) to[i] = 3 * from[i] + 1;
    return out;
}

TORCH_LIBRARY(bedplate_probe, library) { library.def("triple(Tensor x) -> Tensor", &triple); }
"""


def main(config: dict[str, Any], answer: Any, stage: Any) -> None:
    """Build, load and call the extension; answer {"skipped": why}, {"error": text} or {"ok", "device", "torch_cuda"}.

    config: path (of the toolkit), version ("13.0.1"), arch (list of numbers), cuda_home (what the stack's environment
    says, or ""), host_compiler (path or ""), directory.
    """
    stage("extension", "importing torch")
    torch = importlib.import_module("torch")

    built_for = torch.version.cuda or ""
    headers = os.path.join(os.path.dirname(torch.__file__ or ""), "include", "torch", "library.h")
    path = os.environ["PATH"] = os.path.dirname(os.__file__) + os.pathsep + os.environ.get("PATH", "")
    if not os.path.isfile(headers):
        answer({"skipped": "this torch brings no headers"})
        return
    if not built_for:
        answer({"skipped": "this torch is built without CUDA"})
        return
    if built_for.split(".")[0] != config["version"].split(".")[0]:
        answer({"skipped": f"the stack's torch is built for CUDA {built_for}, so it does not use this toolkit"})
        return
    if not shutil.which("ninja", path=path):
        answer({"skipped": "the stack has no ninja, which torch builds extensions with"})
        return
    stage("extension", "compiling")
    os.environ["CUDA_HOME"] = config["path"]
    os.environ["TORCH_CUDA_ARCH_LIST"] = " ".join(f"{arch // 10}.{arch % 10}" for arch in config["arch"])
    os.environ["MAX_JOBS"] = "2"
    if config["host_compiler"]:
        os.environ["CC"] = os.environ["CXX"] = config["host_compiler"]
    source = os.path.join(config["directory"], "triple.cu")
    build = os.path.join(config["directory"], "extension")
    os.mkdir(build)
    with open(source, "w", encoding="utf-8") as stream:
        stream.write(SOURCE)
    cpp_extension = importlib.import_module("torch.utils.cpp_extension")  # reads CUDA_HOME when it is imported

    try:
        cpp_extension.load("bedplate_probe", [source], build_directory=build, is_python_module=False)
    except (RuntimeError, OSError) as error:
        answer({"error": re.sub(r"\n{2,}", "\n", str(error))[-6000:]})
        return
    stage("extension", "calling")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.arange(1000, dtype=torch.float32, device=device)
    result = torch.ops.bedplate_probe.triple(values)
    answer({"ok": bool((result == 3 * values + 1).all()), "device": device, "torch_cuda": built_for})
