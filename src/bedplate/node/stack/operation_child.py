"""The operation probe: run one operation on a GPU after the other, or on all at once, and check its values.

Runs in the interpreter of the generation through child.py; uses the standard library and torch. The operation
is a file of its own, ``operation_<name>.py``, that defines ``run(torch, device, check)``: it calls the library
on ``device`` and hands each result to ``check(what, got, want, tolerance)``. With ``RANKS = True`` it runs
on all GPUs at once, one process each, inside a process group. docs/verification.md shows how to add one.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

TEXT_LIMIT = 4000  # characters of an error


class WrongValueError(Exception):
    """A result is not what it must be; the text says where, ``found`` has the figures."""

    def __init__(self, text: str, found: dict[str, Any]) -> None:
        """Keep the figures beside the text."""
        super().__init__(text)
        self.found = found


class Check:
    """What an operation hands its results to; ``done`` and ``skipped`` say what was compared."""

    def __init__(self, torch: Any) -> None:
        """Compare tensors of this torch."""
        self.torch = torch
        self.done: list[str] = []
        self.skipped: dict[str, str] = {}

    def __call__(self, what: str, got: Any, want: Any, tolerance: float = 0.0) -> None:
        """Compare a result with what it must be; both in float64 on the CPU.

        tolerance: greatest difference as a share of the greatest value that is wanted; 0 means exactly.
        Raises WrongValueError at the first element that is off, which one that is not a number is, too.
        """
        got, want = (tensor.detach().to("cpu", self.torch.float64) for tensor in (got, want))
        if got.shape != want.shape:
            raise WrongValueError(
                f"{what}: the result has the shape {tuple(got.shape)}, and must have {tuple(want.shape)}",
                {"what": what},
            )
        limit = tolerance * float(want.abs().max())
        wrong = ~((got - want).abs() <= limit)
        count = int(wrong.sum())
        if count:
            index = int(wrong.flatten().nonzero()[0])
            first_got, first_want = float(got.flatten()[index]), float(want.flatten()[index])
            text = f"{what}: {count} of {want.numel()} values are wrong; number {index} is {first_got:g}, and must be "
            found = {"what": what, "wrong": count, "of": want.numel(), "index": index, "limit": limit}
            raise WrongValueError(
                f"{text}{first_want:g} within {limit:g}", {**found, "got": str(first_got), "want": str(first_want)}
            )
        self.done.append(what)

    def rms_norm(self, kernel: Callable[[Any, Any, float], Any], device: str) -> None:
        """Compare a root mean square normalisation ``kernel(x, weight, eps)``: 64 rows of 4096, bfloat16 and float16.

        Formula: x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019).
        """
        torch, eps = self.torch, 1e-6
        generator = torch.Generator().manual_seed(2)
        for name in ("bfloat16", "float16"):
            x = torch.randn((64, 4096), generator=generator).to(getattr(torch, name))
            weight = torch.randn((4096,), generator=generator).to(x.dtype)
            got = kernel(x.to(device), weight.to(device), eps)
            wide = x.double()
            self(name, got, wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double(), 2**-7)

    def skip(self, what: str, reason: str) -> None:
        """Note that a part was not run, and why."""
        self.skipped[what] = reason


def describe(error: BaseException) -> dict[str, Any]:
    """Return {type, text, chain, found}: the exception, the texts it came from, the figures of a wrong value."""
    chain: list[str] = []
    current = error.__cause__ or error.__context__
    while current is not None and len(chain) < 10:
        chain.append(f"{type(current).__name__}: {current}"[:TEXT_LIMIT])
        current = current.__cause__ or current.__context__
    found = error.found if isinstance(error, WrongValueError) else None
    return {"type": type(error).__name__, "text": str(error)[:TEXT_LIMIT], "chain": chain, "found": found}


def attempt(torch: Any, run: Callable[[Any, str, Any], None], device: str) -> dict[str, Any]:
    """Run an operation on one device; return {seconds, checked, skipped, error (None or of ``describe``)}."""
    check = Check(torch)
    began = time.monotonic()
    error = None
    try:
        run(torch, device, check)
        if device != "cpu":
            torch.cuda.synchronize()
    except BaseException as caught:  # noqa: BLE001  whatever ends an operation is its result
        traceback.print_exc()
        error = describe(caught)
    seconds = round(time.monotonic() - began, 3)
    return {"seconds": seconds, "checked": check.done, "skipped": check.skipped, "error": error}


def in_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked process, None when that dies.

    Asking torch for GPUs may start CUDA, after which no process may be forked any more.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def count_gpus(torch: Any) -> dict[str, Any]:
    """Return {count, why}: how many GPUs torch sees, and where it sees none, what CUDA says."""
    count, why = int(torch.cuda.device_count()), ""
    if not count:
        try:
            torch.cuda.init()
        except Exception as error:  # noqa: BLE001  whatever it says is the reason
            why = str(error).strip().partition("\n")[0][:500]
    return {"count": count, "why": why}


def run_ranks(
    torch: Any,
    run: Callable[[Any, str, Any], None],
    count: int,
    config: dict[str, Any],
    stage: Callable[[str, str], None],
) -> list[dict[str, Any]]:
    """Run an operation in one forked process for each GPU; return the results of ``attempt``, or {signal}, by rank."""
    dist = importlib.import_module("torch.distributed")
    launcher = os.getpid()

    def be(rank: int) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != launcher:
            return

        def grouped(torch: Any, device: str, check: Any) -> None:
            torch.cuda.set_device(rank)
            stage(f"rank-{rank}", "meeting the other ranks")
            method = f"file://{config['directory']}/rendezvous"
            limit = timedelta(seconds=2 * config["timeout_s"])
            dist.init_process_group("nccl", init_method=method, rank=rank, world_size=count, timeout=limit)
            stage(f"rank-{rank}", "running")
            run(torch, device, check)
            dist.destroy_process_group()

        text = json.dumps(attempt(torch, grouped, f"cuda:{rank}"))
        with open(os.path.join(config["directory"], f"rank-{rank}"), "w", encoding="utf-8") as stream:
            stream.write(text)

    ranks = {}
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                be(rank)
            finally:
                os._exit(0)
        ranks[pid] = rank
    results: list[dict[str, Any]] = [{} for _ in range(count)]
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if os.WIFSIGNALED(status):
            results[rank] = {"signal": os.WTERMSIG(status)}
        else:
            try:
                with open(os.path.join(config["directory"], f"rank-{rank}"), encoding="utf-8") as stream:
                    results[rank] = json.load(stream)
            except (OSError, ValueError):
                results[rank] = {"signal": 0}
        if results[rank].get("error", True):
            # The others wait for this one, and would until the limit.
            for left in ranks:
                os.kill(left, signal.SIGKILL)
            for left, other in ranks.items():
                os.waitpid(left, 0)
                results[other] = {"killed": True}
            break
    return results


def main(config: dict[str, Any], answer: Callable[[Any], None], stage: Callable[[str, str], None]) -> None:
    """Run the operation whose source is ``config["source"]`` and answer after each GPU.

    config: source, first (the GPU to begin with), timeout_s, directory. Answer: {"unavailable": text} where
    torch cannot be imported, else {count, why} of ``count_gpus`` with ranks (whether it takes all GPUs at once)
    and results, one for each GPU from the first on; each as of ``attempt``, of ranks also {signal} or {killed}. A GPU
    on which it fails is the last one: the process is of no use after that.
    """
    path = os.path.join(config["directory"], "operation.py")
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(config["source"])
    operation = runpy.run_path(path)
    stage("operation", "importing torch")
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001  the import check has the details
        answer({"unavailable": f"torch cannot be imported: {type(error).__name__}: {error}"[:2000]})
        return
    stage("operation", "asking torch for the GPUs")
    seen = in_fork(lambda: count_gpus(torch)) or {"count": 0, "why": "the process that asks for GPUs died"}
    result = {**seen, "ranks": bool(operation.get("RANKS")), "results": []}
    answer(result)
    if result["ranks"]:
        if seen["count"] > 1:
            stage("operation", f"on {seen['count']} GPUs at once")
            result["results"] = run_ranks(torch, operation["run"], seen["count"], config, stage)
            answer(result)
        return
    for index in range(config["first"], seen["count"]):
        stage("operation", f"on GPU {index}")
        torch.cuda.set_device(index)
        found = attempt(torch, operation["run"], f"cuda:{index}")
        result["results"].append(found)
        answer(result)
        if found["error"]:
            return
