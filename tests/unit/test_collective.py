"""The probe runs for real on the tiny stack; its faults are wheels built wrong, or a rank that really dies."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_stack
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.child import Outcome, read_environment
from bedplate.node.stack import collective, rank_child
from bedplate.node.stack.collective import DEFAULTS, busy_gpus, check_collective, judge, plan
from bedplate.node.verdicts import Verdict


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stack.build_wheels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def good(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stack.make_generation(tmp_path_factory.mktemp("generations") / "good", tiny)


def run(generation: Path, **kwargs: object) -> list[Verdict]:
    """Run the check; what is no argument of check_collective is a setting."""
    arguments = {name: kwargs.pop(name) for name in ("environment", "busy") if name in kwargs}
    arguments.setdefault("environment", read_environment(generation / "environment"))
    settings = {"backend": "gloo", "ranks": [2, 4], "max_bytes": 1 << 20, "timeout_s": 30.0, **kwargs}
    return check_collective(settings, python=str(generation / "venv/bin/python"), **arguments)


def changed(tiny: Path, root: Path, old: str, new: str, file: str = "distributed.py") -> Path:
    """Make a generation whose torch has one passage changed."""
    generation = tiny_stack.make_generation(root, tiny)
    path = tiny_stack.site_packages(generation) / "torch" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return generation


IN_ALL_REDUCE = '    """Replace the elements on every rank by the sum over all ranks."""\n'


def test_good_sums_pass_at_every_rank_count(good: Path) -> None:
    verdicts = run(good, ranks=[2, 3, 4])
    assert [(v.code, v.status, v.subject) for v in verdicts] == [
        ("collective.ok", "pass", f"all-reduce gloo x{n}") for n in (2, 3, 4)
    ], verdicts
    evidence = verdicts[2].evidence
    assert evidence["torch"] == "2.9.1+tiny"
    assert evidence["sizes"][0] == 8
    assert 524288 in evidence["sizes"]
    assert evidence["bytes"] == evidence["sizes"][-1] == 1 << 20
    assert evidence["busbw_gbps"] == pytest.approx(evidence["algbw_gbps"] * 2 * 3 / 4, abs=0.002)
    assert evidence["repeats"] == DEFAULTS["repeats"]
    assert [row["bytes"] for row in evidence["table"]] == evidence["sizes"]
    for row in evidence["table"]:
        assert row["spread_s"][0] <= row["median_s"] <= row["spread_s"][1]
        assert row["algbw_gbps"] == pytest.approx(row["bytes"] / row["median_s"] / 1e9, rel=0.1, abs=0.001)


@pytest.mark.parametrize("ranks", [3, 5])
def test_a_gathered_share_is_whole_elements(good: Path, ranks: int) -> None:
    (verdict,) = run(good, ranks=[ranks], operations=["all_gather"], repeats=1, max_bytes=4096)
    assert verdict.status == "pass", verdict


def test_all_operations_are_exact_and_measured(good: Path) -> None:
    operations = ["all_reduce", "all_gather", "reduce_scatter"]
    (verdict,) = run(good, ranks=[3], operations=operations, repeats=2, max_bytes=600000)
    assert (verdict.code, verdict.subject) == ("collective.ok", "all-reduce, all-gather, reduce-scatter gloo x3"), (
        verdict
    )
    last = {row["operation"]: row for row in verdict.evidence["table"]}
    assert list(last) == operations
    for operation, factor in zip(operations, (4 / 3, 2 / 3, 2 / 3)):
        row = last[operation]
        assert (row["bytes"], row["repeats"]) == (600000, 2)
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * factor, abs=0.002)


@pytest.mark.parametrize(
    ("operation", "old", "new"),
    [
        ("all_gather", "output.data[number * size : (number + 1) * size] = ", "output.data[-size:] = "),
        (
            "all_gather",
            "            peer.sendall(output.data)\n",
            "            peer.sendall(bytes(output.data[::-1]))\n",
        ),
        ("reduce_scatter", "output.data[:] = total.data[_rank * size : (_rank + 1) * size]", "pass"),
        (
            "reduce_scatter",
            "output.data[:] = total.data[_rank * size : (_rank + 1) * size]",
            "output.data[:] = total.data[:size]",
        ),
    ],
    ids=["a share is left out", "shares in another order", "nothing is done", "everybody gets the first share"],
)
def test_a_wrong_value_of_the_other_operations(tiny: Path, tmp_path: Path, operation: str, old: str, new: str) -> None:
    generation = changed(tiny, tmp_path / "g", old, new)
    (verdict,) = run(generation, ranks=[3], operations=["all_reduce", operation], max_bytes=4096)
    assert (verdict.code, verdict.status) == ("collective.wrong_value", "fail")
    assert {item["operation"] for item in verdict.evidence["wrong"]} == {operation}
    assert f"after {operation.replace('_', '-')}" in verdict.message


def test_pairs_are_one_verdict_with_the_figures_of_each(good: Path) -> None:
    two, four, pairs = run(good, pairs=True, max_bytes=4096)
    assert (two.status, four.status) == ("pass", "pass")
    assert (pairs.code, pairs.subject) == ("collective.ok", "all-reduce gloo pairs"), pairs
    assert set(pairs.evidence["pairs"]) == {"0-1", "0-2", "0-3", "1-2", "1-3", "2-3"}
    assert "All values are exact on 6 pairs" in pairs.message


def test_the_pair_at_fault_is_named(tiny: Path, tmp_path: Path) -> None:
    """One GPU that adds up wrong shows at every count, and only its pairs say which one it is."""
    new = IN_ALL_REDUCE + "    import sys\n    rank_child_gpus = sys._getframe(1).f_globals\n"
    generation = changed(tiny, tmp_path / "g", IN_ALL_REDUCE, new)
    path = tiny_stack.site_packages(generation) / "torch" / "distributed.py"
    # The file of the rendezvous carries the name of the group.
    text = path.read_text().replace("    rank_child_gpus = sys._getframe(1).f_globals\n", "")
    text = text.replace(
        "    _rank = rank\n", "    _rank = rank\n    global _bad\n    _bad = init_method.endswith('2-3')\n"
    )
    path.write_text(text.replace("    import sys\n", "    if _bad:\n        tensor.data[0] ^= 1\n"))
    *counts, pairs = run(generation, pairs=True, max_bytes=4096)
    assert [v.code for v in counts] == ["collective.ok"] * 2
    assert (pairs.code, pairs.status) == ("collective.wrong_value", "fail")
    assert pairs.message.startswith("2-3 of 6: Wrong value on rank 0")
    assert pairs.evidence["pairs"]["0-1"]["code"] == "collective.ok"


def test_the_plan_is_the_counts_and_then_every_pair() -> None:
    groups = plan({"ranks": [2, 3], "pairs": True})
    assert [group["gpus"] for group in groups] == [[0, 1], [0, 1, 2], [0, 1], [0, 2], [1, 2]]
    assert len({group["name"] for group in groups}) == 5


def test_one_rank_has_no_bus(as_nccl: Path) -> None:
    (verdict,) = run(as_nccl, backend="nccl", ranks=[1], min_busbw_gbps=1e6, max_bytes=4096)
    assert (verdict.code, verdict.evidence["busbw_gbps"]) == ("collective.ok", 0.0)
    assert "with one rank, and no bus" in verdict.message


def test_a_wrong_sum_is_told_with_rank_type_size_index_and_values(tiny: Path, tmp_path: Path) -> None:
    generation = tiny_stack.make_generation(tmp_path / "g", tiny, torch="2.9.1+tiny.wrongsum")
    verdicts = run(generation)
    assert [v.code for v in verdicts] == ["collective.wrong_value"] * 2
    first = verdicts[0].evidence["wrong"][0]
    # The build flips the lowest bit in the middle of buffers of 512 KiB or more, and leaves smaller ones
    # right.
    assert (first["rank"], first["dtype"], first["bytes"], first["index"]) == (0, "int64", 524288, 32768)
    assert first["got"] == first["want"] ^ 1
    expected = sum(rank_child.values("int64", rank, 2)[32768 % rank_child.PERIOD] for rank in range(2))
    assert first["want"] == expected
    assert str(first["got"]) in verdicts[0].message


def test_below_its_size_the_same_build_is_right(tiny: Path, tmp_path: Path) -> None:
    generation = tiny_stack.make_generation(tmp_path / "g", tiny, torch="2.9.1+tiny.wrongsum")
    assert [v.code for v in run(generation, ranks=[2], max_bytes=262144)] == ["collective.ok"]


@pytest.mark.parametrize(
    "instead",
    [
        "_receive(peer, len(tensor.data)) if peer is _peers[0] else {}",
        "tensor.data[:] = _receive(peer, len(tensor.data))",
        "{0}; peer is _peers[0] and tensor.add_bytes(bytes(tensor.data))",
    ],
    ids=["a contribution is left out", "the last contribution wins", "contributions count twice"],
)
def test_sums_wrong_in_other_ways(tiny: Path, tmp_path: Path, instead: str) -> None:
    add = "tensor.add_bytes(_receive(peer, len(tensor.data)))"
    generation = changed(tiny, tmp_path / "g", add, instead.format(add))
    assert run(generation, ranks=[3], max_bytes=8192)[0].code == "collective.wrong_value"


def test_two_chunks_that_change_places_are_wrong(tiny: Path, tmp_path: Path) -> None:
    swap = "tensor.data[:] = _receive(_peers[0], len(tensor.data))"
    new = f"{swap}\n        half = len(tensor.data) // 2\n        tensor.data[:] = "
    new += "bytes(tensor.data[half:]) + bytes(tensor.data[:half])"
    verdict = run(changed(tiny, tmp_path / "g", swap, new), ranks=[2])[0]
    assert verdict.code == "collective.wrong_value"
    assert {item["rank"] for item in verdict.evidence["wrong"]} == {1}


def test_a_hang_is_a_timeout_with_the_stage_of_each_rank(tiny: Path, tmp_path: Path) -> None:
    generation = tiny_stack.make_generation(tmp_path / "g", tiny, torch="2.9.1+tiny.hang")
    hung, skipped = run(generation, timeout_s=3.0)
    assert (hung.code, hung.status) == ("collective.timeout", "fail")
    assert hung.evidence["stages"] == {"0": "all-reduce of 8 bytes of int64", "1": "all-reduce of 8 bytes of int64"}
    assert "rank 1: all-reduce of 8 bytes of int64" in hung.message
    # The fault handler's tracebacks on SIGTERM, rank by rank.
    first, second = hung.evidence["stderr"].split("--- rank ")[1:]
    assert "in add_bytes" in first
    assert "in _receive" in second
    assert all(idle > 1 for idle in hung.evidence["idle_s"].values())
    assert (skipped.code, skipped.status) == ("collective.unavailable", "skipped")
    assert "all-reduce gloo x2 did not pass" in skipped.message


def test_a_rank_that_sleeps_is_a_timeout_that_shows_the_rank(tiny: Path, tmp_path: Path) -> None:
    new = IN_ALL_REDUCE + "    if _rank == 1 and len(tensor.data) == 64:\n        time.sleep(60)\n"
    verdict = run(changed(tiny, tmp_path / "g", IN_ALL_REDUCE, new), ranks=[2], timeout_s=3.0)[0]
    assert (verdict.code, verdict.status) == ("collective.timeout", "fail")
    assert verdict.evidence["stages"]["1"] == "all-reduce of 64 bytes of int64"
    assert "time.sleep" in verdict.evidence["stderr"] or "in all_reduce" in verdict.evidence["stderr"]


def test_a_rank_that_died_ends_the_wait_of_others_that_do_not_notice(tiny: Path, tmp_path: Path) -> None:
    new = IN_ALL_REDUCE + "    if _rank == 1:\n        os.abort()\n    time.sleep(60)\n"
    verdict = run(changed(tiny, tmp_path / "g", IN_ALL_REDUCE, new), ranks=[2], timeout_s=20.0)[0]
    assert (verdict.code, verdict.evidence["rank"]) == ("collective.rank_failed", 1)
    assert verdict.evidence["seconds"] < 12


def test_after_a_hang_no_pair_is_tried(tiny: Path, tmp_path: Path) -> None:
    generation = tiny_stack.make_generation(tmp_path / "g", tiny, torch="2.9.1+tiny.hang")
    hung, pairs = run(generation, ranks=[2], pairs=True, timeout_s=3.0)
    assert hung.code == "collective.timeout"
    assert (pairs.code, pairs.status) == ("collective.unavailable", "skipped")


def test_a_group_that_is_slow_is_told_from_one_that_hangs(tiny: Path, tmp_path: Path) -> None:
    generation = changed(tiny, tmp_path / "g", IN_ALL_REDUCE, IN_ALL_REDUCE + "    time.sleep(0.3)\n")
    verdict = run(generation, ranks=[2], timeout_s=3.0)[0]
    assert (verdict.code, verdict.status) == ("collective.timeout", "inconclusive")
    assert "slow rather than hanging" in verdict.message


def test_ranks_get_sigterm_before_sigkill(tiny: Path, tmp_path: Path) -> None:
    """A rank that will not print its traceback and die is killed all the same."""
    new = IN_ALL_REDUCE + "    import signal\n    signal.pthread_sigmask(signal.SIG_BLOCK, [15])\n    time.sleep(60)\n"
    verdict = run(changed(tiny, tmp_path / "g", IN_ALL_REDUCE, new), ranks=[2], timeout_s=2.0)[0]
    assert verdict.code == "collective.timeout"
    assert "rank 1 is here" in verdict.evidence["stderr"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("import ctypes; ctypes.string_at(0)", "Rank 1 died by SIGSEGV (all-reduce of 8 bytes of int64)."),
        ("import os; os._exit(3)", "Rank 1 ended with exit code 3 and without a result"),
        ("raise ValueError('no link')", "Rank 1 raised ValueError: no link"),
    ],
)
def test_a_rank_that_fails_is_the_one_that_is_blamed(tiny: Path, tmp_path: Path, what: str, words: str) -> None:
    new = f"{IN_ALL_REDUCE}    if _rank == 1:\n        {what}\n"
    verdict = run(changed(tiny, tmp_path / "g", IN_ALL_REDUCE, new), ranks=[4])[0]
    assert (verdict.code, verdict.evidence["rank"]) == ("collective.rank_failed", 1)
    assert words in verdict.message
    assert verdict.evidence["seconds"] < 10  # and not until the limit


@pytest.mark.parametrize(("what", "code"), [("time.sleep(60)", "timeout"), ("os.abort()", "rank_failed")])
def test_an_import_of_torch_that_does_not_end_well(tiny: Path, tmp_path: Path, what: str, code: str) -> None:
    generation = changed(tiny, tmp_path / "g", "import ctypes\n", f"import ctypes, os, time\n{what}\n", "__init__.py")
    (verdict, _) = run(generation, timeout_s=2.0)
    assert verdict.code == f"collective.{code}"
    assert "importing torch" in verdict.message


def test_without_torch_and_without_the_backend_it_is_unavailable(tiny: Path, tmp_path: Path, good: Path) -> None:
    empty = tiny_stack.make_generation(tmp_path / "g", tiny, torch="", kernel="")
    (verdict,) = run(empty)
    assert (verdict.code, verdict.status) == ("collective.unavailable", "fail")
    assert "No module named 'torch'" in verdict.message
    (verdict,) = run(good, backend="nccl")
    assert (verdict.code, verdict.status) == ("collective.unavailable", "fail")
    assert verdict.subject == "all-reduce nccl x2,4"
    assert "this build of torch has no nccl backend" in verdict.message


@pytest.fixture
def as_nccl(tiny: Path, tmp_path: Path) -> Path:
    return tiny_stack.take_nccl(tiny_stack.make_generation(tmp_path / "nccl", tiny))


def test_bandwidth_is_judged_for_nccl_only(as_nccl: Path, good: Path) -> None:
    (verdict,) = run(as_nccl, backend="nccl", ranks=[2], min_busbw_gbps=1e6)
    assert (verdict.code, verdict.status) == ("collective.busbw_low", "fail")
    assert "must be 1e+06 GB/s or more" in verdict.message
    assert run(as_nccl, backend="nccl", ranks=[2], min_busbw_gbps=0.0)[0].code == "collective.ok"
    limits = {"min_busbw_gbps": 1e6, "warn_busbw_gbps": 1e6, "baseline_busbw_gbps": 1e6}
    assert run(good, ranks=[2], **limits)[0].code == "collective.ok"


@pytest.mark.parametrize(
    ("limits", "code", "status", "words"),
    [
        ({"min_busbw_gbps": 15}, "busbw_low", "fail", "is 10.0 GB/s, and must be 15 GB/s"),
        ({"min_busbw_gbps": 10}, "ok", "pass", "10.00 GB/s bus bandwidth"),
        ({"min_busbw_gbps": 5, "warn_busbw_gbps": 20}, "busbw_low", "warn", "should be 20 GB/s"),
        ({"warn_busbw_gbps": 10}, "ok", "pass", ""),
        ({"baseline_busbw_gbps": 12}, "busbw_low", "warn", "this chassis had 12 GB/s, so it should be 10.8 GB/s"),
        ({"baseline_busbw_gbps": 11}, "ok", "pass", ""),
        ({"min_busbw_gbps": 15, "warn_busbw_gbps": 20, "baseline_busbw_gbps": 40}, "busbw_low", "fail", "must be"),
    ],
)
def test_bandwidth_against_minimum_warning_level_and_baseline(
    limits: dict[str, float], code: str, status: str, words: str
) -> None:
    # 4 ranks, 1 GB in 0.15 s at the median: algbw 6.67, busbw 10 GB/s. One repeat and one rank are faster.
    seconds = {"all_reduce": {"8": [1e-5] * 3, "1000000000": [0.1, 0.15, 0.15]}}
    results = [{"wrong": [], "seconds": seconds}] * 3
    results.append({"wrong": [], "seconds": {"all_reduce": {"8": [1e-5] * 3, "1000000000": [0.1, 0.1, 0.1]}}})
    settings = {**DEFAULTS, "max_bytes": 1000000000, **limits}
    verdict = collective._bandwidth(results, "x", {}, settings)
    assert (verdict.code, verdict.status) == (f"collective.{code}", status)
    assert words in verdict.message
    assert verdict.evidence["busbw_gbps"] == 10.0
    assert verdict.evidence["spread_s"] == [0.1, 0.15]


def test_more_ranks_than_gpus_is_unavailable(as_nccl: Path) -> None:
    ok, unavailable, skipped = run(as_nccl, backend="nccl", ranks=[2, 4, 8])
    assert ok.code == "collective.ok"
    assert (unavailable.code, unavailable.status) == ("collective.unavailable", "fail")
    assert "4 ranks need a GPU each, and torch sees 2" in unavailable.message
    assert skipped.status == "skipped"


def hanging(as_nccl: Path, more: str = "", condition: str = '"NCCL_P2P_DISABLE" not in os.environ') -> Path:
    """Make the all-reduce hang while the condition holds, and do something more otherwise."""
    path = tiny_stack.site_packages(as_nccl) / "torch" / "distributed.py"
    hang = f"{IN_ALL_REDUCE}    while {condition}:\n        time.sleep(1)\n{more}"
    path.write_text(path.read_text().replace(IN_ALL_REDUCE, hang))
    return as_nccl


def test_a_hang_that_ends_without_p2p_is_the_p2p_path(as_nccl: Path) -> None:
    verdict, skipped = run(hanging(as_nccl), backend="nccl", ranks=[2, 1], timeout_s=2.0, busy=list)
    assert (verdict.code, verdict.status) == ("collective.p2p_broken", "fail")
    assert "P2P path is broken" in verdict.message
    assert verdict.evidence["stages"]["0"] == "all-reduce of 8 bytes of int64"
    assert verdict.evidence["p2p_disabled"]["timed_out"] is False
    assert skipped.status == "skipped"


def test_a_hang_without_p2p_too_is_a_timeout(as_nccl: Path) -> None:
    (verdict,) = run(hanging(as_nccl, condition="True"), backend="nccl", ranks=[2], timeout_s=2.0)
    assert (verdict.code, verdict.status) == ("collective.timeout", "fail")
    assert "hangs with P2P disabled, too" in verdict.message


def test_a_second_arm_that_fails_in_another_way_tells_nothing(as_nccl: Path) -> None:
    generation = hanging(as_nccl, "    raise ValueError('no shared memory')\n")
    (verdict,) = run(generation, backend="nccl", ranks=[2], timeout_s=2.0)
    assert (verdict.code, verdict.status) == ("collective.timeout", "inconclusive")
    assert "cannot be told: with P2P disabled it failed in another way" in verdict.message
    assert "no shared memory" in str(verdict.evidence["p2p_disabled"]["results"])


def test_where_p2p_is_off_already_there_is_no_second_arm(as_nccl: Path) -> None:
    generation = hanging(as_nccl, condition="True")
    environment = {**read_environment(generation / "environment"), "NCCL_P2P_DISABLE": "1"}
    (verdict,) = run(generation, backend="nccl", ranks=[2], timeout_s=2.0, environment=environment)
    assert (verdict.code, verdict.status) == ("collective.timeout", "fail")
    assert "P2P" not in verdict.message


def test_gpus_that_stay_busy_after_a_hang_need_a_reset(as_nccl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "IDLE_WAIT_S", 1.5)
    asked: list[int] = []

    def busy() -> list[str]:
        asked.append(1)
        return ["GPU 1 is at 100 % with no process"]

    timeout, reset = run(hanging(as_nccl), backend="nccl", ranks=[2], timeout_s=2.0, busy=busy)
    assert len(asked) >= 2  # utilisation is an average: it is asked again before a reset is asked for
    assert (timeout.code, timeout.status) == ("collective.timeout", "inconclusive")
    assert "still busy" in timeout.message  # no second arm on wedged GPUs
    assert (reset.code, reset.status, reset.layer) == ("collective.gpus_not_idle", "needs-reset", "driver")
    assert "GPU 1 is at 100 % with no process" in reset.message


def test_gpus_are_asked_after_a_rank_died_and_not_after_a_pass(as_nccl: Path) -> None:
    asked: list[int] = []

    def busy() -> list[str]:
        asked.append(1)
        return []

    assert run(as_nccl, backend="nccl", ranks=[2], max_bytes=64, busy=busy)[0].code == "collective.ok"
    assert not asked
    hanging(as_nccl, "    if _rank == 1:\n        os.abort()\n", condition="False")
    (verdict,) = run(as_nccl, backend="nccl", ranks=[2], max_bytes=64, busy=busy)
    assert (verdict.code, len(asked)) == ("collective.rank_failed", 1)


def test_a_rank_that_cannot_be_killed_needs_a_reset() -> None:
    results = [{"killed": True, "idle_s": 9.0}, {"killed": True, "idle_s": 9.0, "unkillable": True}]
    arm = {"arm": "2", "ranks": 2, "results": results}
    outcome = Outcome(0, None, False, None, {}, "", "", 1.0, 0)
    found = collective._still_busy({"2": arm}, outcome, None)
    assert found == ["Rank 1 of 2 cannot be killed"]
    assert collective._gpus_not_idle(found).status == "needs-reset"


def test_which_gpus_are_stuck() -> None:
    gpus = [
        {"index": 0, "utilization": 0, "processes": [], "recovery_action": "none"},
        {"index": 1, "utilization": 100, "processes": []},
        {"index": 2, "utilization": 100, "processes": [7]},  # somebody's work
        {"index": 3, "error": {"code": 15, "name": "GPU_IS_LOST", "text": "GPU is lost"}},
        {"index": 4, "utilization": 0, "processes": [], "recovery_action": "gpu-reset"},
        {"index": 5, "utilization": None, "processes": None, "recovery_action": None},
        {"index": 6, "utilization": 100, "processes": None, "recovery_action": None},
        {"index": 7, "utilization": 0, "processes": None, "recovery_action": None},
        {"index": 8, "utilization": None, "processes": [], "recovery_action": None},
    ]
    assert busy_gpus({"error": None, "gpus": gpus}) == [
        "GPU 1 is at 100 % with no process",
        "GPU 3 answers GPU_IS_LOST: GPU is lost",
        "the driver asks for gpu-reset of GPU 4",
        "GPU 5 tells neither whether it works nor for whom",
        "GPU 6 is at 100 % and does not tell for whom",
    ]


@pytest.mark.parametrize(
    ("name", "code", "stuck"),
    [
        ("TIMEOUT", None, True),
        ("GPU_IS_LOST", 15, True),
        ("PYNVML_MISSING", None, False),
        ("LIBRARY_NOT_FOUND", 12, False),
    ],
)
def test_an_nvml_that_does_not_come_back_is_stuck_and_one_that_is_missing_is_not(
    name: str, code: int | None, stuck: bool
) -> None:
    assert bool(busy_gpus({"error": {"code": code, "name": name, "text": "It hung"}, "gpus": []})) is stuck


FILL_SHM = """    import mmap
    with open("/dev/shm/nccl-test", "wb+") as stream:
        stream.truncate(8 << 20)
        segment = mmap.mmap(stream.fileno(), 8 << 20)
        for at in range(0, 8 << 20, 4096):
            segment[at] = 1
