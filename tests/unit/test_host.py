"""Whole nodes: a directory plays one (host_tree.py), something in it is broken, and the verdict names it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from host_tree import ACS_REDIRECTING, BAR1_MIB, HostTree, aer, gpu_bus_id, healthy_nvml, resource
from hypothesis import given, settings
from hypothesis import strategies as st

import bedplate_gpu_info
from bedplate.node.hardware import host, host_child
from bedplate.node.verdicts import CODES, Verdict, failing

EXPECT: dict[str, Any] = {
    "gpus": 8,
    "gpu_ids": ["10de:2bb5"],
    "arch": "sm_120",
    "bar1_min_mib": 98304,
    "pcie_width": 16,
    "ecc": True,
    "iommu": "pt",
}
GPU3 = "GPU 0000:31:00.0"

Change = Callable[[HostTree], object]


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return report_of(HostTree(tmp_path_factory.mktemp("healthy")))


def report_of(tree: HostTree) -> dict[str, Any]:
    """What ``inspect`` returns, without the child process; tests of reading (below) have it."""
    raw: dict[str, Any] = {}
    host_child.main({"root": str(tree.root)}, raw.update, lambda *_: None)
    report = host.interpret(raw, str(tree.root))
    # These two are this machine's, whatever the root.
    report["shm"] = {"total_bytes": 64 << 30, "free_bytes": 64 << 30}
    report["memlock_bytes"] = None
    return report


def bad(verdicts: list[Verdict]) -> list[tuple[str, str, str]]:
    return [(v.code, v.status, v.subject) for v in verdicts if v.status not in ("pass", "skipped")]


def with_gpu3(nvml: dict[str, Any], **changes: Any) -> dict[str, Any]:
    nvml["gpus"][3].update(changes)
    return nvml


# ---- a node that is well


def test_a_healthy_node_has_nothing_to_say(healthy: dict[str, Any]) -> None:
    verdicts = host.judge(healthy, healthy_nvml(), EXPECT)
    assert bad(verdicts) == []
    skipped = [(v.code, v.message) for v in verdicts if v.status == "skipped"]
    assert skipped == [
        ("gpu.link_speed", "The GPUs are at rest, when links slow down; the speed counts under load only.")
    ]
    assert verdicts[0].message == "The PCI bus has 8 and so does NVML."
    assert {v.code for v in verdicts} >= {"gpu.pci_count", "gpu.link_width", "gpu.xid", "node.acs", "node.iommu"}


def test_without_expectations_a_healthy_node_passes_too(healthy: dict[str, Any]) -> None:
    assert bad(host.judge(healthy, healthy_nvml(), {"gpus": None})) == []


def test_before_any_driver_the_bus_is_judged(tree: HostTree) -> None:
    for index in range(8):
        tree.bind(index, None)
    verdicts = host.judge(report_of(tree), None, EXPECT)
    assert bad(verdicts) == []
    assert (verdicts[0].message, verdicts[0].evidence["nvml"]) == ("The PCI bus has 8.", None)
    assert {v.code: v.status for v in verdicts}["gpu.bar1"] == "pass"
    assert "gpu.ecc" not in {v.code for v in verdicts}


def test_what_neither_the_bus_nor_nvml_tells_is_skipped(healthy: dict[str, Any]) -> None:
    gpus = [{**gpu, "answers": None, "width": None, "bars": []} for gpu in healthy["gpus"]]
    verdicts = host.judge({**healthy, "gpus": gpus}, None, EXPECT)
    statuses = {v.code: v.status for v in verdicts}
    assert [statuses[code] for code in ("gpu.off_bus", "gpu.link_width", "gpu.bar1")] == ["skipped"] * 3
    assert bad(verdicts) == []


def test_before_any_driver_the_ids_are_those_of_the_bus(tree: HostTree) -> None:
    (verdict,) = [v for v in host.judge(report_of(tree), None, EXPECT) if v.code == "gpu.ids"]
    assert verdict.status == "pass"
    tree.gpu_file(3, "device", "0x2684\n")
    (verdict,) = [v for v in host.judge(report_of(tree), None, EXPECT) if v.code == "gpu.ids"]
    assert (verdict.status, verdict.message) == ("fail", "On the bus 0000:31:00.0 is 10de:2684; expected: 10de:2bb5.")


def test_a_node_that_needs_no_gpu(tmp_path: Path) -> None:
    report = report_of(HostTree(tmp_path, gpus=0))
    (verdict,) = host.judge(report, None, {"gpus": 0})
    assert (verdict.code, verdict.status) == ("gpu.pci_count", "pass")
    (verdict,) = host.judge(report, None, {"gpus": None})
    assert (verdict.code, verdict.status) == ("gpu.pci_count", "skipped")


def test_simulated_gpus_without_their_bus_are_not_counted(tmp_path: Path) -> None:
    verdicts = host.judge(report_of(HostTree(tmp_path, gpus=0)), healthy_nvml(), EXPECT)
    assert (verdicts[0].code, verdicts[0].status) == ("gpu.pci_count", "skipped")
    assert failing(verdicts) == []


def test_virtual_functions_are_parts_of_a_gpu(tree: HostTree) -> None:
    for index in (6, 7):
        (tree.path(gpu_bus_id(index)) / "physfn").symlink_to(f"../{gpu_bus_id(5)}")
    assert len(host.gpus_on_bus(str(tree.root))) == len(report_of(tree)["gpus"]) == 6


# ---- the bus: broken trees

TREES: dict[str, tuple[Change, list[tuple[str, str, str]]]] = {
    "a GPU too few, and a driver that has lost none": (
        lambda tree: tree.remove_gpu(3),
        [("gpu.pci_count", "fail", "GPUs on the bus")],
    ),
    "a GPU that answers with ones": (
        lambda tree: (
            tree.gpu_file(3, "config", b"\xff" * 4096),
            tree.gpu_file(3, "current_link_width", "63\n"),
            tree.gpu_file(3, "current_link_speed", "Unknown\n"),
        ),
        [("gpu.off_bus", "needs-reboot", GPU3)],
    ),
    "half the lanes": (
        lambda tree: tree.gpu_file(3, "current_link_width", "8\n"),
        [("gpu.link_width", "fail", GPU3)],
    ),
    "generation 1 at rest is normal": (
        lambda tree: tree.gpu_file(3, "current_link_speed", "2.5 GT/s PCIe\n"),
        [],
    ),
    "a BAR that the BIOS gave no place": (
        lambda tree: tree.gpu_file(3, "resource", f"0x0 {(BAR1_MIB << 20) - 1:#x} 0x14220c\n"),
        [("gpu.bar1", "fail", GPU3)],
    ),
    "ACS redirects on one switch port": (
        lambda tree: tree.set_acs("0000:23:10.0", ACS_REDIRECTING),
        [("node.acs", "warn", "ACS")],
    ),
    "the IOMMU translates": (
        lambda tree: [tree.iommu_type(index, "DMA-FQ") for index in range(8)],
        [("node.iommu", "fail", "IOMMU")],
    ),
    "no IOMMU is as good as pass-through": (lambda tree: tree.no_iommu(), []),
    "fatal PCIe errors": (
        lambda tree: tree.gpu_file(3, "aer_dev_fatal", aer("fatal", DLP=1)),
        [("node.aer", "fail", "PCIe 0000:31:00.0")],
    ),
    "nonfatal PCIe errors": (
        lambda tree: tree.gpu_file(3, "aer_dev_nonfatal", aer("nonfatal", CmpltTO=2)),
        [("node.aer", "warn", "PCIe 0000:31:00.0")],
    ),
    "a link that retrains all the time": (
        lambda tree: tree.gpu_file(3, "aer_dev_correctable", aer("correctable", RxErr=20000)),
        [("node.aer", "warn", "PCIe 0000:31:00.0")],
    ),
    "a few correctable errors": (
        lambda tree: tree.gpu_file(3, "aer_dev_correctable", aer("correctable", RxErr=3)),
        [],
    ),
    "GSP timeout": (
        lambda tree: tree.log("NVRM: Xid (PCI:0000:31:00): 119, pid=9, name=python3, Timeout after 6s of waiting"),
        [("gpu.xid", "warn", GPU3)],  # NVML says that nothing has to be done now
    ),
    "a slot that lost its link": (
        lambda tree: tree.log("pcieport 0000:23:10.0: pciehp: Slot(7): Link Down"),
        [("node.link_down", "warn", "PCIe slots")],
    ),
    "nouveau": (lambda tree: tree.module("nouveau"), [("node.nouveau", "warn", "nouveau")]),
    "HMM on": (lambda tree: tree.hmm("N"), [("node.hmm", "warn", "nvidia_uvm")]),
    "forward compatibility in the loader's path": (
        lambda tree: (
            tree.write("usr/local/cuda-13.0/compat/libcuda.so.1", ""),
            tree.write("etc/ld.so.conf.d/compat.conf", "# of an image\n/usr/local/cuda-13.0/compat\n"),
        ),
        [("node.forward_compat", "warn", "loader")],
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_a_broken_node_is_named(tree: HostTree, name: str) -> None:
    change, expected = TREES[name]
    change(tree)
    verdicts = host.judge(report_of(tree), healthy_nvml(), EXPECT)
    assert bad(verdicts) == expected
    for verdict in verdicts:
        if verdict.status not in ("pass", "skipped"):
            assert verdict.action
            assert verdict.evidence
            assert not CODES[verdict.code].rollback_helps, "hardware must never cause a rollback of software"


def test_the_driver_that_has_a_missing_gpu_is_named(tree: HostTree) -> None:
    tree.bind(3, "vfio-pci")
    nvml = healthy_nvml()
    del nvml["gpus"][3]
    (verdict,) = [v for v in host.judge(report_of(tree), nvml, EXPECT) if v.code == "gpu.pci_count"]
    assert verdict.status == "fail"
    assert verdict.message == "The PCI bus has 8, and NVML sees 7; not seen: 0000:31:00.0 (driver vfio-pci)."


def test_a_gpu_off_the_bus_without_a_xid(tree: HostTree) -> None:
    """The bus and NVML agree, and both have one too few."""
    tree.remove_gpu(3)
    nvml = healthy_nvml()
    del nvml["gpus"][3]
    (verdict,) = [v for v in host.judge(report_of(tree), nvml, EXPECT) if v.code == "gpu.pci_count"]
    assert (verdict.status, verdict.message) == ("fail", "The PCI bus has 7, and 8 are expected.")
    assert gpu_bus_id(3) not in verdict.evidence["pci"]


def test_more_gpus_than_declared_is_a_mistake_of_the_inventory(healthy: dict[str, Any]) -> None:
    verdict = host.judge(healthy, healthy_nvml(), {"gpus": 4})[0]
    assert verdict.status == "fail"
    assert "inventory" in verdict.action


def test_a_slot_with_fewer_lanes_is_a_warning_unless_the_profile_wants_more(tree: HostTree) -> None:
    tree.gpu_file(3, "current_link_width", "8\n")
    for bridge in tree.bridges_above(3)[-1:]:
        tree.write(str(tree.path(bridge).relative_to(tree.root) / "max_link_width"), "8\n")
    report = report_of(tree)
    assert bad(host.judge(report, healthy_nvml(), {**EXPECT, "pcie_width": None})) == [("gpu.link_width", "warn", GPU3)]
    assert bad(host.judge(report, healthy_nvml(), EXPECT)) == [("gpu.link_width", "fail", GPU3)]
    assert bad(host.judge(report, healthy_nvml(), {**EXPECT, "pcie_width": 8})) == []


def test_half_the_lanes_without_an_expectation(tree: HostTree) -> None:
    tree.gpu_file(3, "current_link_width", "8\n")
    verdicts = host.judge(report_of(tree), healthy_nvml(), {**EXPECT, "pcie_width": None})
    assert bad(verdicts) == [("gpu.link_width", "fail", GPU3)]


@pytest.mark.parametrize(("minimum", "status"), [(98304, "fail"), (None, "fail")])
def test_256_mib_of_bar1(tree: HostTree, minimum: int | None, status: str) -> None:
    for index in range(8):
        tree.gpu_file(index, "resource", resource(256))
    nvml = healthy_nvml()
    for gpu in nvml["gpus"]:
        gpu["bar1_bytes"] = 256 << 20
    for answers in (nvml, None):  # with the driver, and before there is one
        verdicts = [
            v for v in host.judge(report_of(tree), answers, {**EXPECT, "bar1_min_mib": minimum}) if v.code == "gpu.bar1"
        ]
        assert [v.status for v in verdicts] == [status] * 8
        assert "above-4G" in verdicts[0].action


def test_bar1_smaller_than_the_memory_is_a_warning(healthy: dict[str, Any]) -> None:
    nvml = with_gpu3(healthy_nvml(), bar1_bytes=65536 << 20)
    assert bad(host.judge(healthy, nvml, {**EXPECT, "bar1_min_mib": None})) == [("gpu.bar1", "warn", GPU3)]
    assert bad(host.judge(healthy, nvml, EXPECT)) == [("gpu.bar1", "fail", GPU3)]


@pytest.mark.parametrize(
    ("types", "cmdline", "mode"),
    [
        ("identity", "", "pt"),
        ("DMA", "iommu=pt", "translated"),  # what is live counts, not what was asked for
        ("DMA-FQ", "", "translated"),
        ("unmanaged", "", "vfio"),
        ("auto", "quiet iommu=pt", "pt"),
        ("auto", "iommu.passthrough=1", "pt"),
        ("auto", "iommu.passthrough=1 iommu=nopt", "pt"),
        ("auto", "intel_iommu=on", "unknown"),
        (None, "amd_iommu=on", "off"),
    ],
)
def test_modes_of_the_iommu(tree: HostTree, types: str | None, cmdline: str, mode: str) -> None:
    for index in range(8):
        tree.iommu_type(index, types)
    tree.cmdline(cmdline)
    assert report_of(tree)["iommu"]["mode"] == mode


@pytest.mark.parametrize(
    ("mode", "wanted", "status"),
    [
        ("off", "off", "pass"),
        ("pt", "off", "fail"),
        ("translated", "pt", "fail"),
        ("translated", "any", "pass"),
        ("unknown", "pt", "inconclusive"),
        ("unknown", "any", "skipped"),
    ],
)
def test_the_iommu_that_the_profile_wants(healthy: dict[str, Any], mode: str, wanted: str, status: str) -> None:
    report = {**healthy, "iommu": {**healthy["iommu"], "mode": mode}}
    (verdict,) = [v for v in host.judge(report, healthy_nvml(), {**EXPECT, "iommu": wanted}) if v.code == "node.iommu"]
    assert verdict.status == status
    assert bool(verdict.action) == (status in ("fail", "inconclusive"))
    if status == "fail":
        assert f"`iommu={wanted}`" in verdict.action


def test_translation_and_redirection_together_hang(tree: HostTree) -> None:
    """Two ranks hang and four complete: ACS redirect with a translating IOMMU."""
    tree.set_acs("0000:00:01.1", ACS_REDIRECTING)
    for index in range(8):
        tree.iommu_type(index, "DMA")
    verdicts = host.judge(report_of(tree), healthy_nvml(), {**EXPECT, "iommu": "any"})
    assert bad(verdicts) == [("node.iommu", "warn", "IOMMU"), ("node.acs", "warn", "ACS")]


def test_acs_cannot_be_read_without_root(tree: HostTree) -> None:
    tree.set_acs("0000:00:01.1", ACS_REDIRECTING)
    tree.unprivileged()
    (verdict,) = [v for v in host.judge(report_of(tree), healthy_nvml(), EXPECT) if v.code == "node.acs"]
    assert (verdict.status, "only root can" in verdict.message) == ("skipped", True)
    assert len(verdict.evidence["unreadable"]) == 16


def test_acs_names_the_bridges_on_the_way(tree: HostTree) -> None:
    for bridge in tree.bridges_above(3):
        tree.set_acs(bridge, ACS_REDIRECTING)
    (verdict,) = [v for v in host.judge(report_of(tree), healthy_nvml(), EXPECT) if v.code == "node.acs"]
    assert verdict.evidence["redirecting"] == ["0000:20:01.1", "0000:22:00.0", "0000:23:10.0"]
    assert "more" not in verdict.message
    assert "pci=disable_acs_redir=0000:20:01.1;0000:22:00.0;0000:23:10.0" in verdict.action
    assert verdict.evidence["paths"][gpu_bus_id(3)] == verdict.evidence["redirecting"]


def test_a_machine_that_counts_no_pcie_errors(tree: HostTree) -> None:
    for path in tree.root.glob("sys/devices/**/aer_dev_*"):
        path.unlink()
    (verdict,) = [v for v in host.judge(report_of(tree), healthy_nvml(), EXPECT) if v.code == "node.aer"]
    assert verdict.status == "skipped"


def test_a_gpu_that_does_not_start_is_the_drivers(tree: HostTree) -> None:
    """The proprietary module on Blackwell: the GPU is found, and never initialises."""
    lines = [f"NVRM: GPU {gpu_bus_id(index)}: RmInitAdapter failed! (0x62:0xffff:2477)" for index in range(8)]
    tree.log(*lines, *[f"NVRM: Xid (PCI:{gpu_bus_id(i)[:-2]}): 169, SEC2 halted" for i in range(8)])
    nvml = {**healthy_nvml(), "gpus": []}
    verdicts = host.judge(report_of(tree), nvml, EXPECT)
    failures = [v for v in verdicts if v.code == "gpu.init_failed"]
    assert [(v.status, v.layer) for v in failures] == [("fail", "driver")] * 8
    assert "open kernel modules" in failures[0].action
    assert {(v.code, v.status) for v in verdicts if v.code == "gpu.xid"} == {("gpu.xid", "needs-reset")}
    assert verdicts[0].message.startswith("The PCI bus has 8, and NVML sees 0")


def test_a_start_that_failed_earlier_is_a_warning(tree: HostTree) -> None:
    tree.log(f"NVRM: GPU {gpu_bus_id(3)}: RmInitAdapter failed! (0x62:0xffff:2477)")
    assert bad(host.judge(report_of(tree), healthy_nvml(), EXPECT)) == [("gpu.init_failed", "warn", GPU3)]


# ---- what NVML says

NVML: dict[str, tuple[dict[str, Any], list[tuple[str, str, str]]]] = {
    "uncorrectable errors": (
        {"ecc_errors": {"corrected": 0, "uncorrected": 2, "corrected_total": 0, "uncorrected_total": 2}},
        [("gpu.ecc", "needs-reset", GPU3)],
    ),
    "uncorrectable errors long ago": (
        {"ecc_errors": {"corrected": 0, "uncorrected": 0, "corrected_total": 9, "uncorrected_total": 2}},
        [("gpu.ecc", "warn", GPU3)],
    ),
    "ECC off": ({"ecc": False, "ecc_pending": False}, [("gpu.ecc", "fail", GPU3)]),
    "ECC off until a reset": ({"ecc": False, "ecc_pending": True}, [("gpu.ecc", "needs-reset", GPU3)]),
    "no ECC to be seen": ({"ecc": None, "ecc_pending": None}, [("gpu.ecc", "fail", GPU3)]),
    "a row waits": (
        {"remapped_rows": {"correctable": 0, "uncorrectable": 1, "pending": 1, "failed": 0}},
        [("gpu.row_remap", "needs-reset", GPU3)],
    ),
    "a row could not be remapped": (
        {"remapped_rows": {"correctable": 0, "uncorrectable": 8, "pending": 1, "failed": 1}},
        [("gpu.row_remap", "fail", GPU3)],
    ),
    "a row was remapped": (
        {"remapped_rows": {"correctable": 1, "uncorrectable": 1, "pending": 0, "failed": 0}},
        [("gpu.row_remap", "warn", GPU3)],
    ),
    "a page waits": (
        {"retired_pages": {"single_bit": 0, "double_bit": 1, "pending": True}},
        [("gpu.retired_pages", "needs-reboot", GPU3)],
    ),
    "a page was retired": (
        {"retired_pages": {"single_bit": 0, "double_bit": 1, "pending": False}},
        [("gpu.retired_pages", "warn", GPU3)],
    ),
    "the driver wants a reset": ({"recovery_action": "gpu-reset"}, [("gpu.recovery", "needs-reset", GPU3)]),
    "the driver wants a reboot": ({"recovery_action": "node-reboot"}, [("gpu.recovery", "needs-reboot", GPU3)]),
    "the driver wants the system's": ({"recovery_action": "system-reboot"}, [("gpu.recovery", "needs-reboot", GPU3)]),
    "the driver wants the bus reset": ({"recovery_action": "bus-reset"}, [("gpu.recovery", "needs-reset", GPU3)]),
    "the driver wants a drain": ({"recovery_action": "drain-p2p"}, [("gpu.recovery", "needs-reset", GPU3)]),
    "the driver wants a drain first": ({"recovery_action": "drain-and-reset"}, [("gpu.recovery", "needs-reset", GPU3)]),
    "the driver wants something new": ({"recovery_action": "action 9"}, [("gpu.recovery", "needs-reset", GPU3)]),
    "busy with nothing": ({"utilization": 100}, [("gpu.wedged", "needs-reset", GPU3)]),
    "busy with something": ({"utilization": 100, "processes": [4242], "pcie_gen": 5}, []),
    "hot": ({"throttle": ["hardware thermal slowdown"], "temperature_c": 95}, [("gpu.throttle", "warn", GPU3)]),
    "no persistence": ({"persistence": False}, [("gpu.persistence", "warn", "GPUs")]),
    "another architecture": ({"compute_capability": "9.0"}, [("gpu.arch", "fail", GPU3)]),
    "a slow link under load": (
        {"utilization": 80, "processes": [4242], "pcie_gen": 1},
        [("gpu.link_speed", "fail", GPU3)],
    ),
    "a slow link at rest": ({"pcie_gen": 1}, []),
}


@pytest.mark.parametrize("name", NVML)
def test_what_nvml_says_is_judged(healthy: dict[str, Any], name: str) -> None:
    changes, expected = NVML[name]
    verdicts = host.judge(healthy, with_gpu3(healthy_nvml(), **changes), EXPECT)
    assert bad(verdicts) == expected
    for verdict in verdicts:
        if verdict.status not in ("pass", "skipped"):
            assert verdict.action
            assert verdict.layer == "node", "no layer that a rollback would touch"


def message(verdicts: list[Verdict], code: str) -> str:
    return next(v.message for v in verdicts if v.code == code)


def test_sentences_say_what_was_found(tree: HostTree) -> None:
    """Each of these is read by a person, and a wrong word sends him to the wrong place."""
    healthy = host.judge(report_of(tree), healthy_nvml(), EXPECT)
    assert message(healthy, "gpu.ecc") == "ECC is on; no uncorrectable errors."
    assert message(healthy, "node.hmm") == "HMM is off in the loaded module."
    assert message(healthy, "node.acs") == "No bridge above a GPU redirects peer-to-peer traffic."
    assert message(healthy, "gpu.link_width") == "The links have 16 lanes."
    tree.gpu_file(3, "current_link_width", "8\n")
    tree.gpu_file(4, "current_link_width", "8\n")
    tree.gpu_file(5, "current_link_width", "4\n")
    tree.hmm("N")
    other = with_gpu3(healthy_nvml(), ecc=False, ecc_pending=False)
    broken = host.judge(report_of(tree), other, {**EXPECT, "arch": "sm_90", "pcie_width": 1})
    assert message(broken, "gpu.ecc") == "ECC is off, and the profile wants it on."
    assert message(broken, "node.hmm") == "HMM is on in the loaded module."
    assert message(broken, "gpu.link_width") == "The links have 16 (5 GPUs), 8 (2 GPUs), 4 (1 GPU) lanes."
    for index in range(8):
        for bridge in tree.bridges_above(index):
            tree.set_acs(bridge, ACS_REDIRECTING)
    acs = message(host.judge(report_of(tree), other, EXPECT), "node.acs")
    assert acs.startswith("16 of the 16 bridges above the GPUs redirect")
    assert acs.endswith("0000:03:10.0 and 12 more.")
    unknown = with_gpu3(healthy_nvml(), ecc=None, ecc_pending=None)
    assert message(host.judge(report_of(tree), unknown, {**EXPECT, "ecc": None}), "gpu.ecc").startswith(
        "ECC is on (7 GPUs)"
    )


def test_a_process_that_nvml_does_not_see_uses_the_gpu(tree: HostTree) -> None:
    tree.process(4242, "python3", "/dev/nvidiactl", "/dev/nvidia3", "/dev/nvidia-uvm")
    verdicts = host.judge(report_of(tree), with_gpu3(healthy_nvml(), utilization=100), EXPECT)
    assert "gpu.wedged" not in {code for code, _, _ in bad(verdicts)}


def test_what_a_gpu_does_not_support_is_skipped_and_fails_nothing(healthy: dict[str, Any]) -> None:
    nvml = healthy_nvml()
    kept = ("index", "name", "uuid", "bus_id", "pci_id", "unanswered", "ecc_errors")
    for gpu in nvml["gpus"]:
        gpu.update({key: None for key in gpu if key not in kept})
        gpu["ecc_errors"] = dict.fromkeys(gpu["ecc_errors"])
    verdicts = host.judge(healthy, nvml, {"gpus": 8, "arch": "sm_120"})
    assert bad(verdicts) == []
    skipped = {v.code for v in verdicts if v.status == "skipped"}
    assert skipped >= {
        "gpu.ecc",
        "gpu.row_remap",
        "gpu.recovery",
        "gpu.wedged",
        "gpu.throttle",
        "gpu.persistence",
        "gpu.arch",
    }


def test_a_gpu_that_fails_in_nvml_does_not_stop_the_others(healthy: dict[str, Any]) -> None:
    nvml = healthy_nvml()
    nvml["gpus"][3] = {"index": 3, "error": {"code": 15, "name": "NVML_ERROR_GPU_IS_LOST", "text": "GPU is lost"}}
    nvml["gpus"][5]["utilization"] = 100
    assert bad(host.judge(healthy, nvml, EXPECT)) == [("gpu.wedged", "needs-reset", "GPU 0000:51:00.0")]


# ---- shared memory


@pytest.mark.parametrize(
    ("shm", "memlock", "status"),
    [
        ({"total_bytes": 64 << 20, "free_bytes": 64 << 20}, None, "warn"),  # a container's default
        ({"total_bytes": 64 << 30, "free_bytes": 1 << 20}, None, "warn"),  # full
        ({"total_bytes": 64 << 30, "free_bytes": 64 << 30}, 65536, "warn"),
        ({"total_bytes": 64 << 30, "free_bytes": 64 << 30}, 8 << 20, "pass"),
        (None, None, "fail"),
    ],
)
def test_shared_memory(healthy: dict[str, Any], shm: dict[str, int] | None, memlock: int | None, status: str) -> None:
    report = {**healthy, "shm": shm, "memlock_bytes": memlock}
    (verdict,) = [v for v in host.judge(report, healthy_nvml(), EXPECT) if v.code == "node.shm"]
    assert verdict.status == status


def test_one_gpu_needs_neither_peers_nor_shared_memory(tmp_path: Path) -> None:
    report = {**report_of(HostTree(tmp_path, gpus=1)), "shm": None}
    verdicts = host.judge(report, healthy_nvml(1), {**EXPECT, "gpus": 1})
    statuses = {v.code: v.status for v in verdicts}
    assert (statuses["node.acs"], statuses["node.shm"]) == ("skipped", "skipped")
    assert bad(verdicts) == []


def test_hmm_of_a_module_that_is_not_loaded_is_nobodys_trouble(healthy: dict[str, Any]) -> None:
    (verdict,) = [v for v in host.judge({**healthy, "hmm": None}, healthy_nvml(), EXPECT) if v.code == "node.hmm"]
    assert (verdict.status, verdict.message) == ("skipped", "The module nvidia_uvm is not loaded.")


@pytest.mark.parametrize(
    ("ecc", "status", "words"),
    [(None, "fail", "It does not tell whether ECC is on"), (False, "needs-reset", "ECC is off, and the profile wants")],
)
def test_ecc_that_a_gpu_does_not_have_is_told_from_one_that_is_off(
    healthy: dict[str, Any], ecc: bool | None, status: str, words: str
) -> None:
    verdicts = host.judge(healthy, with_gpu3(healthy_nvml(), ecc=ecc, ecc_pending=True), {**EXPECT, "ecc": True})
    (verdict,) = [v for v in verdicts if v.code == "gpu.ecc"]
    assert (verdict.status, verdict.subject) == (status, GPU3)
    assert words in verdict.message


def test_no_page_waits_for_retirement(healthy: dict[str, Any]) -> None:
    nvml = healthy_nvml()
    for gpu in nvml["gpus"]:
        gpu["retired_pages"] = {"single_bit": 0, "double_bit": 0, "pending": False}
    (verdict,) = [v for v in host.judge(healthy, nvml, EXPECT) if v.code == "gpu.retired_pages"]
    assert (verdict.status, verdict.evidence["gpus"]) == ("pass", 8)


def test_shared_memory_is_read_from_the_file_system(tree: HostTree) -> None:
    found = os.statvfs(tree.root / "dev/shm")
    assert host.inspect(str(tree.root))["shm"]["total_bytes"] == found.f_blocks * found.f_frsize


# ---- reading


def test_the_child_reads_what_the_node_has(tree: HostTree) -> None:
    report = host.inspect(str(tree.root))
    assert {**report, "shm": None, "memlock_bytes": None} == {**report_of(tree), "shm": None, "memlock_bytes": None}


def test_the_report_of_a_healthy_node(healthy: dict[str, Any]) -> None:
    assert healthy["error"] is None
    assert [gpu["bus_id"] for gpu in healthy["gpus"]] == [gpu_bus_id(index) for index in range(8)]
    assert healthy["gpus"][3] == {
        "bus_id": "0000:31:00.0",
        "pci_id": "10de:2bb5",
        "class": "0x030200",
        "driver": "nvidia",
        "answers": True,
        "width": 16,
        "width_max": 16,
        "speed_gts": 2.5,
        "speed_max_gts": 32.0,
        "bars": healthy["gpus"][0]["bars"],
        "numa_node": 0,
        "aer": {"fatal": 0, "nonfatal": 0, "correctable": 0, "named": {}},
        "iommu_group": "33",
        "iommu_type": "identity",
        "bridges": ["0000:20:01.1", "0000:22:00.0", "0000:23:10.0"],
    }
    assert len(healthy["bridges"]) == 16
    assert healthy["modules"] == {"nvidia": "580.82.07", "nvidia_uvm": "580.82.07"}
    assert healthy["hmm"] is False
    assert healthy["kernel_log"]["complete"] is True
    assert healthy["users"] == [
        {
            "pid": 812,
            "comm": "nvidia-persiste",
            "user": healthy["users"][0]["user"],
            "devices": ["/dev/nvidia0", "/dev/nvidiactl"],
            "daemon": True,
        }
    ]


def test_users_of_the_gpus(tree: HostTree) -> None:
    tree.process(4242, "python3", "/dev/null", "/dev/nvidia3")
    tree.process(4243, "bash", "/dev/pts/0")
    users = host.gpu_users(str(tree.root))
    assert [(user["pid"], user["comm"], user["daemon"]) for user in users] == [(4242, "python3", False)]
    users = host.gpu_users(str(tree.root), daemons=True)
    assert [(user["pid"], user["comm"], user["daemon"]) for user in users] == [
        (812, "nvidia-persiste", True),
        (4242, "python3", False),
    ]


def test_users_of_this_machine_can_be_listed() -> None:
    assert isinstance(host.gpu_users(), list)


def test_nothing_is_written(tree: HostTree) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(tree.root.rglob("*"))}

    before = state()
    host.inspect(str(tree.root))
    assert state() == before


def test_a_read_that_does_not_come_back_is_killed_and_named(tree: HostTree) -> None:
    """A device whose configuration space cannot be read in time: a pipe that nobody writes to plays it."""
    config = tree.path(gpu_bus_id(3)) / "config"
    config.unlink()
    os.mkfifo(config)
    report = host.inspect(str(tree.root), timeout_s=5)
    assert gpu_bus_id(3) in report["error"]
    verdicts = host.judge(report, None, EXPECT)
    assert (verdicts[0].code, verdicts[0].status) == ("node.report", "inconclusive")


def test_a_kernel_log_that_lost_its_beginning(tree: HostTree) -> None:
    lines = (tree.root / "dev/kmsg").read_text().splitlines()
    tree.write("dev/kmsg", "\n".join(lines[1:]) + "\n")
    assert report_of(tree)["kernel_log"]["complete"] is False


def test_a_kernel_log_that_cannot_be_read_is_skipped(tree: HostTree) -> None:
    (tree.root / "dev/kmsg").unlink()
    verdicts = {v.code: v.status for v in host.judge(report_of(tree), healthy_nvml(), EXPECT)}
    assert (verdicts["gpu.xid"], verdicts["node.link_down"]) == ("skipped", "skipped")


@pytest.fixture
def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a script in the place of journalctl."""

    def write(script: str) -> None:
        program = tmp_path / "bin/journalctl"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    return write


