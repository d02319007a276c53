"""Lines of the kernel log: the forms the driver writes, what each Xid asks for, and any garbage."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.hardware import xid

GPU = "0000:41:00.0"


def log(*lines: str, **changes: Any) -> dict[str, Any]:
    return {"source": "kmsg", "complete": True, "reason": "", **xid.read_log(lines), **changes}


def statuses(*lines: str, recovered: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    return [(v.code, v.status, v.subject) for v in xid.judge(log(*lines), recovered)]


@pytest.mark.parametrize(
    ("line", "bus_id", "number", "pid", "process", "seconds"),
    [
        (
            "NVRM: Xid (PCI:0000:41:00): 79, pid=1234, name=python3, GPU has fallen off the bus.",
            GPU, 79, 1234, "python3", None,
        ),
        (
            "4,812,98765432,-;NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off.",
            GPU, 79, None, None, 98.765432,
        ),
        ("[   98.765432] NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.", GPU, 79, None, None, 98.765432),
        ("[   98.765432] n1 kernel: NVRM: Xid (PCI:0000:41:00 GPU-I:05): 95, x", GPU, 95, None, None, 98.765432),
        ("NVRM: Xid (PCI:00000000:C1:00.0): 13, pid=7, name=a b, Exception", "0000:c1:00.0", 13, 7, "a b", None),
        ("NVRM: Xid (PCI:0001:41:00): 119", "0001:41:00.0", 119, None, None, None),
    ],
)  # fmt: skip
def test_forms_of_the_line(
    line: str, bus_id: str, number: int, pid: int | None, process: str | None, seconds: float | None
) -> None:
    (entry,) = xid.read_log([line])["xids"]
    assert (entry["bus_id"], entry["xid"], entry["pid"], entry["process"]) == (bus_id, number, pid, process)
    assert entry["first_s"] == seconds


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.82.07",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        "audit: a program wrote 'Xid (PCI:0000:41:00): 79'",
        "NVRM: Xid (PCI:0000:41:00)",
        "",
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    assert xid.read_log([line]) == {"xids": [], "init_failures": [], "link_down": []}


# "Resolution Bucket (Immediate Action)" of NVIDIA's catalogue, and the Xids it leaves open (xid.py says why).
CLASSES = {
    "application": (8, 11, 13, 25, 31, 32, 39, 60, 68, 72, 75, 77, 80, 82, 86, 88, 94, 96, 105, 126, 135, 139, 159),
    "reset": (46, 48, 62, 74, 95, 109, 110, 119, 120, 136, 140, 143, 144, 150, 155, 156, 158, 167, 169, 171, 172, 175),
    "reboot": (79, 151),
    "rma": (54, 64, 157, 168),
    "note": (14, 43, 45, 63, 66, 92, 106, 121, 141, 154, 160),
    "unknown": (1, 15151),
}
STATUS = {
    "application": "warn",
    "reset": "needs-reset",
    "reboot": "needs-reboot",
    "rma": "fail",
    "note": "pass",
    "unknown": "warn",
}


@pytest.mark.parametrize(
    ("number", "class_", "status"), [(n, name, STATUS[name]) for name, numbers in CLASSES.items() for n in numbers]
)
def test_what_an_xid_asks_for(number: int, class_: str, status: str) -> None:
    assert xid.class_of(number) == class_
    (verdict,) = xid.judge(log(f"NVRM: Xid (PCI:0000:41:00): {number}, words"))
    assert (verdict.code, verdict.status, verdict.layer) == ("gpu.xid", status, "node")
    assert (status == "pass") != bool(verdict.action)
    if status != "pass":
        assert verdict.subject == f"GPU {GPU}"
        assert f"Xid {number} " in verdict.message


def test_the_worst_xid_of_a_gpu_counts_and_each_gpu_has_its_own() -> None:
    lines = [
        "NVRM: Xid (PCI:0000:41:00): 31, pid=5, name=python3, MMU Fault",
        "NVRM: Xid (PCI:0000:41:00): 119, pid=5, name=python3, Timeout after 6s of waiting for RPC response from GPU",
        "NVRM: Xid (PCI:0000:41:00): 119, pid=5, name=python3, Timeout after 6s of waiting for RPC response from GPU",
        "NVRM: Xid (PCI:0000:42:00): 31, pid=6, name=python3, MMU Fault",
    ]
    first, second = xid.judge(log(*lines))
    assert (first.subject, first.status) == ("GPU 0000:41:00.0", "needs-reset")
    assert first.message == "Xid 119 (the GSP did not answer) 2 times since boot."
    assert "nvidia-smi --gpu-reset -i 0000:41:00.0" in first.action
    assert [(entry["xid"], entry["count"]) for entry in first.evidence["xids"]] == [(31, 1), (119, 2)]
    assert (second.subject, second.status) == ("GPU 0000:42:00.0", "warn")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "needs-reset"),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "needs-reboot"),
        ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", "needs-reset"),
        ("GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "needs-reset"),
        ("GPU recovery action changed from 0x0 (None) to 0x5 (IMEX)", "needs-reset"),
        ("GPU recovery action changed from 0x0 (None) to 0x6 (Bus Reset)", "needs-reset"),
        ("GPU recovery action changed from 0x0 (None) to 0x7 (System Reboot)", "needs-reboot"),
        ("GPU recovery action changed from 0x0 (None) to 0xff (something new)", "warn"),
        ("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", "pass"),
        ("words of a later driver", "pass"),
    ],
)
def test_xid_154_carries_its_own_action(text: str, status: str) -> None:
    assert statuses(f"NVRM: Xid (PCI:0000:41:00): 154, pid='<unknown>', name=<unknown>, {text}")[0][1] == status


def test_the_last_xid_154_counts() -> None:
    line = "NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from {} to {}"
    lines = [
        line.format("0x0 (None)", "0x1 (GPU Reset Required)"),
        line.format("0x1 (GPU Reset Required)", "0x0 (None)"),
    ]
    assert statuses(*lines)[0][1] == "pass"


@pytest.mark.parametrize(("number", "status"), [(119, "warn"), (79, "warn"), (64, "fail"), (31, "warn")])
def test_a_gpu_that_has_recovered_since_is_a_warning(number: int, status: str) -> None:
    assert statuses(f"NVRM: Xid (PCI:0000:41:00): {number}, x", recovered=(GPU,)) == [("gpu.xid", status, f"GPU {GPU}")]


def test_no_xid_passes_and_an_unreadable_log_is_skipped() -> None:
    assert statuses("NVRM: loading") == [("gpu.xid", "pass", "GPUs")]
    assert xid.judge(log())[0].message == "No Xid since boot."
    assert xid.judge(log("NVRM: Xid (PCI:0000:41:00): 63, x"))[0].message == "No Xid since boot asks for anything."
    (verdict,) = xid.judge(log(source=None, complete=False, reason="/dev/kmsg: Operation not permitted"))
    assert (verdict.code, verdict.status) == ("gpu.xid", "skipped")
    assert "Operation not permitted" in verdict.message


def test_a_log_that_does_not_reach_back_says_so() -> None:
    (verdict,) = xid.judge(log(complete=False, reason="The kernel's ring buffer no longer reaches back to the boot."))
    assert verdict.status == "pass"
    assert "no longer reaches back" in verdict.message


def test_adapters_that_do_not_start_and_links_that_go_down() -> None:
    found = xid.read_log(
        [
            "NVRM: GPU 0000:41:00.0: RmInitAdapter failed! (0x62:0xffff:2477)",
            "NVRM: GPU 0000:41:00.0: rm_init_adapter failed, device minor number 0",
            "pcieport 0000:40:01.1: pciehp: Slot(3-1): Link Down",
        ]
    )
    (failure,) = found["init_failures"]
    assert (failure["bus_id"], failure["count"]) == (GPU, 2)
    (down,) = found["link_down"]
    assert (down["bus_id"], down["slot"]) == ("0000:40:01.1", "3-1")


LINES = [
    *("NVRM: ", "Xid (PCI:", "0000:41:00", "GPU-I:05", "): ", "79", ", pid=", "'<unknown>'", "12", ", name=", "python"),
    *("154", "GPU ", "RmInitAdapter failed!", "changed from 0x0", " to 0x", "ff", "pcieport ", "pciehp: Slot("),
    *("): Link Down", "4,812,98765432,-;", "[   98.765432]", "\x00", "9999999999999"),
]
PIECES = st.sampled_from(LINES)


@given(st.lists(st.one_of(st.text(), st.lists(PIECES).map("".join)), max_size=20))
def test_any_log_can_be_read_and_judged(lines: list[str]) -> None:
    found = log(*lines)
    assert all(entry["class"] in xid.CLASSES and entry["count"] >= 1 for entry in found["xids"])
    verdicts = xid.judge(found)
    assert verdicts
    assert {verdict.code for verdict in verdicts} == {"gpu.xid"}
