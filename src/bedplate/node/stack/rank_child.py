"""The collective probe: import torch once, fork the ranks of each group, and have them communicate.

Runs in the interpreter of the generation through child.py. Besides the standard library it uses only
``torch`` and ``torch.distributed``, and of those only what DESIGN's tiny stand-in has, too.

Why fork: importing torch is what this check costs, seconds of a CPU for each process. Here it is imported
once and every rank is a fork of that process, made before anything touched CUDA, which is when forking is
allowed. Each group gets fresh processes, a rendezvous and a process group of its own; nothing of a
smaller or larger group is reused (``new_group`` would share the transport set up for the largest), because
a pass at 8 ranks proves nothing about 2.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import math
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

Stage = Callable[[str, str], None]

# Elements after which a pattern repeats: prime, so that no chunk of an algorithm (a power of two) starts
# the pattern anew, and chunks that change places are seen.
PERIOD = 1021

# name: bytes of an element, upper bound of a sum so that it is exact in that type. bfloat16 holds every
# integer to 256, float32 every one to 2**24 (8 and 24 bits of significand); 2**48 in int64 is past 32 bits
# on purpose.
DTYPES = {"int64": (8, 1 << 48), "float32": (4, 1 << 24), "bfloat16": (2, 256)}

FAILURE_GRACE_S = 2.0  # after a rank has failed: time for the others to say what they saw
PRINT_S = 1.0  # for all ranks together: time to print where they are
KILL_GRACE_S = 5.0  # after SIGKILL: time for the kernel to end a process
REPEAT_LIMIT_S = 5.0  # no new repeat at a size after this many seconds
LONG_BYTES = 1 << 20  # sizes from which on the ranks agree whether that limit is over


class UnavailableError(Exception):
    """This backend cannot be used on this node; the text says why."""


def values(dtype: str, rank: int, ranks: int) -> list[int]:
    """Return the ``PERIOD`` integers that a rank contributes: they depend on position and rank, and look
    random.

    The finaliser is that of splitmix64 (Steele, Lea, Flood 2014). Every value is below bound/ranks, so each
    partial sum over ranks is exact, in whatever order it is made.
    """
    below = DTYPES[dtype][1] // ranks
    result = []
    for position in range(PERIOD):
        bits = (position * 0x9E3779B97F4A7C15 + (rank + 1) * 0xD1B54A32D192ED03) % (1 << 64)
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % (1 << 64)
        result.append((bits ^ (bits >> 31)) % below)
    return result


def pack(dtype: str, numbers: list[int]) -> bytes:
    """Return integers as little-endian elements. A bfloat16 is the upper half of the float32 of the same value."""
    if dtype == "int64":
        return struct.pack(f"<{len(numbers)}q", *numbers)
    raw = struct.pack(f"<{len(numbers)}f", *numbers)
    if dtype == "float32":
        return raw
    return b"".join(raw[at + 2 : at + 4] for at in range(0, len(raw), 4))


def tile(pattern: bytes, size: int) -> bytearray:
    """Return size bytes of the pattern repeated."""
    return bytearray((pattern * (size // len(pattern) + 1))[:size])


def sizes(max_bytes: int) -> list[int]:
    """Return the message sizes in bytes, multiples of 8, ascending: 8 to max_bytes in steps of 8, and 512
    KiB.

    512 KiB and just past it are there by name because NCCL 2.26.2 failed from that size on (nccl#2418).
    """
    largest = max(8, max_bytes - max_bytes % 8)
    wanted = {8**power for power in range(1, 22)} | {512 * 1024, 512 * 1024 + 8}
    return sorted({size for size in wanted if size < largest} | {largest})


def first_difference(torch: Any, got: Any, want: Any) -> int:
    """Return the first index at which two tensors of one length differ, by halving; they must differ."""
    start, end = 0, len(got)
    while end - start > 1:
        middle = (start + end) // 2
        if torch.equal(got[start:middle], want[start:middle]):
            start = middle
        else:
            end = middle
    return start


def run_rank(
    torch: Any,
    config: dict[str, Any],
    group: dict[str, Any],
    rank: int,
    rendezvous: str,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Be one rank: meet the others, communicate at every size and type, compare, and time float32.

    Returns {"wrong": [{operation, dtype, bytes, index, got, want}], "seconds": {operation: {bytes: [of each
    repeat]}}}. A rank that found a wrong value goes on, or the others would wait for it.
    """
    dist = torch.distributed
    ranks = len(group["gpus"])
    device, synchronize = "cpu", _nothing
    if config["backend"] == "nccl":
        gpu, count = group["gpus"][rank], torch.cuda.device_count()
        if count <= max(group["gpus"]):
            raise UnavailableError(f"{ranks} ranks need a GPU each, and torch sees {count}")
        torch.cuda.set_device(gpu)
        device, synchronize = f"cuda:{gpu}", torch.cuda.synchronize
    note("meeting the other ranks")
    dist.init_process_group(
        config["backend"],
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        # Beyond the limit of the caller: whoever hangs is to be found hanging, with its stage.
        timeout=timedelta(seconds=2 * config["timeout_s"]),
    )
    wrong: list[dict[str, Any]] = []
    seconds: dict[str, dict[int, list[float]]] = {operation: {} for operation in config["operations"]}
    for dtype in DTYPES:
        note(f"preparing {dtype}")
        data = Data(torch, dtype, rank, ranks, config, device)
        for operation in config["operations"]:
            for size in sizes(config["max_bytes"]):
                call, check = data.prepare(operation, size)
                repeats = config["repeats"] if dtype == "float32" else 0
                began = time.monotonic()
                for repeat in range(1 + repeats):  # the first one is the warm-up
                    text = f"{operation.replace('_', '-')} of {size} bytes of {dtype}"
                    note(text + (f", repeat {repeat}" if repeat else ""))
                    data.reset(operation, size)
                    if repeat:
                        synchronize()
                        dist.barrier()
                    start = time.monotonic()
                    call()
                    synchronize()
                    if repeat:
                        seconds[operation].setdefault(size, []).append(time.monotonic() - start)
                    found = check()
                    if found:
                        wrong.append({"operation": operation, "dtype": dtype, "bytes": size, **found})
                    # All ranks must agree on how many they do, so the clock of one cannot decide.
                    if repeat and size >= LONG_BYTES and _too_long(torch, dist, device, time.monotonic() - began):
                        break
    note("leaving")
    dist.barrier()
    dist.destroy_process_group()
    return {"wrong": wrong[:10], "seconds": seconds}


class Data:
    """What one rank sends in one type, and what it must receive.

    A size is that of nccl-tests: the whole buffer of an all-reduce, the output of an all-gather, the input of
    a reduce-scatter; a rank's share of the last two is a multiple of 8 bytes, at least 8.
    """

    def __init__(self, torch: Any, dtype: str, rank: int, ranks: int, config: dict[str, Any], device: str) -> None:
        """Make the patterns of all ranks; ``config`` is that of ``main``."""
        self.torch, self.rank, self.ranks = torch, rank, ranks
        self.width = DTYPES[dtype][0]
        length = max(sizes(config["max_bytes"])[-1], 8 * ranks)

        def tensor(numbers: list[int], size: int) -> Any:
            return torch.frombuffer(tile(pack(dtype, numbers), size), dtype=getattr(torch, dtype)).to(device)

        contributions = [values(dtype, other, ranks) for other in range(ranks)]
        self.source = tensor(contributions[rank], length)
        self.total = tensor([sum(column) for column in zip(*contributions)], length)
        self.shares = (
            [tensor(numbers, max(8, length // ranks // 8 * 8)) for numbers in contributions]
            if "all_gather" in config["operations"]
            else []
        )
        self.work = self.source.clone()

    def reset(self, operation: str, size: int) -> None:
        """Put into the work buffer what is to be reduced, or else what is no right answer."""
        end = max(size, 8 * self.ranks) // self.width
        self.work[:end].copy_((self.total if operation == "all_gather" else self.source)[:end])

    def prepare(self, operation: str, size: int) -> tuple[Callable[[], Any], Callable[[], dict[str, Any] | None]]:
        """Return what calls the operation, and what then compares the result."""
        dist, work, source = self.torch.distributed, self.work, self.source
        end = size // self.width
        if operation == "all_reduce":
            return lambda: dist.all_reduce(work[:end]), lambda: self.compare([(work[:end], self.total[:end])])
        share = max(8, size // self.ranks // 8 * 8) // self.width
        if operation == "all_gather":
            pairs = [(work[k * share : (k + 1) * share], self.shares[k][:share]) for k in range(self.ranks)]
            mine = self.shares[self.rank][:share]
            return (
                lambda: dist.all_gather_into_tensor(work[: share * self.ranks], mine),
                lambda: self.compare(pairs),
            )
        want = self.total[self.rank * share : (self.rank + 1) * share]
        return (
            lambda: dist.reduce_scatter_tensor(work[:share], source[: share * self.ranks]),
            lambda: self.compare([(work[:share], want)]),
        )

    def compare(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any] | None:
        """Return {index, got, want} of the first element that differs, None when none does."""
        passed = 0
        for got, want in pairs:
            if not self.torch.equal(got, want):
                index = first_difference(self.torch, got, want)
                return {"index": passed + index, "got": _plain(got[index]), "want": _plain(want[index])}
            passed += len(want)
        return None


def _plain(element: Any) -> int | float | str:
    """Return the number in a tensor of one element; what JSON does not know, such as nan, as text."""
    number: int | float = element.item()
    return number if math.isfinite(number) else str(number)


def _nothing() -> None:
    """Stand where the CPU has nothing to wait for."""


def _too_long(torch: Any, dist: Any, device: str, elapsed_s: float) -> bool:
    """Tell on every rank alike whether any rank has been repeating beyond the limit."""
    flag = torch.frombuffer(bytearray(struct.pack("<q", elapsed_s > REPEAT_LIMIT_S)), dtype=torch.int64).to(device)
    dist.all_reduce(flag)
    return bool(flag[0].item())


def rank_process(torch: Any, config: dict[str, Any], arm: dict[str, Any], rank: int, stage: Stage) -> None:
    """Run one rank in this process, which is a fork, and leave its result in the directory."""
    # The kernel ends the rank with the process that forked it; linux/prctl.h, PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != arm["launcher"]:
        os._exit(1)
    # On SIGTERM a rank prints its traceback and lives on: were it to end, the next one would find its
    # connection broken and no longer be where it hung.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=False)
    name = f"{arm['name']}.{rank}"
    try:
        result = run_rank(torch, config, arm, rank, arm["rendezvous"], lambda text: stage(name, text))
    except UnavailableError as error:
        result = {"unavailable": str(error)}
    except BaseException as error:  # noqa: BLE001  whatever ends a rank is its result
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:2000], "time": time.monotonic()}
    path = os.path.join(config["directory"], f"rank-{name}")
    with open(path + ".new", "w", encoding="utf-8") as stream:
        json.dump(result, stream)
    os.replace(path + ".new", path)


def run_arm(torch: Any, config: dict[str, Any], arm: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """Fork the ranks of one group and wait for them, at most ``timeout_s`` seconds.

    Returns {"arm": name, "ranks": count, "timed_out": bool, "seconds": wall time, "results": one per rank,
    "shm": bytes of /dev/shm}. A result is what ``run_rank`` returned, or has error, unavailable, signal or
    exit_code with ``time``, when it was noticed, or killed with idle_s, the seconds since its last stage began,
    and unkillable.
    """
    began = time.monotonic()
    shm = {"before": shm_bytes(config["shm"])}
    sys.stdout.flush()
    sys.stderr.flush()
    running: dict[int, int] = {}
    for rank in range(len(arm["gpus"])):
        pid = os.fork()
        if pid == 0:
            try:
                rank_process(torch, config, arm, rank, stage)
            finally:
                sys.stderr.flush()
                os._exit(0)
        running[pid] = rank
    results: list[dict[str, Any]] = [{} for _ in running]
    deadline = began + config["timeout_s"]
    timed_out = False
    while running:
        for pid, rank in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                results[rank] = _rank_result(config, arm, rank, status)
                if "seconds" not in results[rank]:
                    # The others wait for this rank now, and would wait until the limit.
                    deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
        if running and time.monotonic() > deadline:
            timed_out = not any(result and "seconds" not in result for result in results)
            for rank in running.values():
                results[rank] = {"killed": True, "idle_s": _idle_s(config, arm, rank)}
            for rank in _kill(running):
                results[rank]["unkillable"] = True
            break
        time.sleep(0.005)
    shm["after"] = shm_bytes(config["shm"])
    elapsed = round(time.monotonic() - began, 3)
    found = {"ranks": len(arm["gpus"]), "gpus": arm["gpus"], "arm": arm["name"], "timed_out": timed_out, "shm": shm}
    return {**found, "seconds": elapsed, "results": results}


def shm_bytes(path: str) -> dict[str, int] | None:
    """Return {total, free} of a file system in bytes, None when it is not there."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def _idle_s(config: dict[str, Any], arm: dict[str, Any], rank: int) -> float | None:
    """Return the seconds since a rank noted its last stage, None when it noted none."""
    try:
        noted = os.stat(os.path.join(config["directory"], f"stage-{arm['name']}.{rank}")).st_mtime
    except OSError:
        return None
    return round(max(0.0, time.time() - noted), 3)


def _rank_result(config: dict[str, Any], arm: dict[str, Any], rank: int, status: int) -> dict[str, Any]:
    """Return the result of a rank that has ended."""
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status), "time": time.monotonic()}
    path = os.path.join(config["directory"], f"rank-{arm['name']}.{rank}")
    try:
        with open(path, encoding="utf-8") as stream:
            result: dict[str, Any] = json.load(stream)
    except (OSError, ValueError):
        return {"exit_code": os.WEXITSTATUS(status), "time": time.monotonic()}
    return result


def _kill(running: dict[int, int]) -> list[int]:
    """End ranks, {pid: rank}: have each print where it is, one after the other, then kill; do not wait for ever.

    Returns the ranks that SIGKILL did not end: they hang in the kernel.
    """
    for pid, rank in running.items():
        os.write(2, f"--- rank {rank} is here:\n".encode())
        os.kill(pid, signal.SIGTERM)
        time.sleep(PRINT_S / len(running))
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_GRACE_S
    left = list(running)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if not os.waitpid(pid, os.WNOHANG)[0]]
        time.sleep(0.005)
    return [running[pid] for pid in left]


def main(config: dict[str, Any], answer: Callable[[Any], None], stage: Stage) -> None:
    """Run every group of ``config["groups"]`` and answer after each.

    config: backend, groups ([{name, gpus, pair}]), operations, max_bytes, repeats, timeout_s, shm (where shared
    memory is), directory. Answer: {"unavailable": text} or {"import_seconds", "versions", "arms": [of
    ``run_arm``]}. A group that fails is the last one that is no pair; one that runs out of time is the last.
    """
    stage("launcher", "importing torch")
    # The default action of SIGALRM ends this process even when it hangs in C code.
    signal.setitimer(signal.ITIMER_REAL, config["timeout_s"])
    began = time.monotonic()
    try:
        torch = importlib.import_module("torch")
        dist = importlib.import_module("torch.distributed")
    except Exception as error:  # noqa: BLE001  the import check has the details
        answer({"unavailable": f"torch.distributed cannot be imported: {type(error).__name__}: {error}"[:2000]})
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    backend = config["backend"]
    if not (dist.is_available() and getattr(dist, f"is_{backend}_available")()):
        answer({"unavailable": f"this build of torch has no {backend} backend"})
        return
    result: dict[str, Any] = {
        "import_seconds": round(time.monotonic() - began, 3),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "arms": [],
    }
    failed = False
    for group in config["groups"]:
        if failed and not group["pair"]:
            continue
        stage("launcher", f"running {len(group['gpus'])} ranks")
        rendezvous = os.path.join(config["directory"], f"rendezvous-{group['name']}")
        arm = {**group, "launcher": os.getpid(), "rendezvous": rendezvous}
        found = run_arm(torch, config, arm, stage)
        result["arms"].append(found)
        answer(result)
        if found["timed_out"]:
            break
        failed = failed or any("seconds" not in item for item in found["results"])
