"""Do the processes of a node add up right? Collectives over N ranks, every value compared exactly.

The work is done by rank_child.py in the generation's interpreter; this module starts it, bounds it, and
judges.
"""

from __future__ import annotations

import itertools
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..child import ChildError, Outcome, child_failed, run_probe
from ..verdicts import Verdict
from . import rank_child

LAYER = "stack"
STDERR_LIMIT = 16000  # characters of the ranks' tracebacks kept as evidence
SHM = "/dev/shm"  # noqa: S108  where NCCL's shared memory is, not a temporary file of ours

# What is missing in the settings. Bandwidth in GB/s (10^9 bytes), 0 = not judged; sizes in bytes.
DEFAULTS: dict[str, Any] = {
    "backend": "nccl",
    "ranks": [2],
    "pairs": False,
    "operations": ["all_reduce"],
    "max_bytes": 64 << 20,
    "repeats": 5,
    "min_busbw_gbps": 0.0,
    "warn_busbw_gbps": 0.0,
    "baseline_busbw_gbps": 0.0,
    "timeout_s": 180.0,
}

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
NO_P2P = {"NCCL_P2P_DISABLE": "1"}

# busbw / algbw with n ranks. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
}

BASELINE_SHARE = 0.9  # less than this share of the chassis's baseline is a warning
# Without P2P each rank has a segment of 9,637,888 bytes for each neighbour of its ring: the size that NCCL
# names when it finds no room ("Error while creating shared memory segment", nccl#290).
SHM_BYTES_PER_RANK = 2 * 9637888
# A group whose last stage began within this share of the limit was slow, and did not hang.
PROGRESS_SHARE = 0.1
STUCK_PERCENT = 50  # of utilisation
_STUCK = (15, 16, 28)  # NVML codes: the GPU is lost, needs a reset, is not found
IDLE_WAIT_S = 10.0  # that killed ranks may take to leave the GPUs; utilisation is an average of a second

_KILLING_S = rank_child.FAILURE_GRACE_S + rank_child.PRINT_S + rank_child.KILL_GRACE_S
_NO_SHM = re.compile(rf"{SHM}|shared memory segment|No space left on device")

Busy = Callable[[], Sequence[str]]


def check_collective(
    settings: Mapping[str, Any],
    *,
    python: str,
    environment: Mapping[str, str] | None = None,
    user: str = "",
    busy: Busy | None = None,
) -> list[Verdict]:
    """Communicate over each rank count in turn, then over each pair; return one verdict per count, one for all pairs.

    settings: the profile's ``verify.collective``; what is missing or None is of ``DEFAULTS``. Keys: backend,
    "gloo" (on the CPU) or "nccl" (rank i on GPU i); ranks, the rank counts; pairs, whether each pair of the
    largest count communicates by itself as well; operations, of all_reduce, all_gather, reduce_scatter;
    max_bytes, the largest message; repeats, how often each size is timed after a warm-up; min_busbw_gbps and
    warn_busbw_gbps, the bus bandwidth in GB/s of the first operation at the largest message below which the
    verdict fails or warns; baseline_busbw_gbps, what this chassis reached before; timeout_s, seconds for the
    import of torch, and again for each group. Bandwidth is judged for nccl only, since gloo measures the CPUs.
    python: the generation's interpreter. environment, user: as for ``child.run_probe``. busy: returns a
    sentence for each GPU that is not idle; it is asked when ranks had to be killed (``busy_gpus``).

    A rank count that fails ends the counts, and one that hangs ends the check; what did not run gets a verdict
    "skipped". A hang under nccl is tried once more with P2P disabled, to tell whether P2P is at fault. More
    verdicts follow where GPUs are not idle after that, or where shared memory is short.
    """
    wanted = {**DEFAULTS, **{key: value for key, value in settings.items() if value is not None}}
    groups = plan(wanted)
    variables = {**ENVIRONMENT, **(environment or {})}
    subject = _subject(wanted, f"x{','.join(str(count) for count in wanted['ranks'])}")

    def run(these: Sequence[Mapping[str, Any]], extra: Mapping[str, str]) -> Outcome:
        config = {key: wanted[key] for key in ("backend", "operations", "max_bytes", "repeats", "timeout_s")}
        # Each group has its own limit in the child. This one is the backstop for a child that cannot keep it:
        # the import, every group, and the seconds that killing takes.
        limit = (1 + len(these)) * wanted["timeout_s"] + len(these) * _KILLING_S + 5
        return run_probe(
            rank_child,
            {**config, "groups": list(these), "shm": SHM},
            python=python,
            timeout_s=limit,
            environment={**variables, **extra},
            user=user,
        )

    try:
        outcome = run(groups, {})
        arms = _arms(outcome)
        occupied = _still_busy(arms, outcome, busy if wanted["backend"] == "nccl" else None)
        hung = next((group for group in groups if arms.get(group["name"], {}).get("timed_out")), None)
        second: Mapping[str, Any] = {}
        if hung and wanted["backend"] == "nccl" and not _is_slow(arms[hung["name"]], wanted["timeout_s"]):
            second = {"why": "GPUs were still busy, so it was not tried"} if occupied else {}
            if variables.get("NCCL_P2P_DISABLE") == "1":
                second = {"off": True}
            elif not occupied:
                again = run([hung], NO_P2P)
                second = _arms(again).get(hung["name"], {"why": f"the process that starts the ranks {again.ending()}"})
                occupied = _still_busy({hung["name"]: second}, again, busy)
    except ChildError as error:
        return [child_failed(error, layer=LAYER, subject=subject)]
    verdicts = judge(outcome, wanted, second)
    if occupied:
        verdicts.append(_gpus_not_idle(occupied))
    return verdicts


