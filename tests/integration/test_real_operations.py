"""The operations with real torch, on the CPU, with stand-ins of the libraries that compute by torch's own functions.

There is no GPU: this proves the formulas that the results are compared with, the tolerances, the probe and the check,
and that a wrong library is seen. It proves nothing about the libraries' kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testbed import ROOT

from bedplate.node.stack.operations import OPERATIONS, check_operations

pytestmark = pytest.mark.real

WHEELS = Path(os.environ.get("BEDPLATE_WHEELS", Path.home() / ".cache" / "bedplate" / "wheels"))
PROFILES = {"2.9.1": "cu128-torch2.9.1", "2.11.0": "cu130-torch2.11"}

# Stand-ins that use another way to the result than the references do.
SGL_KERNEL = """
import torch
def rmsnorm(x, weight, eps):
    return torch.nn.functional.rms_norm(x{fault}, x.shape[-1:], weight, eps)
"""
FLASHINFER = """
import torch
class norm:
    @staticmethod
    def rmsnorm(x, weight, eps):
        return torch.nn.functional.rms_norm(x{fault}, x.shape[-1:], weight, eps)
def single_decode_with_kv_cache(q, k, v):
    heads = q.shape[0] // k.shape[1]
    k, v = (cache.repeat_interleave(heads, 1).transpose(0, 1) for cache in (k{fault}, v))
    return torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(1), k, v).squeeze(1)
"""
FUSION = """
import torch, torch.distributed as dist
class AllReduceFusionPattern:
    kARResidualRMSNorm = 1
class Workspace:
    def destroy(self): pass
def create_allreduce_fusion_workspace(*, backend, world_size, rank, max_token_num, hidden_dim, dtype):
    return Workspace()
def allreduce_fusion(*, input, workspace, pattern, residual_in, residual_out, norm_out, rms_gamma, rms_eps):
    dist.all_reduce(input{fault})
    residual_out.copy_(input + residual_in)
    norm_out.copy_(torch.nn.functional.rms_norm(residual_out, residual_out.shape[-1:], rms_gamma, rms_eps))
"""

# Runs in the generation's interpreter: the probe's own attempt, on the device "cpu".
DRIVER = """
import json, runpy, sys
sys.path.insert(0, sys.argv[2])
import torch
child = runpy.run_path(sys.argv[1] + "/operation_child.py")
operation = runpy.run_path(sys.argv[1] + "/operation_" + sys.argv[3] + ".py")
print(json.dumps(child["attempt"](torch, operation["run"], "cpu")))
"""
# Two ranks of gloo, and symmetric memory by an all-reduce of gloo.
RANKED_DRIVER = """
import json, os, runpy, sys, types
sys.path.insert(0, sys.argv[2])
import torch, torch.distributed as dist
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method="file://" + sys.argv[2] + "/meet", rank=rank, world_size=2)
torch.cuda.synchronize = lambda: None
fault = os.environ.get("FAULT")
def one_shot(tensor, op, group):
    found = tensor.clone()
    dist.all_reduce(found)
    return found + 1 if fault else found
def two_shot(tensor, op, group):
    dist.all_reduce(tensor)
    return tensor
symmetric = types.ModuleType("torch.distributed._symmetric_memory")
symmetric.empty = torch.empty
symmetric.rendezvous = lambda tensor, group: None
sys.modules["torch.distributed._symmetric_memory"] = symmetric
torch.ops.symm_mem = types.SimpleNamespace(one_shot_all_reduce=one_shot, two_shot_all_reduce_=two_shot)
child = runpy.run_path(sys.argv[1] + "/operation_child.py")
operation = runpy.run_path(sys.argv[1] + "/operation_" + sys.argv[3] + ".py")
found = child["attempt"](torch, operation["run"], "cpu")
if rank == 0:
    os.wait()
    print(json.dumps(found))
    sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="module", params=PROFILES)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the profile's real packages."""
    lock = ROOT / "profiles" / PROFILES[request.param] / "cp311-x86_64.lock"
    if not list(WHEELS.glob(f"torch-{request.param}-*")) or sys.version_info[:2] != (3, 11):
        pytest.skip(f"needs Python 3.11 and the wheels of {lock.parent.name} in {WHEELS}")
    root = tmp_path_factory.mktemp("real")
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, root / "venv"], check=True)
    command = [uv, "pip", "sync", "-q", "--require-hashes", "--no-index", "--find-links", str(WHEELS), str(lock)]
    subprocess.run(command, check=True, env={**os.environ, "VIRTUAL_ENV": str(root / "venv")})
    return root / "venv" / "bin" / "python"


def attempt(python: Path, place: Path, name: str, fault: str, driver: str = DRIVER) -> dict[str, Any]:
    """Run one operation on the CPU; return what the probe answers."""
    (place / "sgl_kernel.py").write_text(SGL_KERNEL.replace("{fault}", fault))
    (place / "flashinfer").mkdir(exist_ok=True)
    (place / "flashinfer" / "__init__.py").write_text(FLASHINFER.replace("{fault}", fault))
    (place / "flashinfer" / "comm.py").write_text(FUSION.replace("{fault}", fault))
    node = ROOT / "src" / "bedplate" / "node" / "stack"
    command = [str(python), "-I", "-c", driver, str(node), str(place), name]
    environment = {"PATH": os.environ["PATH"], "GLOO_SOCKET_IFNAME": "lo", **({"FAULT": "1"} if fault else {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


CHECKED = {
    "gemm": ["float32", "tf32", "bfloat16", "float16", "float8_e4m3fn"],
    "sgl_rmsnorm": ["bfloat16", "float16"],
    "flashinfer_rmsnorm": ["bfloat16", "float16"],
    "flashinfer_decode": ["float16", "bfloat16"],
    "symmetric_memory": [
        f"{c} {t}" for t in ("float32", "bfloat16") for c in ("one_shot_all_reduce", "two_shot_all_reduce_")
    ],
    "flashinfer_allreduce_fusion": ["sum", "norm"],
}
RANKED = ("symmetric_memory", "flashinfer_allreduce_fusion")


def test_every_operation_is_here() -> None:
    assert set(CHECKED) == set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_right_library_passes(python: Path, tmp_path: Path, name: str) -> None:
    found = attempt(python, tmp_path, name, "", RANKED_DRIVER if name in RANKED else DRIVER)
    assert found["error"] is None, found
    assert found["checked"] == CHECKED[name]


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "gemm"])
def test_a_library_that_is_a_little_wrong_does_not(python: Path, tmp_path: Path, name: str) -> None:
    """The input is rolled by one element, or in the sum one is added."""
    ranked = name in RANKED
    fault = (
        ".clone()" if name == "flashinfer_allreduce_fusion" else ".roll(1, 0)" if "decode" in name else ".roll(1, -1)"
    )
    found = attempt(python, tmp_path, name, fault, RANKED_DRIVER if ranked else DRIVER)
    assert found["error"]["type"] == "WrongValueError", found


def test_without_a_gpu_every_operation_is_skipped_with_the_reason(python: Path) -> None:
    verdicts = check_operations(list(OPERATIONS), python=str(python), timeout_s=180)
    if any(verdict.status == "pass" for verdict in verdicts):
        pytest.skip("there is a GPU here")
    assert {(verdict.code, verdict.status) for verdict in verdicts} == {("operation.unavailable", "skipped")}
    assert all("Found no NVIDIA driver on your system" in verdict.message for verdict in verdicts)
