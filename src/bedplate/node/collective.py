"""Do the processes of a node add up right? An all-reduce over N ranks, every sum compared exactly.

The work is done by rank_child.py in the generation's interpreter; this module starts it, bounds it, and
judges.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from . import rank_child
from .child import Outcome, run_probe
from .verdicts import Verdict

LAYER = "stack"
STDERR_LIMIT = 16000  # characters of the ranks' tracebacks kept as evidence

# Defaults that the generation's environment may override: ranks of one node talk over the loopback
# interface, and a host name that resolves to nothing must not matter; one thread each, since ranks share
# the CPUs; NCCL says why.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

_KILLING_S = rank_child.FAILURE_GRACE_S + rank_child.PRINT_S + rank_child.KILL_GRACE_S


def check_collective(
    *,
    python: str,
    backend: str,
    ranks: Sequence[int],
    max_bytes: int,
    timeout_s: float,
    min_busbw_gbps: float = 0.0,
    environment: Mapping[str, str] | None = None,
    user: str = "",
) -> list[Verdict]:
    """All-reduce over each rank count in turn and return one verdict per rank count.

    python: the generation's interpreter. backend: "gloo" (on the CPU) or "nccl" (rank i on GPU i). ranks: the
    rank counts. max_bytes: the largest message. timeout_s: seconds for the import of torch, and again for
    each rank count. min_busbw_gbps: least bus bandwidth in GB/s at the largest message, 0 for none; judged
    for nccl only, since gloo measures the CPUs. environment, user: as for ``child.run_probe``, whose
    ChildError passes through.

    The first rank count that fails ends the check; the ones after it get a verdict "skipped".
    """
    config = {"backend": backend, "ranks": list(ranks), "max_bytes": max_bytes, "timeout_s": timeout_s}
    # Each group has its own limit in the child. This one is the backstop for a child that cannot keep it:
    # the import, every group, a second arm, and the seconds that killing takes.
    arms = len(ranks) + (1 if backend == "nccl" else 0)
    outcome = run_probe(
        rank_child,
        config,
        python=python,
        timeout_s=(1 + arms) * timeout_s + arms * _KILLING_S + 5,
        environment={**ENVIRONMENT, **(environment or {})},
        user=user,
    )
    return judge(outcome, backend=backend, ranks=ranks, max_bytes=max_bytes, min_busbw_gbps=min_busbw_gbps)


def judge(
    outcome: Outcome, *, backend: str, ranks: Sequence[int], max_bytes: int, min_busbw_gbps: float
) -> list[Verdict]:
    """Return the verdicts for what rank_child answered; the arguments are those of ``check_collective``."""
    result = outcome.result if isinstance(outcome.result, dict) else {}
    if "unavailable" in result:
        return [_verdict("unavailable", "fail", _subject(backend, ranks), f"It cannot run: {result['unavailable']}.")]
    verdicts: list[Verdict] = []
    arms = {arm["arm"]: arm for arm in result.get("arms", [])}
    evidence: dict[str, Any] = {"import_seconds": result.get("import_seconds"), **result.get("versions", {})}
    for count in ranks:
        arm, second = arms.get(str(count)), arms.get(f"{count}-no-p2p")
        subject = _subject(backend, [count])
        bad = next((verdict for verdict in verdicts if verdict.status != "pass"), None)
        if arm is not None:
            about = {**evidence, "backend": backend, "ranks": count, "seconds": arm["seconds"]}
            verdicts.append(_judge_arm(arm, second, subject, about, outcome, max_bytes, min_busbw_gbps))
        elif bad:
            message = f"It did not run, because {bad.subject} did not pass."
            verdicts.append(_verdict("unavailable", "skipped", subject, message))
        else:
            verdicts.append(_launcher_ended(subject, outcome))
    return verdicts


def _judge_arm(
    arm: Mapping[str, Any],
    second: Mapping[str, Any] | None,
    subject: str,
    evidence: dict[str, Any],
    outcome: Outcome,
    max_bytes: int,
    min_busbw_gbps: float,
) -> Verdict:
    """Return the verdict of one rank count; ``second`` is the arm without P2P where there was one."""
    results = arm["results"]
    stages = {str(rank): outcome.stages.get(f"{arm['arm']}.{rank}", "starting") for rank in range(len(results))}
    failure = {**evidence, "stages": stages, "stderr": outcome.stderr[-STDERR_LIMIT:]}
    unavailable = next((item["unavailable"] for item in results if "unavailable" in item), None)
    if unavailable:
        return _verdict("unavailable", "fail", subject, f"It cannot run: {unavailable}.", failure)
    if arm["timed_out"]:
        return _timeout(second, subject, failure)
    failed = _first_failure(results)
    if failed is not None:
        return _rank_failed(failed, results[failed], subject, {**failure, "rank": failed})
    wrong = [{"rank": rank, **item} for rank, result in enumerate(results) for item in result["wrong"]]
    if wrong:
        first = wrong[0]
        message = (
            f"Wrong sum on rank {first['rank']}: element {first['index']} of {first['bytes']} bytes of "
            f"{first['dtype']} is {first['got']}, and must be {first['want']}."
        )
        action = "Do not use this stack for work on several GPUs: go back, and report the library's version."
        return _verdict("wrong_value", "fail", subject, message, {**evidence, "wrong": wrong[:20]}, action)
    return _bandwidth(results, subject, evidence, max_bytes, min_busbw_gbps)


def _timeout(second: Mapping[str, Any] | None, subject: str, evidence: dict[str, Any]) -> Verdict:
    """Return the verdict of a group that ran out of time, with what the arm without P2P says about the cause."""
    stages = evidence["stages"]
    at = "; ".join(f"rank {rank}: {text}" for rank, text in stages.items())
    message = f"It did not end in {evidence['seconds']:.0f} s. {at}."
    action = "Look at the ranks' tracebacks in the evidence; raise the limit only if the node is slow."
    if second is not None:
        evidence["p2p_disabled"] = {key: second[key] for key in ("timed_out", "seconds", "results")}
        if all(item.get("wrong") == [] for item in second["results"]):
            message = f"The P2P path is broken: with NCCL_P2P_DISABLE=1 it works, without it hangs. {at}."
            action = "Check ACS, IOMMU and the P2P settings of the node; until then set NCCL_P2P_DISABLE=1."
        else:
            message += " It fails with P2P disabled, too."
    return _verdict("timeout", "fail", subject, message, evidence, action)


def _first_failure(results: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the rank that failed first, None when none did.

    A rank that died by a signal is the cause before any rank that raised an error, for the others raise when
    a connection breaks; among equals the earlier one is.
    """
    failed = [
        (0 if "signal" in item or "exit_code" in item else 1, item["time"], rank)
        for rank, item in enumerate(results)
        if "time" in item
    ]
    return min(failed)[2] if failed else None


