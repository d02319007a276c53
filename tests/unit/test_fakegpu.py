"""The stand-ins of tests/fakegpu, driven the way Bedplate drives NVML: by nvidia-ml-py, in a child process."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "fakegpu"

pytestmark = pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("make")), reason="needs gcc and make")

SURVEY = """
import json
import pynvml as nvml

nvml.nvmlInit()
gpus = []
for index in range(nvml.nvmlDeviceGetCount()):
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    pci = nvml.nvmlDeviceGetPciInfo(gpu)
    assert nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(nvml.nvmlDeviceGetUUID(gpu).encode())) == index
    assert nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByPciBusId(pci.busId.encode())) == index
    gpus.append({
        "name": nvml.nvmlDeviceGetName(gpu),
        "serial": nvml.nvmlDeviceGetSerial(gpu),
        "bus": pci.busId,
        "ids": [pci.pciDeviceId, pci.pciSubSystemId],
        "memory_mib": [nvml.nvmlDeviceGetMemoryInfo(gpu, v).total >> 20 for v in (None, nvml.nvmlMemory_v2)],
        "bar1_mib": nvml.nvmlDeviceGetBAR1MemoryInfo(gpu).bar1Total >> 20,
        "ecc": nvml.nvmlDeviceGetEccMode(gpu),
        "link": [nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu), nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
                 nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu), nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)],
        "capability": nvml.nvmlDeviceGetCudaComputeCapability(gpu),
        "processes": nvml.nvmlDeviceGetComputeRunningProcesses(gpu),
        "celsius": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "remapped": nvml.nvmlDeviceGetRemappedRows(gpu),
        "persistence": nvml.nvmlDeviceGetPersistenceMode(gpu),
        "minor": nvml.nvmlDeviceGetMinorNumber(gpu),
    })
print(json.dumps({"gpus": gpus, "driver": nvml.nvmlSystemGetDriverVersion(), "nvml": nvml.nvmlSystemGetNVMLVersion(),
                  "cuda": nvml.nvmlSystemGetCudaDriverVersion_v2()}))
nvml.nvmlShutdown()
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fakegpu")
    subprocess.run(["make", "--silent", "-C", SOURCES, f"OUT={out}"], check=True)
    return out


def child(libraries: Path, code: str, config: Path | None, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    environment.pop("FAKEGPU_CONF", None)
    if config:
        environment["FAKEGPU_CONF"] = str(config)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def survey(libraries: Path, tmp_path: Path):
    def run(config: str) -> dict:
        path = tmp_path / "fakegpu.conf"
        path.write_text(config)
        done = child(libraries, SURVEY, path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def error(libraries: Path, tmp_path: Path):
    """Run code with pynvml as nvml; the name of the NVML error that ended it, and stderr."""

    def run(config: str, code: str) -> tuple[str, str]:
        path = tmp_path / "fakegpu.conf"
        path.write_text(config)
        done = child(libraries, f"import pynvml as nvml\n{textwrap.dedent(code)}", path)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stderr.strip().splitlines()[-1].split(":")[0].removeprefix("pynvml."), done.stderr

    return run


def test_default_is_eight_healthy_blackwells(survey) -> None:
    seen = survey("")
    assert (seen["driver"], seen["nvml"], seen["cuda"]) == ("580.82.07", "13.580.82.07", 13000)
    assert len(seen["gpus"]) == 8
    assert len({gpu["bus"] for gpu in seen["gpus"]}) == 8
    gpu = seen["gpus"][7]
    assert gpu == {
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "serial": "FAKE00000007",
        "bus": "00000000:71:00.0",
        "ids": [0x2BB510DE, 0x204E10DE],
        "memory_mib": [97887, 97887],
        "bar1_mib": 131072,
        "ecc": [1, 1],
        "link": [16, 16, 1, 5],
        "capability": [12, 0],
        "processes": [],
        "celsius": 34,
        "remapped": [0, 0, 0, 0],
        "persistence": 1,
        "minor": 7,
    }


def test_configuration_changes_all_or_one(survey) -> None:
    seen = survey(
        "# a comment\n count = 7 \n\ndriver_version=570.1\ncuda_version=12080\n"
        "name=NVIDIA B200\npci_device_id=10de:2901\ngpu.2.pcie_width=8\ngpu.2.ecc=0\ngpu.2.pci_bus_id=0001:c1:00.0\n"
    )
    assert (seen["driver"], seen["nvml"], seen["cuda"]) == ("570.1", "13.570.1", 12080)
    assert [gpu["link"][0] for gpu in seen["gpus"]] == [16, 16, 8, 16, 16, 16, 16]
    assert seen["gpus"][2]["ecc"] == [0, 1]
    assert seen["gpus"][2]["bus"] == "00000001:C1:00.0"
    assert {gpu["name"] for gpu in seen["gpus"]} == {"NVIDIA B200"}
    assert {gpu["ids"][0] for gpu in seen["gpus"]} == {0x290110DE}


@pytest.mark.parametrize(
    ("library", "loaded", "outcome"),
    [
        (None, None, "580.82.07"),
        (None, "580.95.05\n", "580.95.05"),
        ("580.95.05\n", "580.95.05\n", "580.95.05"),
        ("580.95.05\n", None, "NVMLError_DriverNotLoaded"),
        ("580.95.05\n", "", "NVMLError_DriverNotLoaded"),
        ("580.95.05\n", "580.82.07\n", "NVMLError_LibRmVersionMismatch"),
    ],
)
def test_library_and_loaded_module_have_versions_of_their_own(
    survey, error, tmp_path: Path, library: str | None, loaded: str | None, outcome: str
) -> None:
    for name, text in (("library", library), ("loaded", loaded)):
        if text is not None:
            (tmp_path / name).write_text(text)
    config = f"count=1\nlibrary_file={tmp_path / 'library'}\nloaded_file={tmp_path / 'loaded'}\n"
    if outcome.startswith("NVMLError"):
        assert error(config, "nvml.nvmlInit()")[0] == outcome
    else:
        assert survey(config)["driver"] == outcome
    assert survey(f"{config}driver_version=1.2.3\n")["driver"] == "1.2.3"


def test_no_gpu(survey) -> None:
    assert survey("count=0\n")["gpus"] == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (9, "NVMLError_DriverNotLoaded"),
        (18, "NVMLError_LibRmVersionMismatch"),
        (999, "NVMLError_Unknown"),
    ],
)
def test_init_fails_as_asked(error, code: int, name: str) -> None:
    assert error(f"error.nvmlInit={code}\n", "nvml.nvmlInit()")[0] == name


