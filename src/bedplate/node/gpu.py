"""Which GPUs does NVML see, and are they the expected ones? Reporting (``query``) is apart from judging."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from . import nvml_child
from .child import run_probe
from .verdicts import Verdict

LAYER = "driver"
SUBJECT = "GPUs"

# Seconds for all of NVML's answers. Without the persistence daemon the first call wakes up every GPU, which
# takes about a second each.
TIMEOUT_S = 60.0

# What an NVML code asks for, where it is more than "look at the driver": status and next step. Codes: nvml.h,
# nvmlReturn_t.
_ADVICE = {
    9: ("fail", "The kernel module is not loaded: look at `dmesg` and `dkms status`."),
    12: ("fail", "The driver's library libnvidia-ml.so.1 is not installed: install the driver."),
    15: ("needs-reset", "The GPU fell off the bus: look at `dmesg` for its Xid, then reset it or reboot."),
    16: ("needs-reset", "Reset the GPU, or reboot."),
    18: ("needs-reboot", "The loaded kernel module is not of the installed driver: reboot."),
}
_UNKNOWN_ADVICE = ("fail", "Look at `dmesg` and the driver's installation.")


def query(tools: str, *, timeout_s: float = TIMEOUT_S, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what NVML says, judging nothing; always the same keys.

    tools: the directory of the node's tools, which holds lib/pynvml.py. timeout_s: seconds after which the
    child is killed. environment: extra variables for the child.

    Keys: error (None or {code, name, text}), driver_version (text or None), gpus (list; each has index and
    either error or name, uuid, bus_id, pci_id, memory_bytes, ecc, pcie_width, pcie_width_max).
    """
    outcome = run_probe(
        nvml_child,
        {"library": os.path.join(tools, "lib")},
        python=sys.executable,
        timeout_s=timeout_s,
        environment=environment,
    )
    found: dict[str, Any] = {"error": None, "driver_version": None, "gpus": []}
    if isinstance(outcome.result, dict):
        return {**found, **outcome.result}
    stage = outcome.stages.get("nvml", "starting")
    name = "TIMEOUT" if outcome.timed_out else "CRASH"
    text = f"The process that asks NVML {outcome.ending()} in {stage}"
    return {**found, "error": {"code": None, "name": name, "text": text}}


def judge(
    found: Mapping[str, Any],
    *,
    expected_count: int | None,
    expected_ids: Sequence[str] = (),
    expected_driver_version: str = "",
) -> list[Verdict]:
    """Return the verdicts for what ``query`` returned.

    expected_count: how many GPUs the node must have; None when that is not known, and then nothing is judged.
    expected_ids: the PCI ids, "vendor:device" in lower-case hex, that a GPU may have; none allows all.
    expected_driver_version: the exact driver version; empty allows all.
    """
    if expected_count is None:
        reason = "No number of GPUs is expected here, so they were not checked."
        return [Verdict("gpu.count", "skipped", LAYER, SUBJECT, reason, {"nvml": dict(found)})]
    error = found["error"]
    if error:
        if expected_count == 0 and error["code"] == 12:
            reason = "No GPU is expected here, and no driver is installed."
            return [Verdict("gpu.count", "skipped", LAYER, SUBJECT, reason, {"error": error})]
        return [_error_verdict(SUBJECT, error)]
    gpus = found["gpus"]
    lost = [gpu for gpu in gpus if "error" in gpu]
    well = [gpu for gpu in gpus if "error" not in gpu]
    verdicts = [_error_verdict(f"GPU {gpu['index']}", gpu["error"]) for gpu in lost]
    verdicts.append(_count(gpus, expected_count))
    if expected_ids and well:
        verdicts.append(_ids(well, expected_ids))
    if expected_driver_version:
        verdicts.append(_driver_version(found["driver_version"], expected_driver_version))
    return verdicts


def _error_verdict(subject: str, error: Mapping[str, Any]) -> Verdict:
    """Return the verdict for an NVML error."""
    status, action = _ADVICE.get(error["code"], _UNKNOWN_ADVICE)
    message = f"NVML answers {error['name']}: {error['text'].rstrip('.')}."
    if error["code"] is None:  # NVML itself was not reached, or did not come back
        message = f"{error['text'].rstrip('.')}."
    if error["name"] == "PYNVML_MISSING":
        action = "Run the role node_tools, which copies it to the node."
    return Verdict("gpu.nvml_error", status, LAYER, subject, message, {"error": dict(error)}, action)


def _count(gpus: Sequence[Mapping[str, Any]], expected: int) -> Verdict:
    """Return the verdict about the number of GPUs."""
    seen = [gpu.get("bus_id", f"index {gpu['index']}") for gpu in gpus]
    evidence = {"expected": expected, "seen": len(gpus), "bus_ids": seen}
    if len(gpus) == expected:
        return Verdict("gpu.count", "pass", LAYER, SUBJECT, f"NVML sees {expected}, as expected.", evidence)
    message = f"NVML sees {len(gpus)}, and {expected} are expected."
    action = "Compare the bus ids in the evidence with `lspci -d 10de:`, and look at `dmesg` for the missing one."
    if len(gpus) > expected:
        action = "Correct the number of GPUs in the inventory or the profile."
    return Verdict("gpu.count", "fail", LAYER, SUBJECT, message, evidence, action)


def _ids(gpus: Sequence[Mapping[str, Any]], expected: Sequence[str]) -> Verdict:
    """Return the verdict about the PCI ids."""
    allowed = {text.lower() for text in expected}
    seen = dict(Counter(gpu["pci_id"] for gpu in gpus))
    wrong = [gpu for gpu in gpus if gpu["pci_id"] not in allowed]
    evidence = {"expected": sorted(allowed), "seen": seen, "names": sorted({gpu["name"] for gpu in gpus})}
    if not wrong:
        return Verdict("gpu.ids", "pass", LAYER, SUBJECT, f"All are {', '.join(seen)}.", evidence)
    first = wrong[0]
    wanted = ", ".join(sorted(allowed))
    message = f"GPU {first['index']} is {first['pci_id']} ({first['name']}); expected: {wanted}."
    action = "Use a profile made for these GPUs, or add the id to the profile."
    return Verdict("gpu.ids", "fail", LAYER, SUBJECT, message, evidence, action)


def _driver_version(seen: str, expected: str) -> Verdict:
    """Return the verdict about the driver version."""
    evidence = {"expected": expected, "seen": seen}
    if seen == expected:
        message = f"The driver is {seen}, as the profile pins it."
        return Verdict("gpu.driver_version", "pass", LAYER, SUBJECT, message, evidence)
    message = f"The driver is {seen}, and the profile pins {expected}."
    action = "Install the pinned driver, or use a profile that pins this one."
    return Verdict("gpu.driver_version", "fail", LAYER, SUBJECT, message, evidence, action)