def test_the_journal_has_what_the_ring_buffer_forgot(journalctl: Callable[[str], None]) -> None:
    journalctl(
        "echo '[    5.000000] n1 kernel: Linux version 6.8'\n"
        "echo '[   98.765432] n1 kernel: NVRM: Xid (PCI:0000:31:00): 79, GPU has fallen off the bus.'"
    )
    assert host_child.journal() == [
        "[   98.765432] n1 kernel: NVRM: Xid (PCI:0000:31:00): 79, GPU has fallen off the bus."
    ]


@pytest.mark.parametrize("script", ["exit 1", "true", "echo half; exit 1"])
def test_no_journal_is_none(journalctl: Callable[[str], None], script: str) -> None:
    journalctl(script)
    assert host_child.journal() is None


def test_a_journal_that_does_not_answer_is_given_up(
    journalctl: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    journalctl("exec sleep 60")
    monkeypatch.setattr(host_child, "JOURNAL_S", 0.3)
    assert host_child.journal() is None


def test_a_flood_of_xids_is_counted_in_bounded_room(tree: HostTree) -> None:
    tree.log(*["NVRM: Xid (PCI:0000:31:00): 31, pid=5, name=python3, MMU Fault"] * 5000)
    (entry,) = report_of(tree)["kernel_log"]["xids"]
    assert 1000 < entry["count"] <= 2000
    assert entry["last_s"] > entry["first_s"]


def test_the_module_reports_everything_and_judges_nothing(
    run_module: Callable[..., dict[str, Any]], tree: HostTree, tmp_path: Path
) -> None:
    tree.module("nouveau")
    result = run_module("bedplate_gpu_info", check=True, root=str(tree.root), tools=str(tmp_path), simulated=True)
    assert (result["changed"], result["simulated"]) == (False, True)
    assert result["error"]["name"] == "PYNVML_MISSING"
    assert len(result["host"]["gpus"]) == 8
    assert "nouveau" in result["host"]["modules"]
    assert "verdicts" not in result


def test_the_documentation_of_the_module_names_every_key(healthy: dict[str, Any]) -> None:
    documented = yaml.safe_load(bedplate_gpu_info.RETURN)
    nvml = healthy_nvml()
    assert set(documented) == {*nvml, "host", "simulated"}
    assert set(documented["gpus"]["contains"]) == {*nvml["gpus"][0], "error"}
    assert set(documented["host"]["contains"]) == set(healthy)


def test_this_machine_can_be_inspected() -> None:
    report = host.inspect("/")
    assert report["error"] is None
    assert isinstance(host.judge(report, None, {"gpus": None}), list)


def test_the_tree_can_be_written_for_a_test_node(tmp_path: Path) -> None:
    script = Path(__file__).with_name("host_tree.py")
    subprocess.run([sys.executable, str(script), str(tmp_path / "root")], check=True)
    assert len(host.gpus_on_bus(str(tmp_path / "root"))) == 8


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 300),
    st.sampled_from(["", "none", "gpu-reset", "12.0", "pt"]),
    st.just([]),
)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(["pcie_width", "pcie_gen", "memory_bytes", "bar1_bytes", "ecc", "utilization"]), VALUES
    )
)
def test_any_number_that_nvml_gives_can_be_judged(healthy: dict[str, Any], changes: dict[str, Any]) -> None:
    numbers = {key: value for key, value in changes.items() if value is None or isinstance(value, int)}
    verdicts = host.judge(copy.deepcopy(healthy), with_gpu3(healthy_nvml(), **numbers), EXPECT)
    assert all(verdict.code in CODES for verdict in verdicts)


@settings(max_examples=40)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_any_command_line_can_be_read(text: str) -> None:
    found = host.iommu(text, ["dmar0"], [{"iommu_group": "1", "iommu_type": None}])
    assert found["mode"] in ("pt", "unknown")
