"""What a person reads at the end of a run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.controller.report import (
    OUTCOMES,
    age_s,
    as_text,
    ended,
    failure,
    figure,
    has_failed,
    host_lines,
    record,
    report,
    same_hardware,
    table,
    tidy,
)
from bedplate.node.verdicts import CODES, LAYERS, STATUSES, Verdict

GOOD = Verdict("import.ok", "pass", "stack", "torch", "Imports.", {"version": "2.9.1", "seconds": 1.25})
BAD = Verdict("import.error", "fail", "stack", "sgl_kernel", "It raised.", {}, "Look there.")
GPU = Verdict("gpu.count", "fail", "driver", "GPUs", "NVML sees 7.", {"seen": 7, "expected": 8}, "Look at dmesg.")
WARN = Verdict("stack.profile", "warn", "stack", "x", "Another one is asked for.", {}, "Bring it there.")
SKIP = Verdict("toolkit.not_managed", "skipped", "toolkit", "toolkit", "Nothing says which.")


def dicts(*verdicts: Verdict) -> list[dict[str, Any]]:
    return [verdict.to_dict() for verdict in verdicts]


# ---- the text ---------------------------------------------------------------------------------------------------


def test_what_fails_comes_first_with_what_to_do_then_the_table() -> None:
    assert report(dicts(GOOD, WARN, SKIP, BAD, replace(GPU, preexisting=True))) == (
        "5 checks: 1 fail, 1 fail (before), 1 warn, 1 pass, 1 skipped\n"
        "\n"
        "FAIL  sgl_kernel  import.error (stack)\n"
        "  It raised.\n"
        "  Do: Look there.\n"
        "  Going back to the previous stack can help.\n"
        "\n"
        "FAIL (BEFORE)  GPUs  gpu.count (driver)\n"
        "  NVML sees 7.\n"
        "  Do: Look at dmesg.\n"
        "\n"
        "WARN  x  stack.profile (stack)\n"
        "  Another one is asked for.\n"
        "  Do: Bring it there.\n"
        "\n"
        "layer    check                subject     result         figure\n"
        "driver   gpu.count            GPUs        fail (before)  7 of 8\n"
        "toolkit  toolkit.not_managed  toolkit     skipped        Nothing says which.\n"
        "stack    import.ok            torch       pass           2.9.1, 1.2 s\n"
        "stack    stack.profile        x           warn\n"
        "stack    import.error         sgl_kernel  fail"
    )


def test_a_simulated_node_says_so_and_nothing_is_no_table() -> None:
    assert report(dicts(replace(GOOD, simulated=True))).startswith("1 check: 1 pass (simulated GPU node)\n")
    assert report([]) == "0 checks: none"


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (replace(GOOD, evidence={"busbw_gbps": 41.1, "seconds": 3}), "41.10 GB/s"),
        (replace(GOOD, evidence={"seen": 8, "expected": 8}), "8 of 8"),
        (replace(GOOD, evidence={"judged": 12, "files": 40}), "12 of 40 files"),
        (replace(GOOD, evidence={"version": "", "seconds": 0.04}), "0.0 s"),
        (replace(GOOD, evidence={"version": "2.9.1"}), "2.9.1"),
        (replace(GOOD, evidence={"seen": "580.82.07"}), "580.82.07"),
        (replace(GOOD, evidence={"seconds": "no number", "busbw_gbps": None}), ""),
        (replace(SKIP, message="x" * 200), "x" * 69 + "..."),
    ],
)
def test_figures(verdict: Verdict, text: str) -> None:
    assert figure(verdict) == text


def test_long_subjects_are_cut_and_all_columns_stay_in_line() -> None:
    lines = as_text(table([replace(GOOD, subject="s" * 200), BAD])).splitlines()
    assert len({line.index(word) for line, word in zip(lines[1:], ("result", "pass", "fail"), strict=True)}) == 1
    assert max(map(len, lines)) < 120


def test_nothing_from_a_node_steers_the_terminal() -> None:
    hostile = replace(BAD, subject="\x1b[2Jx", message="a\x07b\x9bc\u202ed", action="\x1b]0;title\x07")
    text = report(dicts(hostile))
    assert not [char for char in text if char != "\n" and (ord(char) < 32 or 127 <= ord(char) < 160)]
    assert "\u202e" not in text
    assert tidy("a\tb\n") == "a\tb\n"


VERDICTS = st.lists(
    st.builds(
        Verdict,
        code=st.sampled_from(sorted(CODES)),
        status=st.sampled_from(STATUSES),
        layer=st.sampled_from(LAYERS),
        subject=st.text(),
        message=st.text(),
        evidence=st.dictionaries(
            st.sampled_from(["seconds", "seen", "expected", "busbw_gbps", "version", "judged", "files"]),
            st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.lists(st.integers())),
        ),
        action=st.text(),
        preexisting=st.booleans(),
    ),
    max_size=6,
)


@given(VERDICTS)
def test_any_verdicts_have_a_text_and_a_record_that_survives_json(verdicts: list[Verdict]) -> None:
    assert report(dicts(*verdicts))
    host = json.loads(json.dumps(record(dicts(*verdicts), host="h"), allow_nan=True))
    assert as_text(host_lines(host))
    assert has_failed(host) == (host["outcome"] == "failed")


# ---- records ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "about", "outcome"),
    [
        ((GOOD, SKIP, WARN), {}, "verified"),
        ((GOOD, BAD), {}, "failed"),
        ((replace(BAD, preexisting=True),), {}, "verified"),
        ((GOOD,), {"reason": "the disk is full"}, "failed"),
        ((GOOD,), {"outcome": "rolled_back"}, "rolled_back"),
    ],
)
def test_outcomes(verdicts: tuple[Verdict, ...], about: dict[str, str], outcome: str) -> None:
    host = record(dicts(*verdicts), **about)
    assert host["outcome"] == outcome
    assert has_failed(host) == (outcome != "verified")


def test_a_record_has_no_secrets() -> None:
    verdict = replace(BAD, evidence={"environment": {"HF_TOKEN": "hunter2"}, "stderr": "https://me:hunter2@x/"})
    assert "hunter2" not in json.dumps(record(dicts(verdict), reason="password=hunter2"))


def test_an_unknown_outcome_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown outcome 'fine'; known: " + ", ".join(OUTCOMES)):
        record([], outcome="fine")


def test_the_reason_is_shown_once() -> None:
    host = record(dicts(BAD), reason=f"no space left\n{failure({'verdicts': dicts(BAD)}, 't')['reason']}", host="h")
    text = as_text(host_lines(host))
    assert text.count("It raised.") == 1
    assert "no space left" in text


def test_the_evidence_is_named_with_its_place() -> None:
    host = record(dicts(BAD), host="gpu-01", evidence="evidence.tar.gz")
    assert as_text(host_lines(host, "reports/1/gpu-01")).endswith("\nEvidence: reports/1/gpu-01/evidence.tar.gz")
    assert "Evidence" not in as_text(host_lines(record(dicts(BAD), host="gpu-01")))


def test_the_age_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "uptime").write_text("1000.50 3.0\n")
    ticks = os.sysconf("SC_CLK_TCK")
    assert age_s({"pid_start": 990 * ticks}, tmp_path) == 10.5
    assert age_s({"pid_start": 2000 * ticks}, tmp_path) == 0.0


# ---- failures ---------------------------------------------------------------------------------------------------


def test_a_failed_verification_is_told_by_its_sentences() -> None:
    found = failure({"verdicts": dicts(GOOD, BAD), "msg": "x"}, "Verify")
    assert found["reason"] == "sgl_kernel: It raised. Look there."
    assert (found["task"], found["needs_reboot"]) == ("Verify", False)


def test_a_failed_tool_is_told_by_the_end_of_its_output() -> None:
    found = failure({"msg": "uv failed", "stderr": "\n".join(map(str, range(50)))}, "")
    (verdict,) = found["verdicts"]
    assert verdict["message"].splitlines() == ["uv failed", *map(str, range(38, 50))]
    assert found["reason"] == f"{verdict['message']}\n{verdict['action']}"
    told = as_text(host_lines(record(found["verdicts"], reason=found["reason"], host="h")))
    assert told.count("uv failed") == told.count("\n  49") == 1


def test_only_a_reboot_is_missing() -> None:
    waiting = Verdict("driver.reboot_pending", "needs-reboot", "driver", "driver", "Older.")
    assert failure({"verdicts": dicts(waiting, GOOD)}, "")["needs_reboot"]
    assert not failure({"verdicts": dicts(waiting, BAD)}, "")["needs_reboot"]


def test_a_gpu_that_fell_off_is_no_pending_reboot() -> None:
    """It stays where it is, too, but something is broken, and the evidence is wanted."""
    fallen = Verdict("gpu.after_load", "needs-reboot", "node", "GPU 3", "It does not answer any more.")
    found = failure({"verdicts": dicts(fallen, GOOD)}, "Verify")
    assert (found["needs_reboot"], found["hardware"]) == (True, True)
    end = ended(found, {}, "b")
    assert end["outcome"] == "needs_person"
    assert "nothing is broken" not in end["text"]
    assert "read the evidence" in end["text"]


BUS = Verdict("gpu.pci_count", "fail", "node", "GPUs on the bus", "7.", {"pci": ["a"], "nvml": ["a"]}, "Reseat it.")


@pytest.mark.parametrize(
    ("verdicts", "hardware"),
    [
        ((GPU, GOOD), True),
        ((GPU, BUS, WARN), True),
        ((Verdict("gpu.off_bus", "needs-reboot", "node", "GPU 3", "Off."), GPU), True),
        ((GPU, BAD), False),  # a stack that does not import may be cured by going back
        ((Verdict("gpu.init_failed", "fail", "driver", "GPU 3", "No."), GPU), False),
        ((replace(BUS, evidence={"pci": ["a", "b"], "nvml": ["a"]}), GPU), False),  # the driver may be at fault
        ((Verdict("packages.kernel_change", "fail", "driver", "linux", "No."),), False),  # nothing was changed yet
        ((replace(GPU, preexisting=True), GOOD), False),
        # The live generation is not asked for a collective, so it cannot tell that this one is the node's.
        ((Verdict("collective.gpus_not_idle", "needs-reset", "node", "GPUs", "Busy."),), False),
    ],
)
def test_only_hardware_is_at_fault(verdicts: tuple[Verdict, ...], hardware: bool) -> None:
    assert failure({"verdicts": dicts(*verdicts)}, "")["hardware"] is hardware


@pytest.mark.parametrize(
    ("failed", "live", "same"),
    [
        ((GPU, BUS), (GPU, BUS, GOOD), True),
        ((GPU,), (GPU, BUS), True),
        ((GPU, BUS), (GPU,), False),
        ((GPU,), (replace(GPU, status="pass"),), False),  # the new profile expects what the node never had
        ((GPU,), (GPU, BAD), False),  # the live stack does not load with the new driver
        ((GPU, BAD), (GPU,), False),
        ((replace(GPU, preexisting=True), BUS), (GPU, BUS), True),
        ((), (), False),
    ],
)
def test_a_node_stays_where_going_back_cures_nothing(
    failed: tuple[Verdict, ...], live: tuple[Verdict, ...], same: bool
) -> None:
    assert same_hardware(dicts(*failed), dicts(*live)) is same


FAILED = {"task": "Verify", "reason": "It raised.", "verdicts": [], "needs_reboot": False, "hardware": False}
BACK = {"current": "old-1", "verdicts": dicts(GOOD), "simulated": True}


@pytest.mark.parametrize(
    ("failed", "outcome", "word", "words"),
    [
        ({}, {}, "needs_person", ["Going back did not end either: this node needs a person"]),
        ({}, {"current": None, "verdicts": []}, "rolled_back", ["has no live generation"]),
        ({"needs_reboot": True}, {}, "failed", ["nothing is broken: reboot the node"]),
        ({"hardware": True, "stays_on": "old-1"}, {}, "needs_person", ["The node is on old-1:", "is not verified"]),
        ({}, BACK, "rolled_back", ["The node is on old-1, verified again (simulated GPU node):", "2.9.1, 1.2 s"]),
        (
            {},
            {"current": "old-1", "verdicts": dicts(BAD)},
            "needs_person",
            ["does NOT verify; a person is needed:\nsgl_kernel: It raised."],
        ),
        (
            {"way_back": {"task": "Install", "reason": "No room."}},
            {},
            "needs_person",
            ["Going back failed in: Install\n\nNo room.", "needs a person"],
        ),
        # The hook after going back: the node is well, and somebody must look at the service.
        ({"way_back": {"task": "Start", "reason": "No port."}}, BACK, "needs_person", ["No port.", "verified again"]),
    ],
)
def test_where_the_node_is_after_a_failure(
    failed: dict[str, Any], outcome: dict[str, Any], word: str, words: list[str]
) -> None:
    end = ended({**FAILED, **failed}, outcome, "new-1")
    assert end["outcome"] == word
    assert end["text"].startswith("new-1 did not go live. Failed in: Verify\n\nIt raised.\n")
    for part in words:
        assert part in end["text"]


def test_the_record_says_what_failed_on_the_way_back_too() -> None:
    way_back = {"task": "Install", "reason": "No room."}
    assert ended({**FAILED, "way_back": way_back}, {}, "b")["reason"] == (
        "It raised.\nGoing back failed in: Install\nNo room."
    )
    unsound = ended(FAILED, {"current": "old-1", "verdicts": dicts(BAD)}, "b")
    assert unsound["reason"] == "It raised.\nold-1 does NOT verify:\nsgl_kernel: It raised. Look there."


def test_a_password_in_an_address_does_not_reach_the_journal() -> None:
    result = {"msg": "uv found nothing at https://deploy:hunter2@mirror.example/simple", "rc": 2}
    found = failure(result, "Install", "ansible.builtin.fail")
    assert "hunter2" not in json.dumps(found)
    assert "mirror.example/simple" in found["reason"]