def _rank_failed(rank: int, result: Mapping[str, Any], subject: str, evidence: dict[str, Any]) -> Verdict:
    """Return the verdict of a group in which a rank raised an error or died."""
    if "error" in result:
        how = f"raised {result['error']}"
    elif "signal" in result:
        how = f"died by {signal.Signals(result['signal']).name}"
    else:
        how = f"ended with exit code {result['exit_code']} and without a result"
    message = f"Rank {rank} {how} ({evidence['stages'][str(rank)]})."
    return _verdict("rank_failed", "fail", subject, message, evidence, "Read its traceback in the evidence.")


def _bandwidth(
    results: Sequence[Mapping[str, Any]],
    subject: str,
    evidence: dict[str, Any],
    max_bytes: int,
    min_busbw_gbps: float,
) -> Verdict:
    """Return the verdict of right sums: their bandwidth, and whether it is enough.

    algbw = size/time and busbw = algbw * 2(n-1)/n, with n ranks; time is that of the slowest rank, and the
    median over the repeats. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    ranks = len(results)
    size = rank_child.sizes(max_bytes)[-1]
    times = [max(column) for column in zip(*(result["seconds"] for result in results))]
    algbw = size / statistics.median(times) / 1e9
    busbw = algbw * 2 * (ranks - 1) / ranks
    evidence.update(
        bytes=size,
        algbw_gbps=round(algbw, 3),
        busbw_gbps=round(busbw, 3),
        repeats=len(times),
        spread_s=[round(min(times), 6), round(max(times), 6)],
        dtypes=list(rank_child.DTYPES),
        sizes=rank_child.sizes(max_bytes),
    )
    if evidence["backend"] == "nccl" and busbw < min_busbw_gbps and ranks > 1:
        message = f"Bus bandwidth is {busbw:.1f} GB/s, and must be {min_busbw_gbps:g} GB/s or more."
        action = "Compare link widths and P2P settings with a node that is fast enough."
        return _verdict("busbw_low", "fail", subject, message, {**evidence, "min_busbw_gbps": min_busbw_gbps}, action)
    message = f"All sums are exact; {busbw:.2f} GB/s bus bandwidth at {size} bytes."
    return _verdict("ok", "pass", subject, message, evidence)


def _launcher_ended(subject: str, outcome: Outcome) -> Verdict:
    """Return the verdict for a launcher that ended, or was killed, before a group could end."""
    stage = outcome.stages.get("launcher", "starting the interpreter")
    evidence = {
        "stages": outcome.stages,
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "seconds": outcome.elapsed_s,
        "stderr": outcome.stderr[-STDERR_LIMIT:],
    }
    if outcome.timed_out or outcome.signal == "SIGALRM":
        action = "Look at the import checks first; raise the limit only if the node is slow."
        return _verdict("timeout", "fail", subject, f"It ran out of time while {stage}.", evidence, action)
    message = f"The process that starts the ranks {outcome.ending()} while {stage}."
    return _verdict("rank_failed", "fail", subject, message, evidence, "Read its traceback in the evidence.")


def _subject(backend: str, ranks: Sequence[int]) -> str:
    """Return what is checked, such as "all-reduce gloo x4"."""
    return f"all-reduce {backend} x{','.join(str(count) for count in ranks)}"


def _verdict(
    code: str, status: str, subject: str, message: str, evidence: dict[str, Any] | None = None, action: str = ""
) -> Verdict:
    """Return a verdict of this check."""
    return Verdict(f"collective.{code}", status, LAYER, subject, message, evidence or {}, action)