"""
SAY_SHM = """    raise RuntimeError("Error while creating shared memory segment /dev/shm/nccl-x (size 9637888), error: "
                       "No space left on device (28)")
"""
UNDER_SMALL_SHM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from bedplate.node.stack.collective import check_collective
from bedplate.node.child import read_environment
settings = {"backend": "nccl", "ranks": [2], "max_bytes": 64, "timeout_s": 20}
found = check_collective(settings, python=sys.argv[2] + "/venv/bin/python", environment=read_environment(
    __import__("pathlib").Path(sys.argv[2]) / "environment"))
print(json.dumps([verdict.to_dict() for verdict in found]))
"""


def under_small_shm(generation: Path) -> list[Verdict]:
    """Run the check in a mount namespace of its own whose /dev/shm holds 1 MiB."""
    source = str(Path(collective.__file__).parents[2])
    script = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$0" -c "$@"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, UNDER_SMALL_SHM, source, str(generation)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert not done.returncode, done.stderr
    return [Verdict.from_dict(item) for item in json.loads(done.stdout)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("fault", [FILL_SHM, SAY_SHM], ids=["dies by SIGBUS", "says so"])
def test_a_full_shared_memory_is_named(as_nccl: Path, fault: str) -> None:
    hanging(as_nccl, fault, condition="False")
    (verdict,) = under_small_shm(as_nccl)
    assert (verdict.code, verdict.status, verdict.layer) == ("collective.shm_full", "fail", "node"), verdict
    assert "1 of 1 MiB free" in verdict.message
    assert "--shm-size" in verdict.action


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_small_shared_memory_that_is_not_needed_is_a_warning(as_nccl: Path) -> None:
    ok, shm = under_small_shm(as_nccl)
    assert ok.code == "collective.ok"
    assert (shm.code, shm.status, shm.layer) == ("collective.shm_full", "warn", "node")


def test_a_rank_that_fails_for_another_reason_does_not_blame_shared_memory(as_nccl: Path) -> None:
    hanging(as_nccl, "    raise ValueError('no link')\n", condition="False")
    assert run(as_nccl, backend="nccl", ranks=[2], max_bytes=64)[0].code == "collective.rank_failed"


def of_results(*results: dict[str, object], free: int = 64 << 30, stderr: str = "") -> Verdict:
    """The verdict of one group, for what its ranks left behind."""
    shm = {"before": {"free": free, "total": 64 << 30}}
    arm = {"arm": str(len(results)), "ranks": len(results), "gpus": [], "shm": shm, "seconds": 1.0, "timed_out": False}
    outcome = Outcome(0, None, False, {"arms": [{**arm, "results": list(results)}]}, {}, "", stderr, 1.0, 0)
    return judge(outcome, {**DEFAULTS, "ranks": [len(results)]}, {})[0]


SAYS_SHM = {"error": "RuntimeError: No space left on device (28)", "time": 1.0}
SIGBUS = {"signal": 7, "time": 1.0}


@pytest.mark.parametrize(
    ("result", "free", "code"),
    [
        (SAYS_SHM, 1 << 20, "shm_full"),
        (SIGBUS, 1 << 20, "shm_full"),
        (SAYS_SHM, 64 << 30, "rank_failed"),  # another file system is full
        (SIGBUS, 64 << 30, "rank_failed"),  # a broken disk, or hardware
        ({"signal": 11, "time": 1.0}, 1 << 20, "rank_failed"),
    ],
    ids=["says so", "dies of it", "says so of another place", "dies of something else", "dies another way"],
)
def test_shared_memory_is_blamed_where_it_is_short_and_missed(result: dict[str, object], free: int, code: str) -> None:
    assert of_results(result, {"killed": True}, free=free).code == f"collective.{code}"


@pytest.mark.parametrize(("total", "warns"), [(1 << 20, True), (64 << 30, False)])
def test_shared_memory_that_only_a_node_without_p2p_needs_is_a_warning(total: int, warns: bool) -> None:
    good = {"wrong": [], "seconds": {"all_reduce": {"8": [0.1]}}}
    arm = {"arm": "2", "ranks": 2, "gpus": [0, 1], "seconds": 0.1, "timed_out": False, "results": [good, good]}
    outcome = Outcome(0, None, False, {"arms": [{**arm, "shm": {"before": {"free": total, "total": total}}}]}, {},
                      "", "", 1.0, 0)  # fmt: skip
    ok, *rest = judge(outcome, {**DEFAULTS, "max_bytes": 8}, {})
    assert ok.code == "collective.ok"
    assert [(v.code, v.status, v.layer) for v in rest] == [("collective.shm_full", "warn", "node")] * warns
    assert [v.code for v in judge(outcome, {**DEFAULTS, "backend": "gloo", "max_bytes": 8}, {})] == ["collective.ok"]


@pytest.mark.parametrize(
    ("results", "rank"),
    [
        # Rank 0 sees the broken connection before the death of rank 1 is noticed.
        ([{"error": "RuntimeError: Connection reset", "time": 1.0}, {"signal": 11, "time": 1.1}], 1),
        ([{"error": "RuntimeError: Connection reset", "time": 1.0}, {"exit_code": 3, "time": 1.1}], 1),
        ([{"error": "RuntimeError: Connection reset", "time": 1.1}, {"error": "ValueError: no", "time": 1.0}], 1),
        ([{"killed": True}, {"error": "ValueError: no", "time": 1.0}], 1),
    ],
    ids=["a signal goes before an error", "so does an end", "the earlier error is the cause", "the killed had none"],
)
def test_the_rank_that_failed_first_is_blamed(results: list[dict[str, object]], rank: int) -> None:
    verdict = of_results(*results)
    assert (verdict.code, verdict.evidence["rank"]) == ("collective.rank_failed", rank)


def test_nothing_is_left_in_the_generation(good: Path) -> None:
    site = tiny_stack.site_packages(good)
    shutil.rmtree(site / "torch" / "__pycache__", ignore_errors=True)
    before = sorted(site.rglob("*"))
    run(good, ranks=[2], max_bytes=8)
    assert sorted(site.rglob("*")) == before


@given(st.sampled_from(sorted(rank_child.DTYPES)), st.integers(1, 16), st.data())
def test_every_partial_sum_is_exact_in_its_type(dtype: str, ranks: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, rank_child.PERIOD - 1))
    contributions = [rank_child.values(dtype, rank, ranks)[position] for rank in range(ranks)]
    total = sum(contributions)
    raw = rank_child.pack(dtype, [total])
    assert len(raw) == rank_child.DTYPES[dtype][0]
    if dtype == "int64":
        assert struct.unpack("<q", raw) == (total,)
    else:
        assert struct.unpack("<f", bytes(4 - len(raw)) + raw) == (float(total),)


