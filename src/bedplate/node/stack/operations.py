"""Do the libraries compute? One small real call of each on every GPU, in a child, with a checked value.

Each operation is a file ``operation_<name>.py`` that operation_child.py runs; docs/verification.md shows how to
add one. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from ..child import ChildError, Outcome, child_failed, run_probe, source_of
from ..verdicts import Verdict
from . import (
    operation_child,
    operation_flashinfer_allreduce_fusion,
    operation_flashinfer_decode,
    operation_flashinfer_rmsnorm,
    operation_gemm,
    operation_sgl_rmsnorm,
    operation_symmetric_memory,
)

LAYER = "stack"

_SOURCES: dict[str, ModuleType] = {
    "gemm": operation_gemm,
    "sgl_rmsnorm": operation_sgl_rmsnorm,
    "flashinfer_rmsnorm": operation_flashinfer_rmsnorm,
    "flashinfer_decode": operation_flashinfer_decode,
    "symmetric_memory": operation_symmetric_memory,
    "flashinfer_allreduce_fusion": operation_flashinfer_allreduce_fusion,
}

# The names that a profile may give under verify.operations.
OPERATIONS = tuple(_SOURCES)

# What CUDA, torch and flashinfer say, by cause; the first that matches counts. cudaGetErrorString's texts.
_NO_IMAGE = re.compile(
    r"no kernel image is available|device kernel image is invalid|invalid device function"
    r"|PTX was compiled with an unsupported toolchain|PTX JIT compilation failed"
    r"|No supported CUDA architectures found|not compiled for|unsupported (?:gpu|arch|sm)",
    re.IGNORECASE,
)
_CRASH = re.compile(
    r"illegal (?:memory access|instruction)|misaligned address|unspecified launch failure|device-side assert"
    r"|uncorrectable ECC|hardware stack error|invalid program counter",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_UNAVAILABLE = re.compile(
    r"Could not find nvcc|No such file or directory: '[^']*(?:nvcc|ninja)|Ninja build failed|ninja exited"
    r"|CUDA_HOME|is not implemented|not supported",
    re.IGNORECASE,
)
_UNAVAILABLE_TYPES = ("ImportError", "ModuleNotFoundError", "AttributeError", "NotImplementedError")

_ACTIONS = {
    "wrong_value": "Do not compute with this stack: go back, and report the versions in the evidence.",
    "crash": "Look at the traceback in the evidence and for an Xid in `dmesg`; go back if the stack is new.",
    "no_kernel_image": "Lock a build of the library for this GPU; the profile's arch says which it must be for.",
    "unavailable": "Lock the package that brings it, or take the operation out of the profile.",
    "no_memory": "Free the GPU and verify again.",
    "error": "Read the chain of errors in the evidence.",
    "timeout": "Read in the evidence where it hung; raise the limit only if kernels are compiled on a slow node.",
}


def check_operations(
    names: Sequence[str],
    *,
    python: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    user: str = "",
    gpus: int | None = None,
) -> list[Verdict]:
    """Run each operation on every GPU and return its verdict: one when all is well, else one for each GPU at fault.

    names: of ``OPERATIONS``. python: the generation's interpreter. timeout_s: seconds for one operation on all GPUs,
    with the import of torch and what has to be compiled. environment, user: as for ``child.run_probe``; a
    child that cannot be started is the verdict ``node.child_failed``. gpus: how many GPUs the node must have,
    None when that is not known: where torch sees fewer, the verdict fails; where there need be none, it is
    skipped with what CUDA says.

    Raises ValueError for a name that is not known, naming those that are.
    """
    unknown = [name for name in names if name not in _SOURCES]
    if unknown:
        near = difflib.get_close_matches(unknown[0], OPERATIONS, 1)
        hint = f", did you mean {near[0]}?" if near else "."
        raise ValueError(f"There is no operation {unknown[0]}{hint} Known: {', '.join(OPERATIONS)}.")

    def check(name: str) -> list[Verdict]:
        def run(first: int) -> Outcome:
            return run_probe(
                operation_child,
                {"source": source_of(_SOURCES[name]), "first": first, "timeout_s": timeout_s},
                python=python,
                timeout_s=timeout_s,
                environment=environment,
                user=user,
            )

        try:
            return _check(name, run, gpus)
        except ChildError as error:
            return [child_failed(error, layer=LAYER, subject=name)]

    return [verdict for name in names for verdict in check(name)]


def _check(name: str, run: Callable[[int], Outcome], gpus: int | None) -> list[Verdict]:
    """Return the verdicts of one operation; ``run`` runs it on the GPUs from a number on.

    A GPU on which it fails ends the process, so the next ones get a new one.
    """
    verdicts: list[Verdict] = []
    passed: dict[str, Any] = {}
    first, count = 0, 1
    while first < count:
        outcome = run(first)
        answer = outcome.result if isinstance(outcome.result, dict) else {}
        reason = _not_run(name, answer, gpus)
        if reason:
            return [reason]
        if answer.get("ranks"):
            return [_judge_ranks(name, answer, outcome)]
        count = answer.get("count", count)
        for index, found in enumerate(answer.get("results", ()), first):
            if found["error"] is None:
                passed[str(index)] = {key: found[key] for key in ("seconds", "checked", "skipped")}
            else:
                verdicts.append(_failed(name, f"GPU {index}", found["error"], outcome))
            first = index + 1
        if verdicts and verdicts[-1].code in ("operation.unavailable", "operation.no_kernel_image"):
            return verdicts  # a matter of the library: the next GPU would say the same
        if outcome.timed_out or (first < count and not _stopped_by_error(answer)):
            where = outcome.stages.get("operation", "starting")
            on_gpu = where.startswith("on GPU")
            verdicts.append(_died(f"{name} {where[3:]}" if on_gpu else name, outcome, where))
            if outcome.timed_out or not on_gpu:
                return verdicts  # the next GPU would take the limit again, or it never came to a GPU
            first += 1
    if not verdicts:
        message = f"Right on {len(passed)} GPU{'' if len(passed) == 1 else 's'}."
        return [Verdict("operation.ok", "pass", LAYER, name, message, {"gpus": passed})]
    return verdicts


def _stopped_by_error(answer: Mapping[str, Any]) -> bool:
    """Tell whether the child ended by itself because its last GPU gave an error."""
    results = answer.get("results") or []
    return bool(results) and results[-1]["error"] is not None


def _not_run(name: str, answer: Mapping[str, Any], gpus: int | None) -> Verdict | None:
    """Return the verdict of an operation that cannot run here, None when it can."""
    if "unavailable" in answer:
        message = f"It cannot run: {answer['unavailable']}."
        return Verdict("operation.unavailable", "fail", LAYER, name, message, {}, "Look at the import of torch first.")
    count = answer.get("count")
    if count is None:
        return None
    evidence = {"seen": count, "expected": gpus, "cuda": answer["why"]}
    if gpus and count < gpus:
        why = f": {answer['why'].rstrip('.')}" if answer["why"] else ""
        message = f"torch sees {count} GPUs, and {gpus} are expected{why}."
        action = "Look at the verdicts of the driver and the GPUs first, and at CUDA_VISIBLE_DEVICES."
        return Verdict("operation.unavailable", "fail", LAYER, name, message, evidence, action)
    if count == 0:
        message = f"There is no GPU{': ' + answer['why'].rstrip('.') if answer['why'] else ''}."
        return Verdict("operation.unavailable", "skipped", LAYER, name, message, evidence)
    if answer["ranks"] and count == 1:
        return Verdict(
            "operation.unavailable", "skipped", LAYER, name, "It takes two GPUs, and there is one.", evidence
        )
    return None


def _judge_ranks(name: str, answer: Mapping[str, Any], outcome: Outcome) -> Verdict:
    """Return the verdict of an operation that runs on all GPUs at once."""
    results = answer["results"]
    if not results:
        ranks = {key: text for key, text in outcome.stages.items() if key.startswith("rank-")}
        at = "; ".join(f"{key.replace('-', ' ')}: {text}" for key, text in ranks.items())
        return _died(name, outcome, at or outcome.stages.get("operation", "starting"))
    for rank, found in enumerate(results):
        if "signal" in found:
            how = f"died by {signal.Signals(found['signal']).name}" if found["signal"] else "ended without a result"
            message, evidence = f"Its process on GPU {rank} {how}.", {"stderr": outcome.stderr[-8000:]}
            return Verdict("operation.crash", "fail", LAYER, f"{name} GPU {rank}", message, evidence, _ACTIONS["crash"])
        if found.get("error"):
            return _failed(name, f"GPU {rank}", found["error"], outcome)
    passed = {
        str(rank): {key: found[key] for key in ("seconds", "checked", "skipped")} for rank, found in enumerate(results)
    }
    message = f"Right on {len(results)} GPUs at once."
    return Verdict("operation.ok", "pass", LAYER, name, message, {"gpus": passed})


def _failed(name: str, where: str, error: Mapping[str, Any], outcome: Outcome) -> Verdict:
    """Return the verdict of an operation that raised an error on one GPU, by what the error says."""
    text = "\n".join([error["text"], *error["chain"]])
    line = next((line.strip() for line in error["text"].splitlines() if line.strip()), error["type"])[:300].rstrip(".")
    evidence = {"error": dict(error), "stderr": outcome.stderr[-8000:]}
    status, message = "fail", f"{error['type']}: {line}."
    if error["type"] == "WrongValueError":
        code, message = "wrong_value", f"Wrong values: {line}."
    elif _NO_IMAGE.search(text):
        code, message = "no_kernel_image", f"It holds no code for this GPU: {line}."
    elif _CRASH.search(text):
        code, message = "crash", f"The GPU reports: {line}."
    elif _NO_MEMORY.search(text):
        code, status, message = "no_memory", "inconclusive", f"The GPU has no memory for it: {line}."
    elif error["type"] in _UNAVAILABLE_TYPES or _UNAVAILABLE.search(text):
        code, message = "unavailable", f"It cannot be called: {error['type']}: {line}."
    else:
        code = "error"
    return Verdict(f"operation.{code}", status, LAYER, f"{name} {where}", message, evidence, _ACTIONS[code])


def _died(subject: str, outcome: Outcome, where: str) -> Verdict:
    """Return the verdict of an operation whose process died or ran out of time."""
    evidence = {
        "stage": where,
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "seconds": outcome.elapsed_s,
        "stderr": outcome.stderr[-8000:],
    }
    code = "timeout" if outcome.timed_out else "crash"
    message = f"Its process {outcome.ending()} ({where})."
    return Verdict(f"operation.{code}", "fail", LAYER, subject, message, evidence, _ACTIONS[code])
