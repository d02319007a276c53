"""NVML here is the fake of tests/fakegpu, asked through the real nvidia-ml-py in a real child."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from bedplate.node import gpu

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
    assert found["gpus"][0] == {
        "index": 0,
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "uuid": "GPU-fa4e0000-0000-4000-8000-000000000000",
        "bus_id": "00000000:01:00.0",
        "pci_id": "10de:2bb5",
        "memory_bytes": 97887 << 20,
        "ecc": True,
        "pcie_width": 16,
        "pcie_width_max": 16,
    }
    assert codes(found, expected_driver_version="580.82.07") == [
        ("gpu.count", "pass"),
        ("gpu.ids", "pass"),
        ("gpu.driver_version", "pass"),
    ]


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


def test_another_driver_version(query: Query) -> None:
    found = query("driver_version=575.57.08")
    assert codes(found, expected_driver_version="580.82.07")[-1] == ("gpu.driver_version", "fail")


@pytest.mark.parametrize(
    ("code", "name", "status"),
    [
        (9, "NVML_ERROR_DRIVER_NOT_LOADED", "fail"),
        (18, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", "needs-reboot"),
        (999, "NVML_ERROR_UNKNOWN", "fail"),
    ],
)
@pytest.mark.parametrize("function", ["nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"])
def test_an_nvml_error_has_its_name(query: Query, function: str, code: int, name: str, status: str) -> None:
    found = query(f"error.{function}={code}")
    assert found["error"]["name"] == name
    assert codes(found) == [("gpu.nvml_error", status)]


def test_a_lost_gpu_is_named_and_the_others_are_reported(query: Query) -> None:
    found = query("gpu.5.error=15")
    lost, count, ids = gpu.judge(found, expected_count=8, expected_ids=PRO_6000)
    assert (lost.code, lost.status, lost.subject) == ("gpu.nvml_error", "needs-reset", "GPU 5")
    assert "NVML_ERROR_GPU_IS_LOST" in lost.message
    assert (count.status, ids.status) == ("pass", "pass")


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetName"])
def test_a_call_that_does_not_come_back_is_killed_and_named(query: Query, function: str) -> None:
    found = query(f"block.{function}=600", timeout_s=1.5)
    assert found["error"]["name"] == "TIMEOUT"
    assert function in found["error"]["text"]
    assert codes(found) == [("gpu.nvml_error", "fail")]


def test_what_a_gpu_does_not_support_is_none(query: Query) -> None:
    found = query("error.nvmlDeviceGetEccMode=3\nerror.nvmlDeviceGetMemoryInfo=3")
    assert found["gpus"][0]["ecc"] is None
    assert found["gpus"][0]["memory_bytes"] is None
    assert codes(found)[0] == ("gpu.count", "pass")


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
