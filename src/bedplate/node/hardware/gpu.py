"""Which GPUs does NVML see, and are they the expected ones? Reporting (``query``) is apart from judging."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..child import run_probe
from ..verdicts import Verdict
from . import nvml_child
from .pci import short_bus_id

LAYER = "driver"
SUBJECT = "GPUs"

# Seconds for all of NVML's answers. Without the persistence daemon the first call wakes up every GPU, which
# takes about a second each.
TIMEOUT_S = 60.0

NOT_LOADED = 9  # nvml.h, NVML_ERROR_DRIVER_NOT_LOADED

# What an NVML code asks for, where it is more than "look at the driver": status and next step. Codes: nvml.h,
# nvmlReturn_t.
_ADVICE = {
    4: ("fail", "Verify as root, and look at the permissions of /dev/nvidia*."),
    8: ("fail", "Connect the GPU's auxiliary power cables."),
    9: ("fail", "The kernel module is not loaded: look at `dmesg` and `dkms status`."),
    10: ("fail", "Look at `dmesg` for Xid 119; a process that hangs in the driver ends only with a reboot."),
    11: ("fail", "The kernel gets no interrupts from this GPU: look at `dmesg` and the BIOS settings of its slot."),
    12: ("fail", "The driver's library libnvidia-ml.so.1 is not installed: install the driver."),
    13: ("fail", "The driver's library lacks this function: it is older than the profile's, or half installed."),
    14: ("fail", "Take the node out of service, and have the GPU replaced."),
    15: ("needs-reset", "The GPU fell off the bus: look at `dmesg` for its Xid, then reset it or reboot."),
    16: ("needs-reset", "Reset the GPU, or reboot."),
    17: ("fail", "The system denies access to the GPU: look at the device rules of its cgroup and at /dev/nvidia*."),
    18: ("needs-reboot", "The loaded kernel module is not of the installed driver: reboot."),
    19: ("fail", "Something holds the GPU for itself, such as another driver: look at `lspci -k -d 10de:`."),
    20: ("fail", "The node is out of memory: look at `free` and `dmesg`, then verify again."),
    23: ("fail", "The node is out of a resource: look at `dmesg`, then verify again."),
    27: ("inconclusive", "The driver is still starting: verify again in a minute."),
    28: ("needs-reset", "The GPU is gone: look at `dmesg` for its Xid, then reset it or reboot."),
}
# The same for what kept NVML from being asked.
_ADVICE_BY_NAME = {
    "TIMEOUT": (
        "fail",
        "The driver hangs: look at `dmesg` for Xid 119 and for processes in state D; they need a reboot.",
    ),
    "PYNVML_MISSING": ("fail", "Run the role node_tools, which copies it to the node."),
}
_UNKNOWN_ADVICE = ("fail", "Look at `dmesg` and the driver's installation.")

# Those of the device and not of the driver: no other driver helps. No power, no interrupts, damaged board data,
# lost, reset required, not found.
_HARDWARE = (8, 11, 14, 15, 16, 28)


def query(tools: str, *, timeout_s: float = TIMEOUT_S, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what NVML says, judging nothing; always the same keys.

    tools: the directory of the node's tools, which holds lib/pynvml.py. timeout_s: seconds after which the
    child is killed. environment: extra variables for the child.

    Keys: error (None or {code, name, text}), driver_version, nvml_version and cuda_version (texts or None), count (None
    or how many GPUs there are) and gpus, one dict for each. A GPU that fails on the way has index, error and, as far as
    they are known, bus_id and pci_id. The others have
    - index, name, uuid, bus_id, pci_id ("10de:2bb5"), compute_capability ("12.0"), vbios;
    - memory_bytes, memory_used_bytes, bar1_bytes, ecc and ecc_pending (bool), ecc_errors ({corrected, uncorrected,
      corrected_total, uncorrected_total}: since the driver was loaded, and over the GPU's life), remapped_rows
      ({correctable, uncorrectable, pending, failed} or None), retired_pages ({single_bit, double_bit, pending} or
      None);
    - pcie_width, pcie_width_max, pcie_gen, pcie_gen_max, pcie_replays;
    - persistence, temperature_c, throttle (list of texts), processes (list of ids), utilization (percent),
      recovery_action ("none", "gpu-reset", "node-reboot", ...);
    - unanswered: functions that gave an error for an answer, with the error's name.
    What a GPU does not support is None. When the time is over, error says so, and gpus holds those that had answered.
    """
    outcome = run_probe(
        nvml_child,
        {"library": os.path.join(tools, "lib")},
        python=sys.executable,
        timeout_s=timeout_s,
        environment=environment,
    )
    found: dict[str, Any] = {"error": None, "gpus": [], "count": None}
    found.update(dict.fromkeys(("driver_version", "nvml_version", "cuda_version")))
    if isinstance(outcome.result, dict):
        found.update(outcome.result)
        if outcome.exit_code == 0:
            return found
    stage = outcome.stages.get("nvml", "starting")
    name = "TIMEOUT" if outcome.timed_out else "CRASH"
    text = f"The process that asks NVML {outcome.ending()} in {stage}"
    return {**found, "error": {"code": None, "name": name, "text": text}}


