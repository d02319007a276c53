"""The NVML probe: ask NVML for its devices. In a child, because a call into a broken driver may never come
back.

Runs in the node's own Python through child.py; besides the standard library it uses pynvml.py
(nvidia-ml-py, by NVIDIA), which the role node_tools copied to the node.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

# Codes (nvml.h, nvmlReturn_t) with which a GPU that is well may answer an optional question: invalid argument, not
# supported, no permission, not found, no such function in this library, no data, other version of a structure,
# deprecated, not ready. Any other is a fault, and ends the questions to this GPU.
NO_ANSWER = (2, 3, 4, 6, 13, 21, 25, 26, 27)
NOT_SUPPORTED = (3, 13)

# nvmlClocksEventReason*: why the clocks are below what they could be, where it is not by anybody's wish.
THROTTLE = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
# NVML_GPU_RECOVERY_ACTION_*
RECOVERY = (
    "none",
    "gpu-reset",
    "node-reboot",
    "drain-p2p",
    "drain-and-reset",
    "recover-imex",
    "bus-reset",
    "system-reboot",
)

# A full utilisation with no process is looked at again, so often: it is an average over up to a second, and shows what
# has just ended, or the driver's own start.
BUSY_PERCENT = 99
BUSY_LOOKS = 4
BUSY_PAUSE_S = 0.5


def load(path: str) -> ModuleType:
    """Return pynvml from exactly this file, whatever else is installed."""
    spec = importlib.util.spec_from_file_location("pynvml", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pynvml"] = module  # it looks itself up there
    spec.loader.exec_module(module)
    return module


def error_of(pynvml: Any, error: Exception) -> dict[str, Any]:
    """Return an NVML error as {code, name, text}: its number, its constant's name, NVML's words."""
    code = error.value  # type: ignore[attr-defined]
    names = [key for key, value in vars(pynvml).items() if key.startswith("NVML_ERROR_") and value == code]
    return {"code": code, "name": names[0] if names else f"NVML_ERROR_{code}", "text": str(error)}


def text_of(value: Any) -> str:
    """Return a string; older releases of pynvml return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def optional_text(pynvml: Any, function: str) -> str | None:
    """Return what a function of NVML without arguments says, as text; None where it has no answer."""
    try:
        return text_of(getattr(pynvml, function)())
    except pynvml.NVMLError:
        return None