def test_one_call_fails_as_asked(error) -> None:
    code = """
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        nvml.nvmlDeviceGetUUID(gpu)
        nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)
    """
    assert error("error.nvmlDeviceGetMemoryInfo_v2=17\n", code)[0] == "NVMLError_OperatingSystem"


def test_one_gpu_is_lost(error) -> None:
    code = """
        nvml.nvmlInit()
        assert nvml.nvmlDeviceGetCount() == 8
        nvml.nvmlDeviceGetHandleByIndex(2)
        nvml.nvmlDeviceGetHandleByIndex(3)
    """
    assert error("gpu.3.error=15\n", code)[0] == "NVMLError_GpuIsLost"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("nvml._LoadNvmlLibrary(); nvml.nvmlDeviceGetCount()", "NVMLError_Uninitialized"),
        ("nvml.nvmlInit(); nvml.nvmlDeviceGetHandleByIndex(8)", "NVMLError_InvalidArgument"),
        ("nvml.nvmlInit(); nvml.nvmlDeviceGetHandleByUUID(b'GPU-0')", "NVMLError_NotFound"),
        ("nvml.nvmlInit(); nvml.nvmlShutdown(); nvml.nvmlDeviceGetCount()", "NVMLError_Uninitialized"),
        (
            "nvml.nvmlInit(); nvml.nvmlDeviceGetPowerUsage(nvml.nvmlDeviceGetHandleByIndex(0))",
            "NVMLError_FunctionNotFound",
        ),
    ],
)
def test_wrong_use_fails_as_in_nvml(error, code: str, name: str) -> None:
    assert error("", code)[0] == name


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("cuont=7", "unknown key"),
        ("count", "not key=value"),
        ("count=17", "not a number from 0 to 16"),
        ("gpu.99.ecc=0", "index from 0 to 15"),
        ("gpu.1.eec=0", "unknown key"),
        ("ecc=on", "not a number"),
        ("pci_device_id=2bb5", "not a PCI id"),
        ("gpu.0.pci_bus_id=bus 1", "not a PCI address"),
        ("error.init=9", "not the name of an NVML function"),
        (f"name={'x' * 96}", "too long"),
    ],
)
def test_a_mistake_in_the_file_is_named(error, line: str, reason: str) -> None:
    name, stderr = error(f"# first\n{line}\n", "nvml.nvmlInit()")
    assert name == "NVMLError_Unknown"
    assert "fakegpu.conf:2: " in stderr
    assert reason in stderr


def test_a_file_asked_for_must_exist(libraries: Path, tmp_path: Path) -> None:
    done = child(libraries, "import pynvml; pynvml.nvmlInit()", tmp_path / "missing.conf")
    assert done.returncode == 1
    assert "missing.conf: No such file or directory" in done.stderr


def test_a_call_blocks_as_asked(libraries: Path, tmp_path: Path) -> None:
    config = tmp_path / "fakegpu.conf"
    config.write_text("block.nvmlInit=60\n")
    with pytest.raises(subprocess.TimeoutExpired):
        child(libraries, "import pynvml; pynvml.nvmlInit()", config, timeout=1)


def test_cuda_stub_answers_as_a_driver_without_a_device(libraries: Path) -> None:
    cuda = ctypes.CDLL(str(libraries / "libcuda.so.1"))
    version, text, function = ctypes.c_int(), ctypes.c_char_p(), ctypes.c_void_p()
    assert cuda.cuInit(0) == 100
    assert cuda.cuLaunchKernel() == 100
    assert cuda.cuDriverGetVersion(ctypes.byref(version)) == 0
    assert version.value == 13000
    assert cuda.cuGetErrorString(100, ctypes.byref(text)) == 0
    assert text.value == b"no CUDA-capable device is detected"
    arguments = (ctypes.byref(function), 13000, ctypes.c_ulonglong(0), None)
    for symbol in (b"cuInit", b"cuSomethingElse"):
        assert cuda.cuGetProcAddress_v2(symbol, *arguments) == 0
        assert ctypes.CFUNCTYPE(ctypes.c_int)(function.value)() == 100


@pytest.mark.parametrize("library", ["libnvidia-ml.so.1", "libcuda.so.1"])
def test_soname_is_the_file_name(libraries: Path, library: str) -> None:
    done = subprocess.run(["readelf", "-dW", libraries / library], capture_output=True, text=True, check=True)
    assert f"Library soname: [{library}]" in done.stdout