def judge(
    found: Mapping[str, Any],
    *,
    expected_count: int | None,
    expected_ids: Sequence[str] = (),
    awaits_boot: bool = False,
) -> list[Verdict]:
    """Return the verdicts for what ``query`` returned.

    expected_count: how many GPUs the node must have; None when that is not known, and then nothing is judged.
    expected_ids: the PCI ids, "vendor:device" in lower-case hex, that a GPU may have; none allows all.
    awaits_boot: the driver's files say that its module is loaded by the next boot, so that NVML cannot answer yet.
    """
    if expected_count is None:
        reason = "No number of GPUs is expected here, so they were not checked."
        return [Verdict("gpu.count", "skipped", LAYER, SUBJECT, reason, {"nvml": dict(found)})]
    error = found["error"]
    if error:
        if expected_count == 0 and error["code"] == 12:
            reason = "No GPU is expected here, and no driver is installed."
            return [Verdict("gpu.count", "skipped", LAYER, SUBJECT, reason, {"error": error})]
        verdict = _error_verdict(SUBJECT, error)
        if awaits_boot and error["code"] == NOT_LOADED:
            verdict = replace(verdict, status="needs-reboot", action="Reboot the node.")
        return [verdict]
    gpus = found["gpus"]
    lost = [gpu for gpu in gpus if "error" in gpu]
    well = [gpu for gpu in gpus if "error" not in gpu]
    # Where one of several fails under the same driver, it is the GPU and not the driver.
    verdicts = [_lost(gpu, alone=bool(well)) for gpu in lost]
    verdicts.append(_count(gpus, expected_count))
    if expected_ids and well:
        verdicts.append(_ids(well, expected_ids))
    return verdicts


def after_load(before: Mapping[str, Any], after: Mapping[str, Any], xids: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Return the verdicts gpu.after_load: does each GPU that was well before work was put on it still answer?

    A weak power supply or riser, and GPUs that overheat, show under load only, and some leave no Xid
    (open-gpu-kernel-modules#949, NVSentinel#684). before, after: what ``query`` returned. xids: of the kernel log,
    as ``host.inspect`` reports them, for the evidence. None where no GPU was well before: there is nothing to compare.
    """
    well = {gpu["bus_id"]: gpu for gpu in before["gpus"] if "error" not in gpu}
    if before["error"] or not well:
        return []
    now = {gpu.get("bus_id"): gpu for gpu in after["gpus"]}
    # One that failed in its first call has no bus id; while the number is the same, its place in NVML's order tells.
    if len(after["gpus"]) == len(before["gpus"]):
        now.update({old.get("bus_id"): new for old, new in zip(before["gpus"], after["gpus"]) if "bus_id" not in new})
    action = (
        "Look at the GPU's power, riser and temperature, and at `dmesg`; reboot, and let the node stand this check "
        "before it works again."
    )
    verdicts = []
    for bus_id, gpu in well.items():
        if bus_id not in now and after["error"]:
            continue
        found = now.get(bus_id, {"error": None})
        if "error" in found:
            error = found["error"]
            how = f"answers {error['name']}: {error['text'].rstrip('.')}" if error else "is not there any more"
            evidence = {
                "index": gpu["index"],
                "error": error,
                "xids": [dict(entry) for entry in xids if entry["bus_id"] == short_bus_id(bus_id)],
            }
            subject, message = f"GPU {short_bus_id(bus_id)}", f"It answered before it had work, and now it {how}."
            verdicts.append(Verdict("gpu.after_load", "needs-reboot", "node", subject, message, evidence, action))
    if after["error"]:
        message = f"NVML answered before the GPUs had work, and now: {after['error']['text'].rstrip('.')}."
        evidence = {"error": dict(after["error"]), "xids": [dict(entry) for entry in xids]}
        verdicts.append(Verdict("gpu.after_load", "needs-reboot", "node", SUBJECT, message, evidence, action))
    if verdicts:
        return verdicts
    message = f"All {len(well)} still answer after they had work."
    return [Verdict("gpu.after_load", "pass", "node", SUBJECT, message, {"bus_ids": sorted(well)})]


def _lost(gpu: Mapping[str, Any], *, alone: bool) -> Verdict:
    """Return the verdict for a GPU that answers with an error; alone: others are well."""
    verdict = _error_verdict(f"GPU {gpu['index']}", gpu["error"], device=alone)
    return replace(verdict, evidence={**verdict.evidence, "bus_id": gpu.get("bus_id")})


def _error_verdict(subject: str, error: Mapping[str, Any], *, device: bool = False) -> Verdict:
    """Return the verdict for an NVML error; device: it is known to be the device's and not the driver's."""
    device = device or error["code"] in _HARDWARE
    code, layer = ("gpu.hardware_error", "node") if device else ("gpu.nvml_error", LAYER)
    status, action = _ADVICE_BY_NAME.get(error["name"]) or _ADVICE.get(error["code"], _UNKNOWN_ADVICE)
    message = f"NVML answers {error['name']}: {error['text'].rstrip('.')}."
    if error["code"] is None:  # NVML itself was not reached, or did not come back
        message = f"{error['text'].rstrip('.')}."
    return Verdict(code, status, layer, subject, message, {"error": dict(error)}, action)


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