def plan(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups to run, [{name, gpus, pair}]: the rank counts, then each pair of the largest count."""
    groups = [{"name": str(count), "gpus": list(range(count)), "pair": False} for count in settings["ranks"]]
    if settings["pairs"]:
        for one, other in itertools.combinations(range(max(settings["ranks"])), 2):
            groups.append({"name": f"{one}-{other}", "gpus": [one, other], "pair": True})
    return groups


def busy_gpus(found: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each GPU of ``gpu.query`` that is stuck: at work for nobody, or not answering.

    A GPU at full utilisation that no process uses is how a killed hang leaves it. One that a process uses is
    that process's business. One that does not tell counts as busy: nothing says that it is idle.
    """
    error = found.get("error")
    stuck = error and (error["name"] in ("TIMEOUT", "CRASH") or error["code"] in _STUCK)
    sentences = [f"NVML answers {error['name']}: {error['text']}"] if error and stuck else []
    for gpu in found.get("gpus", []):
        name = f"GPU {gpu['index']}"
        if gpu.get("error"):
            sentences.append(f"{name} answers {gpu['error']['name']}: {gpu['error']['text']}")
        elif (gpu.get("recovery_action") or "none") != "none":
            sentences.append(f"the driver asks for {gpu['recovery_action']} of {name}")
        elif gpu["processes"] is None and gpu["utilization"] is None:
            sentences.append(f"{name} tells neither whether it works nor for whom")
        elif not gpu["processes"] and (gpu["utilization"] or 0) >= STUCK_PERCENT:
            for_whom = "with no process" if gpu["processes"] is not None else "and does not tell for whom"
            sentences.append(f"{name} is at {gpu['utilization']} % {for_whom}")
    return sentences


def judge(outcome: Outcome, settings: Mapping[str, Any], second: Mapping[str, Any]) -> list[Verdict]:
    """Return the verdicts for what rank_child answered.

    settings: as for ``check_collective``, complete. second: the arm without P2P of the group that hung, or
    {"why": text} where there is none, {"off": True} where P2P was off already; empty when nothing hung.
    """
    result = outcome.result if isinstance(outcome.result, dict) else {}
    if "unavailable" in result:
        subject = _subject(settings, f"x{','.join(str(count) for count in settings['ranks'])}")
        return [_verdict("unavailable", "fail", subject, f"It cannot run: {result['unavailable']}.")]
    arms = _arms(outcome)
    about: dict[str, Any] = {
        "backend": settings["backend"],
        "operations": settings["operations"],
        "import_seconds": result.get("import_seconds"),
        **result.get("versions", {}),
    }
    verdicts: list[Verdict] = []
    pairs: list[Verdict] = []
    bad: Verdict | None = None
    for group in plan(settings):
        arm = arms.get(group["name"])
        subject = _subject(settings, f"GPUs {group['name']}" if group["pair"] else f"x{group['name']}")
        if arm is not None:
            verdict = _judge_arm(arm, second, subject, about, outcome, settings)
        elif bad:
            message = f"It did not run, because {bad.subject} did not pass."
            verdict = _verdict("unavailable", "skipped", subject, message)
        else:
            verdict = _launcher_ended(subject, outcome)
        if verdict.status not in ("pass", "warn", "skipped"):
            bad = bad or verdict
        (pairs if group["pair"] else verdicts).append(verdict)
    if pairs:
        verdicts.append(_judge_pairs(pairs, settings, about))
    return verdicts + _shm_warning(arms.values(), settings, bad)


def _arms(outcome: Outcome) -> dict[str, Any]:
    """Return {group: what rank_child says of it}."""
    result = outcome.result if isinstance(outcome.result, dict) else {}
    return {arm["arm"]: arm for arm in result.get("arms", [])}


def _is_slow(arm: Mapping[str, Any], timeout_s: float) -> bool:
    """Tell whether a group that ran out of time was still getting on: some rank had just begun a stage."""
    idle = [item["idle_s"] for item in arm["results"] if item.get("idle_s") is not None]
    return bool(idle) and min(idle) < max(0.5, PROGRESS_SHARE * timeout_s)


def _still_busy(arms: Mapping[str, Any], outcome: Outcome, busy: Busy | None) -> list[str]:
    """Return what does not end after ranks were killed: the ranks themselves, and GPUs that are not idle."""
    results = [item for arm in arms.values() for item in arm.get("results", [])]
    sentences = [
        f"Rank {rank} of {arm['ranks']} cannot be killed"
        for arm in arms.values()
        for rank, item in enumerate(arm.get("results", []))
        if item.get("unkillable")
    ]
    killed = outcome.timed_out or bool(outcome.signal) or any("killed" in item or "signal" in item for item in results)
    if busy is None or not killed:
        return sentences
    deadline = time.monotonic() + IDLE_WAIT_S
    while True:
        found = list(busy())
        if not found or time.monotonic() > deadline:
            return sentences + found
        time.sleep(1)


def _gpus_not_idle(sentences: Sequence[str]) -> Verdict:
    """Return the verdict of a node whose GPUs are not idle after the ranks were killed."""
    message = f"After the ranks were killed: {'; '.join(sentences)}."
    action = "Reset the GPUs, or reboot; do not run this check again before."
    evidence = {"busy": list(sentences), "waited_s": IDLE_WAIT_S}
    return Verdict("collective.gpus_not_idle", "needs-reset", "driver", "GPUs", message, evidence, action)


def _judge_arm(
    arm: Mapping[str, Any],
    second: Mapping[str, Any],
    subject: str,
    about: Mapping[str, Any],
    outcome: Outcome,
    settings: Mapping[str, Any],
) -> Verdict:
    """Return the verdict of one group; ``second`` as for ``judge``."""
    results = arm["results"]
    evidence = {**about, **{key: arm[key] for key in ("ranks", "gpus", "seconds", "shm")}}
    stages = {str(rank): outcome.stages.get(f"{arm['arm']}.{rank}", "starting") for rank in range(len(results))}
    failure = {**evidence, "stages": stages, "stderr": outcome.stderr[-STDERR_LIMIT:]}
    unavailable = next((item["unavailable"] for item in results if "unavailable" in item), None)
    if unavailable:
        return _verdict("unavailable", "fail", subject, f"It cannot run: {unavailable}.", failure)
    if arm["timed_out"]:
        idle = {str(rank): item.get("idle_s") for rank, item in enumerate(results)}
        return _timeout(second, subject, {**failure, "idle_s": idle}, _is_slow(arm, settings["timeout_s"]))
    failed = _first_failure(results)
    if failed is not None:
        failure["stdout"] = outcome.stdout[-4000:]  # where NCCL writes
        return _shm_full(arm, failed, failure) or _rank_failed(
            failed, results[failed], subject, {**failure, "rank": failed}
        )
    wrong = [{"rank": rank, **item} for rank, result in enumerate(results) for item in result["wrong"]]
    if wrong:
        first = wrong[0]
        message = (
            f"Wrong value on rank {first['rank']} after {_dashed(first['operation'])}: element {first['index']} of "
            f"{first['bytes']} bytes of {first['dtype']} is {first['got']}, and must be {first['want']}."
        )
        action = "Do not use this stack for work on several GPUs: go back, and report the library's version."
        return _verdict("wrong_value", "fail", subject, message, {**evidence, "wrong": wrong[:20]}, action)
    return _bandwidth(results, subject, evidence, settings)


def _judge_pairs(pairs: Sequence[Verdict], settings: Mapping[str, Any], about: Mapping[str, Any]) -> Verdict:
    """Return one verdict for all pairs: that of the gravest pair, naming all that did not pass."""
    subject = _subject(settings, "pairs")
    figures = {
        verdict.subject.rpartition(" ")[2]: {
            "code": verdict.code,
            "status": verdict.status,
            "busbw_gbps": verdict.evidence.get("busbw_gbps"),
        }
        for verdict in pairs
    }
    bad = [verdict for verdict in pairs if verdict.status != "pass"]
    evidence = {**about, "pairs": figures}
    if not bad:
        slowest = min(figures, key=lambda name: figures[name]["busbw_gbps"] or 0.0)
        busbw = figures[slowest]["busbw_gbps"]
        message = f"All values are exact on {len(pairs)} pairs; the slowest is {slowest} with {busbw:.2f} GB/s."
        return _verdict("ok", "pass", subject, message, evidence)
    gravest = max(bad, key=lambda verdict: ("skipped", "warn", "inconclusive", "fail").index(verdict.status))
    names = ", ".join(verdict.subject.rpartition(" ")[2] for verdict in bad if verdict.status == gravest.status)
    evidence["first"] = gravest.evidence
    message = f"{names} of {len(pairs)}: {gravest.message}"
    return Verdict(gravest.code, gravest.status, gravest.layer, subject, message, evidence, gravest.action)


def _shm_full(arm: Mapping[str, Any], failed: int, evidence: dict[str, Any]) -> Verdict | None:
    """Return the verdict of a rank that failed for want of shared memory, None when that was not the cause.

    It dies by SIGBUS when it touches a page that the full file system cannot give (mmap(2)), or NCCL says so.
    """
    result = arm["results"][failed]
    said = _NO_SHM.search("\n".join((str(result.get("error", "")), evidence["stdout"], evidence["stderr"])))
    shm = arm["shm"]["before"]
    short = shm is None or shm["free"] < SHM_BYTES_PER_RANK * arm["ranks"]
    if not short or not (said or result.get("signal") == signal.SIGBUS):
        return None
    free = "is not there" if shm is None else f"had {shm['free'] >> 20} of {shm['total'] >> 20} MiB free"
    need = SHM_BYTES_PER_RANK * arm["ranks"] >> 20
    message = f"{SHM} {free}; {arm['ranks']} ranks may need {need} MiB, and rank {failed} failed for want of it."
    action = f"Free what lies in {SHM}, or make it larger (mount -o remount,size=..., or the container's --shm-size)."
    return Verdict("collective.shm_full", "fail", "node", SHM, message, {**evidence, "rank": failed}, action)


def _shm_warning(arms: Iterable[Mapping[str, Any]], settings: Mapping[str, Any], bad: Verdict | None) -> list[Verdict]:
    """Return a warning where nccl worked, but without P2P would not find the shared memory that it then needs."""
    short = [
        arm
        for arm in arms
        if arm["shm"]["before"] is not None and arm["shm"]["before"]["total"] < SHM_BYTES_PER_RANK * arm["ranks"]
    ]
    if settings["backend"] != "nccl" or bad or not short:
        return []
    worst = max(short, key=lambda arm: int(arm["ranks"]))
    shm, need = worst["shm"]["before"], SHM_BYTES_PER_RANK * worst["ranks"]
    message = f"It holds {shm['total'] >> 20} MiB; {worst['ranks']} ranks without P2P may need {need >> 20} MiB."
    action = "Make it larger: mount -o remount,size=..., or the container's --shm-size."
    return [Verdict("collective.shm_full", "warn", "node", SHM, message, {"shm": shm, "need": need}, action)]


def _timeout(second: Mapping[str, Any], subject: str, evidence: dict[str, Any], slow: bool) -> Verdict:
    """Return the verdict of a group that ran out of time, with what the arm without P2P says about the cause."""
    at = "; ".join(f"rank {rank}: {text}" for rank, text in evidence["stages"].items())
    message = f"It did not end in {evidence['seconds']:.0f} s. {at}."
    action = "Look at the ranks' tracebacks in the evidence."
    if slow:
        message += " It was still getting on, so it was slow rather than hanging."
        action = "Raise timeout_s, or see what else the node is doing."
        return _verdict("timeout", "inconclusive", subject, message, evidence, action)
    if "results" in second:
        evidence["p2p_disabled"] = {key: second[key] for key in ("timed_out", "seconds", "results")}
        if all(item.get("wrong") == [] for item in second["results"]):
            message = f"The P2P path is broken: with NCCL_P2P_DISABLE=1 it works, without it hangs. {at}."
            action = (
                "Check ACS, IOMMU and the P2P settings of the node; until then set NCCL_P2P_DISABLE=1, and switch off "
                "the custom all-reduce of the serving engine, which that variable does not reach."
            )
            return _verdict("p2p_broken", "fail", subject, message, evidence, action)
        if second["timed_out"]:
            return _verdict("timeout", "fail", subject, f"{message} It hangs with P2P disabled, too.", evidence, action)
        second = {"why": "with P2P disabled it failed in another way"}
    if "why" in second:
        evidence["p2p_disabled"] = {**evidence.get("p2p_disabled", {}), "why": second["why"]}
        message += f" Whether P2P is at fault cannot be told: {second['why']}."
        return _verdict("timeout", "inconclusive", subject, message, evidence, action)
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
    results: Sequence[Mapping[str, Any]], subject: str, evidence: dict[str, Any], settings: Mapping[str, Any]
) -> Verdict:
    """Return the verdict of right values: their bandwidth, and whether it is enough.

    algbw = size/time and busbw = algbw times the factor of ``BUS_FACTORS``; time is that of the slowest rank,
    and the median over the repeats. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    ranks = len(results)
    table = [
        _figures(operation, int(size), [result["seconds"][operation][size] for result in results])
        for operation in settings["operations"]
        for size in results[0]["seconds"][operation]
    ]
    first = [row for row in table if row["operation"] == settings["operations"][0]][-1]
    algbw, busbw = first["algbw_gbps"], first["busbw_gbps"]
    evidence.update(
        {key: first[key] for key in ("bytes", "algbw_gbps", "busbw_gbps", "repeats", "spread_s")},
        dtypes=list(rank_child.DTYPES),
        sizes=rank_child.sizes(settings["max_bytes"]),
        table=table,
    )
    figure = f"{busbw:.2f} GB/s bus bandwidth" if ranks > 1 else f"{algbw:.2f} GB/s with one rank, and no bus"
    reached = f"All values are exact; {figure} at {first['bytes']} bytes."
    if settings["backend"] == "nccl" and ranks > 1:
        action = "Compare link widths and P2P settings with a node that is fast enough."
        baseline = settings["baseline_busbw_gbps"]
        for status, limit, what in (
            ("fail", settings["min_busbw_gbps"], "must be"),
            ("warn", settings["warn_busbw_gbps"], "should be"),
            ("warn", BASELINE_SHARE * baseline, f"this chassis had {baseline:g} GB/s, so it should be"),
        ):
            if busbw < limit:
                message = f"Bus bandwidth is {busbw:.1f} GB/s, and {what} {limit:g} GB/s or more."
                evidence["limits"] = {key: settings[key] for key in settings if key.endswith("_gbps")}
                return _verdict("busbw_low", status, subject, message, evidence, action)
    return _verdict("ok", "pass", subject, reached, evidence)


def _figures(operation: str, size: int, seconds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the figures of one operation at one size; seconds: of each repeat, per rank."""
    times = [max(column) for column in zip(*seconds)]
    median = statistics.median(times)
    algbw = size / median / 1e9
    return {
        "operation": operation,
        "bytes": size,
        "repeats": len(times),
        "median_s": round(median, 6),
        "spread_s": [round(min(times), 6), round(max(times), 6)],
        "algbw_gbps": round(algbw, 3),
        "busbw_gbps": round(algbw * BUS_FACTORS[operation](len(seconds)), 3),
    }


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


def _subject(settings: Mapping[str, Any], who: str) -> str:
    """Return what is checked, such as "all-reduce gloo x4"."""
    return f"{', '.join(_dashed(name) for name in settings['operations'])} {settings['backend']} {who}"


def _dashed(operation: str) -> str:
    """Return the name of an operation as people write it."""
    return operation.replace("_", "-")


def _verdict(
    code: str, status: str, subject: str, message: str, evidence: dict[str, Any] | None = None, action: str = ""
) -> Verdict:
    """Return a verdict of this check."""
    return Verdict(f"collective.{code}", status, LAYER, subject, message, evidence or {}, action)
