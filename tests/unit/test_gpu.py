"""NVML here is the fake of tests/fakegpu, asked through the real nvidia-ml-py in a real child."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from host_tree import healthy_nvml

from bedplate.node.hardware import gpu
from bedplate.node.verdicts import CODES

FAKEGPU = Path(__file__).resolve().parents[1] / "fakegpu"
PRO_6000 = ["10de:2bb1", "10de:2bb5"]

Query = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tools = tmp_path_factory.mktemp("tools")
    (tools / "lib").mkdir()
    shutil.copy(pynvml.__file__, tools / "lib" / "pynvml.py")
    subprocess.run(["make", "-s", "-C", str(FAKEGPU), f"OUT={tools / 'fake'}"], check=True)
    return tools


@pytest.fixture
def query(tools: Path, tmp_path: Path) -> Query:
    def run(config: str = "", **kwargs: Any) -> dict[str, Any]:
        (tmp_path / "fakegpu.conf").write_text(config)
        environment = {"LD_LIBRARY_PATH": str(tools / "fake"), "FAKEGPU_CONF": str(tmp_path / "fakegpu.conf")}
        return gpu.query(str(tools), environment=environment, **kwargs)

    return run


def codes(found: dict[str, Any], **expected: Any) -> list[tuple[str, str]]:
    arguments = {"expected_count": 8, "expected_ids": PRO_6000, **expected}
    return [(verdict.code, verdict.status) for verdict in gpu.judge(found, **arguments)]


def test_a_healthy_node(query: Query) -> None:
    found = query()
    assert found["error"] is None
    assert found["driver_version"] == "580.82.07"
    assert len(found["gpus"]) == 8
    assert found == healthy_nvml()
    assert codes(found) == [("gpu.count", "pass"), ("gpu.ids", "pass")]


def test_seven_where_eight_are_declared(query: Query) -> None:
    count, ids = gpu.judge(query("count=7"), expected_count=8, expected_ids=PRO_6000)
    assert (count.code, count.status, ids.status) == ("gpu.count", "fail", "pass")
    assert count.message == "NVML sees 7, and 8 are expected."
    assert len(count.evidence["bus_ids"]) == 7


def test_more_than_declared_is_a_mistake_of_the_inventory(query: Query) -> None:
    (count,) = gpu.judge(query(), expected_count=4)
    assert (count.status, "inventory" in count.action) == ("fail", True)


def test_another_gpu_is_named(query: Query) -> None:
    found = query("gpu.3.pci_device_id=10de:2684\ngpu.3.name=NVIDIA GeForce RTX 4090")
    _, ids = gpu.judge(found, expected_count=8, expected_ids=PRO_6000)
    assert (ids.code, ids.status) == ("gpu.ids", "fail")
    assert ids.message == "GPU 3 is 10de:2684 (NVIDIA GeForce RTX 4090); expected: 10de:2bb1, 10de:2bb5."
    assert ids.evidence["seen"] == {"10de:2bb5": 7, "10de:2684": 1}


@pytest.mark.parametrize(
    ("code", "name", "status", "action"),
    [
        (1, "NVML_ERROR_UNINITIALIZED", "fail", "dmesg"),
        (4, "NVML_ERROR_NO_PERMISSION", "fail", "as root"),
        (9, "NVML_ERROR_DRIVER_NOT_LOADED", "fail", "dkms status"),
        (10, "NVML_ERROR_TIMEOUT", "fail", "reboot"),
        (12, "NVML_ERROR_LIBRARY_NOT_FOUND", "fail", "install the driver"),
        (17, "NVML_ERROR_OPERATING_SYSTEM", "fail", "cgroup"),
        (18, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", "needs-reboot", "reboot"),
        (19, "NVML_ERROR_IN_USE", "fail", "lspci"),
        (20, "NVML_ERROR_MEMORY", "fail", "memory"),
        (23, "NVML_ERROR_INSUFFICIENT_RESOURCES", "fail", "resource"),
        (27, "NVML_ERROR_NOT_READY", "inconclusive", "again"),
        (999, "NVML_ERROR_UNKNOWN", "fail", "dmesg"),
    ],
)
def test_an_nvml_error_has_its_name(query: Query, code: int, name: str, status: str, action: str) -> None:
    found = query(f"error.nvmlInit={code}")
    assert found["error"]["name"] == name
    (verdict,) = gpu.judge(found, expected_count=8)
    assert (verdict.code, verdict.status, verdict.layer) == ("gpu.nvml_error", status, "driver")
    assert name in verdict.message
    assert action in verdict.action


@pytest.mark.parametrize(("code", "status"), [(9, "needs-reboot"), (12, "fail"), (18, "needs-reboot")])
def test_a_module_that_the_next_boot_loads_is_waited_for(query: Query, code: int, status: str) -> None:
    (verdict,) = gpu.judge(query(f"error.nvmlInit={code}"), expected_count=8, awaits_boot=True)
    assert (verdict.code, verdict.status) == ("gpu.nvml_error", status)


@pytest.mark.parametrize("function", ["nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"])
def test_an_nvml_error_after_the_start(query: Query, function: str) -> None:
    assert codes(query(f"error.{function}=18")) == [("gpu.nvml_error", "needs-reboot")]


@pytest.mark.parametrize(
    ("code", "status"),
    [(8, "fail"), (11, "fail"), (14, "fail"), (15, "needs-reset"), (16, "needs-reset"), (28, "needs-reset")],
)
def test_an_error_of_hardware_causes_no_rollback(query: Query, code: int, status: str) -> None:
    """Even when all GPUs have it."""
    verdicts = gpu.judge(query(f"error={code}"), expected_count=8)
    broken = [verdict for verdict in verdicts if verdict.code == "gpu.hardware_error"]
    assert [(verdict.status, verdict.layer) for verdict in broken] == [(status, "node")] * 8
    assert not CODES["gpu.hardware_error"].rollback_helps


def test_a_lost_gpu_is_named_and_the_others_are_reported(query: Query) -> None:
    found = query("gpu.5.error=15")
    lost, count, ids = gpu.judge(found, expected_count=8, expected_ids=PRO_6000)
    assert (lost.code, lost.status, lost.subject) == ("gpu.hardware_error", "needs-reset", "GPU 5")
    assert "NVML_ERROR_GPU_IS_LOST" in lost.message
    assert (count.status, ids.status) == ("pass", "pass")


def test_an_unknown_error_of_one_gpu_is_the_gpus(query: Query) -> None:
    """The seven others work with the same driver; when all eight have it, it may be the driver."""
    assert codes(query("gpu.5.error=999"))[0] == ("gpu.hardware_error", "fail")
    assert codes(query("error=999"))[:8] == [("gpu.nvml_error", "fail")] * 8


@pytest.mark.parametrize(("code", "status"), [(27, "inconclusive"), (18, "needs-reboot")])
def test_one_gpu_that_waits_for_something_is_not_broken(query: Query, code: int, status: str) -> None:
    lost = gpu.judge(query(f"gpu.5.error={code}"), expected_count=8)[0]
    assert (lost.code, lost.status, lost.subject) == ("gpu.hardware_error", status, "GPU 5")


def test_a_gpu_that_is_lost_on_the_way_keeps_its_bus_id(query: Query) -> None:
    found = query("error.nvmlDeviceGetTemperature=15")
    assert [set(entry) for entry in found["gpus"]] == [{"index", "bus_id", "pci_id", "error"}] * 8
    assert found["gpus"][5]["bus_id"] == "00000000:51:00.0"
    assert gpu.judge(found, expected_count=8)[5].evidence["bus_id"] == "00000000:51:00.0"


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetName", "nvmlDeviceGetUtilizationRates"])
def test_a_call_that_does_not_come_back_is_killed_and_named(query: Query, function: str) -> None:
    found = query(f"block.{function}=600", timeout_s=5)
    assert found["error"]["name"] == "TIMEOUT"
    assert function in found["error"]["text"]
    assert codes(found) == [("gpu.nvml_error", "fail")]


FUNCTIONS = {
    "nvmlDeviceGetBAR1MemoryInfo": "bar1_bytes",
    "nvmlDeviceGetCudaComputeCapability": "compute_capability",
    "nvmlDeviceGetCurrPcieLinkGeneration": "pcie_gen",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie_width",
    "nvmlDeviceGetCurrentClocksEventReasons": "throttle",
    "nvmlDeviceGetEccMode": "ecc",
    "nvmlDeviceGetFieldValues": "recovery_action",
    "nvmlDeviceGetMaxPcieLinkGeneration": "pcie_gen_max",
    "nvmlDeviceGetMaxPcieLinkWidth": "pcie_width_max",
    "nvmlDeviceGetMemoryInfo": "memory_bytes",
    "nvmlDeviceGetPcieReplayCounter": "pcie_replays",
    "nvmlDeviceGetPersistenceMode": "persistence",
    "nvmlDeviceGetRemappedRows": "remapped_rows",
    "nvmlDeviceGetTemperature": "temperature_c",
    "nvmlDeviceGetUtilizationRates": "utilization",
    "nvmlDeviceGetVbiosVersion": "vbios",
}


@pytest.mark.parametrize("code", [3, 13, 4, 26])
def test_what_a_gpu_does_not_answer_is_none(query: Query, code: int) -> None:
    found = query("\n".join(f"error.{function}={code}" for function in FUNCTIONS) + "\ncount=2")
    for entry in found["gpus"]:
        assert {name: entry[name] for name in FUNCTIONS.values()} == dict.fromkeys(FUNCTIONS.values())
        assert bool(entry["unanswered"]) == (code in (4, 26)), "not supported is nothing to tell"
    assert codes(found, expected_count=2)[0] == ("gpu.count", "pass")


def test_processes_errors_and_pages_are_counted(query: Query) -> None:
    entry = query(
        "process=4242\nutilization=100\necc_uncorrected=2\necc_corrected_total=7\nthrottle_reasons=0x48\n"
        "recovery_action=2\nrow_remapper=0\nretired_pages=1\nretired_double_bit=3\nretired_pending=1\ncount=1"
    )["gpus"][0]
    assert (entry["processes"], entry["utilization"]) == ([4242], 100)
    assert entry["ecc_errors"] == {"corrected": 0, "uncorrected": 2, "corrected_total": 7, "uncorrected_total": 0}
    assert entry["throttle"] == ["hardware slowdown", "hardware thermal slowdown"]
    assert entry["recovery_action"] == "node-reboot"
    assert (entry["remapped_rows"], entry["retired_pages"]) == (
        None,
        {"single_bit": 0, "double_bit": 3, "pending": True},
    )


def test_a_gpu_that_is_busy_with_nothing_is_looked_at_again(query: Query) -> None:
    found = query("gpu.1.utilization=100\ncount=2")
    assert [entry["utilization"] for entry in found["gpus"]] == [0, 100]


def test_no_driver_library(tools: Path, tmp_path: Path) -> None:
    found = gpu.query(str(tools), environment={"LD_LIBRARY_PATH": str(tmp_path)})
    if found["error"] is None:
        pytest.skip("this machine has a real NVML")
    assert found["error"]["name"] == "NVML_ERROR_LIBRARY_NOT_FOUND"
    assert codes(found) == [("gpu.nvml_error", "fail")]
    assert codes(found, expected_count=0) == [("gpu.count", "skipped")]


def test_no_pynvml_on_the_node(tmp_path: Path) -> None:
    found = gpu.query(str(tmp_path))
    assert found["error"]["name"] == "PYNVML_MISSING"
    (verdict,) = gpu.judge(found, expected_count=0)
    assert (verdict.code, verdict.status) == ("gpu.nvml_error", "fail")
    assert verdict.message.startswith(str(tmp_path))
    assert "node_tools" in verdict.action


def test_without_an_expectation_nothing_is_judged(query: Query) -> None:
    assert codes(query("count=3"), expected_count=None) == [("gpu.count", "skipped")]
    assert codes(query("error.nvmlInit=9"), expected_count=None) == [("gpu.count", "skipped")]


def test_no_gpu_where_none_is_expected(query: Query) -> None:
    assert codes(query("count=0"), expected_count=0) == [("gpu.count", "pass")]


XID_79 = [
    {"bus_id": "0000:31:00.0", "xid": 79, "class": "reboot"},
    {"bus_id": "0000:01:00.0", "xid": 13, "class": "note"},
]


@pytest.mark.parametrize(
    ("config", "how"),
    [
        ("gpu.3.error=15", "answers NVML_ERROR_GPU_IS_LOST: GPU is lost"),  # from its first call: it has no bus id
        ("count=8\ngpu.3.error=999", "answers NVML_ERROR_UNKNOWN: Unknown Error"),
    ],
)
def test_a_gpu_that_is_lost_under_load_is_named(query: Query, config: str, how: str) -> None:
    (verdict,) = gpu.after_load(query(), query(config), XID_79)
    assert (verdict.code, verdict.status, verdict.layer) == ("gpu.after_load", "needs-reboot", "node")
    assert (verdict.subject, verdict.evidence["xids"]) == ("GPU 0000:31:00.0", XID_79[:1])
    assert verdict.message == f"It answered before it had work, and now it {how}."
    assert "power" in verdict.action
    assert not CODES["gpu.after_load"].rollback_helps


def test_gpus_that_nvml_does_not_list_any_more_are_named(query: Query) -> None:
    """NVML numbers the rest anew; the bus id tells which one is gone."""
    after = query()
    del after["gpus"][3]
    (verdict,) = gpu.after_load(query(), after, [])
    assert verdict.subject == "GPU 0000:31:00.0"
    assert verdict.message == "It answered before it had work, and now it is not there any more."


def test_a_gpu_that_fails_later_on_keeps_its_bus_id_after_load(query: Query) -> None:
    verdicts = gpu.after_load(query(), query("error.nvmlDeviceGetTemperature=15"), [])
    assert [v.subject for v in verdicts] == [f"GPU 0000:{i}1:00.0" for i in range(8)]


def test_a_driver_that_hangs_after_load_is_told_with_the_gpu_that_it_hangs_at(query: Query) -> None:
    (verdict,) = gpu.after_load(query(), query("block.nvmlDeviceGetName=600", timeout_s=3), XID_79)
    assert (verdict.status, verdict.subject) == ("needs-reboot", "GPUs")
    assert "nvmlDeviceGetName of GPU 0" in verdict.message
    assert verdict.evidence["xids"] == XID_79


def test_gpus_that_stand_the_load_pass_and_those_that_were_ill_before_are_not_blamed_on_it(query: Query) -> None:
    ill = query("gpu.5.error=15")
    (verdict,) = gpu.after_load(ill, ill, [])
    assert (verdict.status, verdict.message) == ("pass", "All 7 still answer after they had work.")
    assert gpu.after_load(query("error.nvmlInit=9"), query(), []) == []
    assert gpu.after_load(query("count=0"), query("count=0"), []) == []