@pytest.mark.parametrize("dtype", sorted(rank_child.DTYPES))
def test_patterns_depend_on_rank_and_position(dtype: str) -> None:
    patterns = [tuple(rank_child.values(dtype, rank, 8)) for rank in range(8)]
    assert len(set(patterns)) == 8
    for pattern in patterns:
        assert len(set(pattern)) >= min(rank_child.DTYPES[dtype][1] // 8, 1000)


@given(st.integers(0, 1 << 32))
def test_sizes_are_multiples_of_8_up_to_the_largest(max_bytes: int) -> None:
    found = rank_child.sizes(max_bytes)
    assert found == sorted(set(found))
    assert found[0] == 8
    assert all(size % 8 == 0 for size in found)
    assert found[-1] == max(8, max_bytes // 8 * 8)
    if max_bytes > 524296:
        assert {524288, 524296} <= set(found)


@given(st.binary(min_size=1, max_size=20), st.integers(0, 100))
def test_tile(pattern: bytes, size: int) -> None:
    tiled = rank_child.tile(pattern, size)
    assert len(tiled) == size
    assert all(tiled[i] == pattern[i % len(pattern)] for i in range(size))


class Slices:
    """A list with what first_difference uses of torch."""

    @staticmethod
    def equal(one: list[int], other: list[int]) -> bool:
        return one == other


@given(st.lists(st.integers(0, 1), min_size=1), st.data())
def test_first_difference(want: list[int], data: st.DataObject) -> None:
    got = list(want)
    wrong = data.draw(st.sets(st.integers(0, len(want) - 1), min_size=1))
    for index in wrong:
        got[index] = 9
    assert rank_child.first_difference(Slices, got, want) == min(wrong)


def test_a_launcher_that_dies_after_a_good_group_is_a_failure() -> None:
    result = {"wrong": [], "seconds": {"all_reduce": {"8": [0.1]}}}
    arm = {"arm": "2", "ranks": 2, "gpus": [0, 1], "shm": {"before": None}, "seconds": 0.1, "timed_out": False}
    answered = {"arms": [{**arm, "results": [result, result]}]}
    outcome = Outcome(None, "SIGKILL", False, answered, {"launcher": "starting 4 ranks"}, "", "", 1.0, 0)
    settings = {**DEFAULTS, "backend": "gloo", "ranks": [2, 4, 8], "max_bytes": 8}
    good, died, skipped = judge(outcome, settings, {})
    assert good.status == "pass"
    assert (died.code, died.status) == ("collective.rank_failed", "fail")
    assert "died by SIGKILL" in died.message
    assert (skipped.status, "x4 did not pass" in skipped.message) == ("skipped", True)


def test_what_is_missing_or_none_in_the_settings_is_the_default(good: Path) -> None:
    (verdict,) = run(good, ranks=[2], repeats=None, max_bytes=64)
    assert verdict.evidence["repeats"] == DEFAULTS["repeats"]
    assert verdict.evidence["operations"] == DEFAULTS["operations"]


def test_an_interpreter_that_is_not_there_is_a_verdict() -> None:
    (verdict,) = check_collective({"backend": "gloo"}, python="/no/such/python")
    assert (verdict.code, verdict.layer, verdict.subject) == ("node.child_failed", "stack", "all-reduce gloo x2")
