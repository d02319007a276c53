"""The NVML probe: ask NVML for its devices. In a child, because a call into a broken driver may never come
back.

Runs in the node's own Python through child.py; besides the standard library it uses pynvml.py
(nvidia-ml-py, by NVIDIA), which the role node_tools copied to the node.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


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


def describe_gpu(pynvml: Any, index: int, stage: Callable[[str], None]) -> dict[str, Any]:
    """Return what NVML says about one GPU; {index, error} when it does not answer for it.

    Keys: index, name, uuid, bus_id, pci_id ("10de:2bb5"), memory_bytes, ecc, pcie_width, pcie_width_max. The
    last four are None where this GPU does not support the question.
    """

    def ask(function: str, *arguments: Any) -> Any:
        stage(f"{function} of GPU {index}")
        return getattr(pynvml, function)(*arguments)

    def optional(function: str, *arguments: Any) -> Any:
        try:
            return ask(function, *arguments)
        except pynvml.NVMLError_NotSupported:
            return None

    try:
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        pci = ask("nvmlDeviceGetPciInfo", handle)
        memory = optional("nvmlDeviceGetMemoryInfo", handle)
        ecc = optional("nvmlDeviceGetEccMode", handle)
        return {
            "index": index,
            "name": text_of(ask("nvmlDeviceGetName", handle)),
            "uuid": text_of(ask("nvmlDeviceGetUUID", handle)),
            "bus_id": text_of(pci.busId),
            # The upper half is the device, the lower the vendor (nvml.h, nvmlPciInfo_t).
            "pci_id": f"{pci.pciDeviceId & 0xFFFF:04x}:{pci.pciDeviceId >> 16:04x}",
            "memory_bytes": memory.total if memory else None,
            "ecc": bool(ecc[0]) if ecc else None,
            "pcie_width": optional("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "pcie_width_max": optional("nvmlDeviceGetMaxPcieLinkWidth", handle),
        }
    except pynvml.NVMLError as error:
        return {"index": index, "error": error_of(pynvml, error)}


def main(config: dict[str, Any], answer: Callable[[Any], None], stage: Callable[[str, str], None]) -> None:
    """Answer {"driver_version", "gpus": [of ``describe_gpu``]} or {"error": {code, name, text}}.

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
    gpus = [describe_gpu(pynvml, index, lambda text: stage("nvml", text)) for index in range(count)]
    answer({"driver_version": version, "gpus": gpus})
