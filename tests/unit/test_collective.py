"""The probe runs for real on the tiny stack; its faults are wheels built wrong, or a rank that really dies."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import tiny_stack
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node import rank_child
from bedplate.node.child import Outcome, read_environment
from bedplate.node.collective import check_collective, judge
from bedplate.node.verdicts import Verdict


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stack.build_wheels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def good(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stack.make_generation(tmp_path_factory.mktemp("generations") / "good", tiny)


def run(generation: Path, **kwargs: object) -> list[Verdict]:
    arguments = {
        "backend": "gloo",
        "ranks": [2, 4],
        "max_bytes": 1 << 20,
        "timeout_s": 30.0,
        "environment": read_environment(generation / "environment"),
        **kwargs,
    }
    return check_collective(python=str(generation / "venv/bin/python"), **arguments)


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
    assert (skipped.code, skipped.status) == ("collective.unavailable", "skipped")
    assert "all-reduce gloo x2 did not pass" in skipped.message


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
    """A tiny torch that takes "nccl" for its transport and says that it sees two GPUs."""
    generation = tiny_stack.make_generation(tmp_path / "nccl", tiny)
    torch = tiny_stack.site_packages(generation) / "torch"
    for name, old, new in (
        ("distributed.py", "    return False", "    return True"),
        ("distributed.py", 'if backend != "gloo"', 'if backend != "nccl"'),
        ("cuda.py", "    return 0", "    return 2"),
        ("__init__.py", 'if device != "cpu"', "if False"),
    ):
        text = (torch / name).read_text()
        assert old in text
        (torch / name).write_text(text.replace(old, new))
    with (torch / "cuda.py").open("a") as stream:
        stream.write("\n\ndef set_device(index):\n    pass\n\n\ndef synchronize():\n    pass\n")
    return generation


def test_bandwidth_is_judged_for_nccl_only(as_nccl: Path, good: Path) -> None:
    (verdict,) = run(as_nccl, backend="nccl", ranks=[2], min_busbw_gbps=1e6)
    assert (verdict.code, verdict.status) == ("collective.busbw_low", "fail")
    assert "must be 1e+06 GB/s or more" in verdict.message
    assert run(as_nccl, backend="nccl", ranks=[2], min_busbw_gbps=0.0)[0].code == "collective.ok"
    assert run(good, ranks=[2], min_busbw_gbps=1e6)[0].code == "collective.ok"


def test_more_ranks_than_gpus_is_unavailable(as_nccl: Path) -> None:
    ok, unavailable, skipped = run(as_nccl, backend="nccl", ranks=[2, 4, 8])
    assert ok.code == "collective.ok"
    assert (unavailable.code, unavailable.status) == ("collective.unavailable", "fail")
    assert "4 ranks need a GPU each, and torch sees 2" in unavailable.message
    assert skipped.status == "skipped"


@pytest.mark.parametrize(
    ("condition", "words"),
    [('"NCCL_P2P_DISABLE" not in os.environ', "P2P path is broken"), ("True", "fails with P2P disabled, too")],
)
def test_a_nccl_hang_gets_a_second_arm_without_p2p(as_nccl: Path, condition: str, words: str) -> None:
    path = tiny_stack.site_packages(as_nccl) / "torch" / "distributed.py"
    hang = f"{IN_ALL_REDUCE}    while {condition}:\n        time.sleep(1)\n"
    path.write_text(path.read_text().replace(IN_ALL_REDUCE, hang))
    (verdict,) = run(as_nccl, backend="nccl", ranks=[2], timeout_s=2.0)
    assert verdict.code == "collective.timeout"
    assert words in verdict.message
    assert verdict.evidence["stages"]["0"] == "all-reduce of 8 bytes of int64"


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
    result = {"wrong": [], "seconds": [0.1]}
    answered = {"arms": [{"arm": "2", "seconds": 0.1, "timed_out": False, "results": [result, result]}]}
    outcome = Outcome(None, "SIGKILL", False, answered, {"launcher": "starting 4 ranks"}, "", "", 1.0, 0)
    good, died, skipped = judge(outcome, backend="gloo", ranks=[2, 4, 8], max_bytes=8, min_busbw_gbps=0)
    assert good.status == "pass"
    assert (died.code, died.status) == ("collective.rank_failed", "fail")
    assert "died by SIGKILL" in died.message
    assert (skipped.status, "x4 did not pass" in skipped.message) == ("skipped", True)