class Gpu:
    """The questions to one GPU."""

    def __init__(self, pynvml: Any, index: int, stage: Callable[[str], None]) -> None:
        """Keep what the questions need; nothing is asked yet."""
        self.pynvml, self.index, self.stage = pynvml, index, stage
        self.handle: Any = None
        self.unanswered: dict[str, str] = {}

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function of pynvml, noting which one in case it does not come back."""
        self.stage(f"{function} of GPU {self.index}")
        return getattr(self.pynvml, function)(*arguments)

    def maybe(self, function: str, *arguments: Any) -> Any:
        """Return the answer to an optional question, None where there is none."""
        try:
            if not hasattr(self.pynvml, function):  # an older nvidia-ml-py
                return None
            return self.ask(function, self.handle, *arguments)
        except self.pynvml.NVMLError as error:
            if error.value not in NO_ANSWER:
                raise
            if error.value not in NOT_SUPPORTED:
                self.unanswered[function] = error_of(self.pynvml, error)["name"]
            return None

    def describe(self) -> dict[str, Any]:
        """Return what NVML says about this GPU, keys as in ``gpu.query``; with ``error`` when it fails on the way."""
        found: dict[str, Any] = {"index": self.index}
        try:
            self.handle = self.ask("nvmlDeviceGetHandleByIndex", self.index)
            found.update(self.identity())
            found.update(self.memory())
            found.update(self.link())
            found.update(self.state())
        except self.pynvml.NVMLError as error:
            failed: dict[str, Any] = {key: found[key] for key in ("index", "bus_id", "pci_id") if key in found}
            failed["error"] = error_of(self.pynvml, error)
            return failed
        return {**found, "unanswered": self.unanswered}

    def identity(self) -> dict[str, Any]:
        """Return which GPU this is."""
        pci = self.ask("nvmlDeviceGetPciInfo", self.handle)
        bus = {
            "bus_id": text_of(pci.busId),
            # The upper half is the device, the lower the vendor (nvml.h, nvmlPciInfo_t).
            "pci_id": f"{pci.pciDeviceId & 0xFFFF:04x}:{pci.pciDeviceId >> 16:04x}",
        }
        capability = self.maybe("nvmlDeviceGetCudaComputeCapability")
        vbios = self.maybe("nvmlDeviceGetVbiosVersion")
        return {
            **bus,
            "name": text_of(self.ask("nvmlDeviceGetName", self.handle)),
            "uuid": text_of(self.ask("nvmlDeviceGetUUID", self.handle)),
            "compute_capability": f"{capability[0]}.{capability[1]}" if capability else None,
            "vbios": text_of(vbios) if vbios is not None else None,
        }

    def memory(self) -> dict[str, Any]:
        """Return sizes, and the errors of the memory."""
        memory = self.maybe("nvmlDeviceGetMemoryInfo")
        bar1 = self.maybe("nvmlDeviceGetBAR1MemoryInfo")
        ecc = self.maybe("nvmlDeviceGetEccMode")
        rows = self.maybe("nvmlDeviceGetRemappedRows")
        return {
            "memory_bytes": memory.total if memory else None,
            "memory_used_bytes": memory.used if memory else None,
            "bar1_bytes": bar1.bar1Total if bar1 else None,
            "ecc": bool(ecc[0]) if ecc else None,
            "ecc_pending": bool(ecc[1]) if ecc else None,
            "ecc_errors": self.ecc_errors(),
            "remapped_rows": dict(zip(("correctable", "uncorrectable", "pending", "failed"), map(int, rows)))
            if rows
            else None,
            "retired_pages": self.retired_pages(),
        }

    def ecc_errors(self) -> dict[str, Any]:
        """Return the numbers of ECC errors, since the driver was loaded and over the GPU's life."""
        counts = {}
        for kind, error_type in (("corrected", 0), ("uncorrected", 1)):  # nvmlMemoryErrorType_t
            for name, counter in ((kind, 0), (f"{kind}_total", 1)):  # nvmlEccCounterType_t: volatile, aggregate
                counts[name] = self.maybe("nvmlDeviceGetTotalEccErrors", error_type, counter)
        return counts

    def retired_pages(self) -> dict[str, Any] | None:
        """Return the numbers of retired pages; GPUs since Ampere remap rows, and have none."""
        by_cause = [self.maybe("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]  # nvmlPageRetirementCause_t
        pending = self.maybe("nvmlDeviceGetRetiredPagesPendingStatus")
        if None in by_cause:
            return None
        return {
            "single_bit": len(by_cause[0]),
            "double_bit": len(by_cause[1]),
            "pending": None if pending is None else bool(pending),
        }

    def link(self) -> dict[str, Any]:
        """Return the state of the PCIe link; its generation is low while the GPU rests."""
        return {
            "pcie_width": self.maybe("nvmlDeviceGetCurrPcieLinkWidth"),
            "pcie_width_max": self.maybe("nvmlDeviceGetMaxPcieLinkWidth"),
            "pcie_gen": self.maybe("nvmlDeviceGetCurrPcieLinkGeneration"),
            "pcie_gen_max": self.maybe("nvmlDeviceGetMaxPcieLinkGeneration"),
            "pcie_replays": self.maybe("nvmlDeviceGetPcieReplayCounter"),
        }

    def state(self) -> dict[str, Any]:
        """Return what it is doing and how it feels."""
        persistence = self.maybe("nvmlDeviceGetPersistenceMode")
        reasons = self.maybe("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its name in older libraries
            reasons = self.maybe("nvmlDeviceGetCurrentClocksThrottleReasons")
        return {
            "persistence": None if persistence is None else bool(persistence),
            "temperature_c": self.maybe("nvmlDeviceGetTemperature", 0),  # NVML_TEMPERATURE_GPU
            "throttle": None if reasons is None else [text for bit, text in THROTTLE.items() if reasons & bit],
            "processes": self.processes(),
            "utilization": self.utilization(),
            "recovery_action": self.recovery_action(),
        }

    def processes(self) -> list[int] | None:
        """Return the ids of the processes on this GPU; None where that cannot be known.

        The functions without a version raise what is no NVMLError when the driver's library is older than pynvml.
        """
        known = []
        for kind in ("Compute", "Graphics"):
            entries = self.maybe(f"nvmlDeviceGet{kind}RunningProcesses_v3")
            if entries is None:
                entries = self.maybe(f"nvmlDeviceGet{kind}RunningProcesses_v2")
            if entries is not None:
                known.append(entries)
        return sorted({entry.pid for entries in known for entry in entries}) if known else None

    def utilization(self) -> int | None:
        """Return the utilisation in percent."""
        rates = self.maybe("nvmlDeviceGetUtilizationRates")
        return None if rates is None else int(rates.gpu)

    def look(self) -> int | None:
        """Return the utilisation once more; None when this GPU has stopped answering since."""
        try:
            return self.utilization()
        except self.pynvml.NVMLError:
            return None

    def recovery_action(self) -> str | None:
        """Return what the driver says must be done to get this GPU back, a word of ``RECOVERY``."""
        field = getattr(self.pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = self.maybe("nvmlDeviceGetFieldValues", [field]) if field is not None else None
        if not values or values[0].nvmlReturn != 0:
            return None
        number = values[0].value.uiVal
        return RECOVERY[number] if number < len(RECOVERY) else f"action {number}"


def look_again(gpus: list[Gpu], found: list[dict[str, Any]]) -> None:
    """Replace the utilisation of GPUs that are full and run nothing by the least of several looks."""
    for _ in range(BUSY_LOOKS):
        busy = [
            entry for entry in found if entry.get("processes") == [] and (entry["utilization"] or 0) >= BUSY_PERCENT
        ]
        if not busy:
            return
        time.sleep(BUSY_PAUSE_S)
        for entry in busy:
            now = gpus[entry["index"]].look()
            if now is not None:
                entry["utilization"] = min(entry["utilization"], now)


def main(config: dict[str, Any], answer: Callable[[Any], None], stage: Callable[[str, str], None]) -> None:
    """Answer the keys of ``gpu.query`` but for ``error``, or only {"error": {code, name, text}}.

    config["library"]: the directory that holds pynvml.py.
    """
    path = os.path.join(config["library"], "pynvml.py")
    try:
        pynvml: Any = load(path)
    except (ImportError, OSError) as error:
        answer({"error": {"code": None, "name": "PYNVML_MISSING", "text": f"{path} cannot be loaded: {error}"}})
        return
    try:
        stage("nvml", "nvmlInit")
        pynvml.nvmlInit()
        stage("nvml", "nvmlSystemGetDriverVersion")
        version = text_of(pynvml.nvmlSystemGetDriverVersion())
        stage("nvml", "nvmlDeviceGetCount")
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        answer({"error": error_of(pynvml, error)})
        return
    found: dict[str, Any] = {
        "driver_version": version,
        "nvml_version": optional_text(pynvml, "nvmlSystemGetNVMLVersion"),
        "cuda_version": optional_text(pynvml, "nvmlSystemGetCudaDriverVersion_v2"),
        "count": count,
        "gpus": [],
    }
    gpus: list[Gpu] = []
    answer(found)
    for index in range(count):
        gpu = Gpu(pynvml, index, lambda text: stage("nvml", text))
        found["gpus"].append(gpu.describe())
        answer(found)  # what has answered so far, in case the next one never does
        gpus.append(gpu)
    look_again(gpus, found["gpus"])
    answer(found)
