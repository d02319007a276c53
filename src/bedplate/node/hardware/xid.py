"""What the NVIDIA driver wrote to the kernel log since boot: Xids with their class, adapters that did not start.

An Xid is the driver's number for an error of a GPU. What each one asks for is NVIDIA's Xid catalogue ("Resolution
Bucket (Immediate Action)", https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). What it leaves open,
or does not list, is given with its own reason below. The forms of the lines are those of the open kernel modules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..verdicts import Verdict
from .pci import short_bus_id

LAYER = "node"

# From harmless to bad. note: the driver says so and nothing is to be done. application: what ran on the GPU is at
# fault, or lost its work. unknown: not in the catalogue. rma: the hardware, to be looked at or replaced.
CLASSES = ("note", "application", "unknown", "reset", "reboot", "rma")

# Xid -> class and words. The words are ours, kept short; the catalogue has more.
NAMED: dict[int, tuple[str, str]] = {
    13: ("application", "exception in a kernel"),
    31: ("application", "memory page fault"),
    43: ("note", "a channel was stopped"),
    45: ("note", "cleanup after an earlier error"),
    46: ("reset", "the GPU stopped processing"),
    48: ("reset", "uncorrectable ECC error"),
    54: ("rma", "auxiliary power is not connected"),
    62: ("reset", "internal micro-controller halted"),
    63: ("note", "a memory row will be remapped"),
    64: ("rma", "a memory row could not be remapped"),
    74: ("reset", "NVLink error"),
    79: ("reboot", "the GPU fell off the bus"),
    94: ("application", "contained memory error"),
    95: ("reset", "uncontained memory error"),
    109: ("reset", "context switch timeout"),
    119: ("reset", "the GSP did not answer"),
    120: ("reset", "error of the GSP"),
    140: ("reset", "unrecovered ECC error"),
    143: ("reset", "the GPU did not initialise"),
    151: ("reboot", "key rotation error"),
    154: ("note", "recovery action changed"),
    156: ("reset", "a resource was retired"),
    157: ("rma", "a resource could not be retired"),
    158: ("reset", "fatal timeout"),
    # No bucket in the catalogue; a fatal timeout of the link, a halted micro-controller and the details of an
    # Xid 48 leave the GPU in need of the same as 46, 62 and 48. Reports of 175 say the same as 119.
    167: ("reset", "fatal timeout on PCIe"),
    168: ("rma", "errors in protected memory; it has less of it"),
    169: ("reset", "internal micro-controller halted at start"),
    171: ("reset", "uncorrectable error of the memory"),
    172: ("reset", "uncorrectable error of an internal memory"),
    175: ("reset", "the GSP did not answer"),
}
# The rest of the catalogue, by bucket: RESTART_APP (and CHECK_UVM), RESET_GPU, IGNORE.
_APPLICATION = {8, 11, 25, 32, 39, 40, 41, 60, *range(68, 73), 75, 76, 77, 80, *range(82, 87), 88, 89, *range(96, 106)}
_APPLICATION |= {*range(126, 136), 139, 159}
_RESET = {110, 136, *range(144, 151), 155}
_NOTE = {14, 37, 38, 44, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 160, 161, 162, 163}

# Class -> status, what it means, next step.
_JUDGEMENT = {
    "application": (
        "warn",
        "Look at what ran on this GPU at that time; when it comes back with other work, test the GPU.",
    ),
    "unknown": ("warn", "Look this Xid up in NVIDIA's Xid catalogue."),
    "reset": ("needs-reset", "Stop what uses this GPU and reset it: `nvidia-smi --gpu-reset -i {bus_id}`, or reboot."),
    "reboot": (
        "needs-reboot",
        "Reboot; when the GPU is gone again, switch the chassis off, reseat the GPU and its power.",
    ),
    "rma": ("fail", "Take the node out of service, and have the GPU and its power cables looked at or replaced."),
}

# NVML_GPU_RECOVERY_ACTION_*, as Xid 154 prints them, and the class that follows.
_RECOVERY = {0: "note", 1: "reset", 2: "reboot", 3: "reset", 4: "reset", 5: "reset", 6: "reset", 7: "reboot"}

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]{0,40}\): (\d{1,5})\b,? ?(.*)")
_PROCESS = re.compile(r"pid='?(\d{1,10}|<unknown>)'?, ?(?:name='?([^,']{0,64})'?,? ?)?")
_RECOVERY_CHANGED = re.compile(r"changed from 0x[0-9a-fA-F]{1,4}\b.{0,60}? to 0x([0-9a-fA-F]{1,4})\b")
_INIT = re.compile(r"NVRM: GPU ([0-9a-fA-F:.]{7,16}): (?:rm_init_adapter failed|RmInitAdapter failed! ?(.{0,80}))")
_LINK_DOWN = re.compile(r"pcieport ([0-9a-f:.]{12}): pciehp: Slot\(([^)]{0,32})\): Link Down")
# When: microseconds in a record of /dev/kmsg, seconds since boot in dmesg and in journalctl -o short-monotonic.
_KMSG_TIME = re.compile(r"^\d{1,4},\d{1,20},(\d{1,18}),[^;]{0,40};")
_DMESG_TIME = re.compile(r"^(?:<\d{1,3}>)?\[ {0,8}(\d{1,12}\.\d{1,9})\]")


def class_of(xid: int) -> str:
    """Return the class of an Xid, one of ``CLASSES``."""
    if xid in NAMED:
        return NAMED[xid][0]
    for name, members in (("application", _APPLICATION), ("reset", _RESET), ("note", _NOTE)):
        if xid in members:
            return name
    return "unknown"


def read_log(lines: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Return what the lines of a kernel log say about GPUs: {xids, init_failures, link_down}.

    lines: records of /dev/kmsg, or lines of dmesg or journalctl; what is none of these is passed over.

    Each list holds one entry per object, and for an Xid per GPU and number: bus_id, count, first_s and last_s (seconds
    since boot, or None), text (of the last line). xids have also xid, class, pid, process; link_down has slot.
    """
    found: dict[str, dict[tuple[str, int], dict[str, Any]]] = {"xids": {}, "init_failures": {}, "link_down": {}}
    for line in lines:
        match = _XID.search(line)
        if match:
            entry = _count(found["xids"], match.group(1), line, match.group(3), int(match.group(2)))
            entry.update(_xid(int(match.group(2)), match.group(3)))
        elif match := _INIT.search(line):
            _count(found["init_failures"], match.group(1), line, match.group(2) or "")
        elif match := _LINK_DOWN.search(line):
            _count(found["link_down"], match.group(1), line, "Link Down")["slot"] = match.group(2)
    return {kind: list(entries.values()) for kind, entries in found.items()}


def judge(log: Mapping[str, Any], recovered: Collection[str] = ()) -> list[Verdict]:
    """Return the verdicts on the Xids since boot: one for each GPU that has some, or one that passes.

    log: of ``host.inspect``: source, complete, reason and what ``read_log`` returns. recovered: bus ids of the GPUs
    of which NVML says now that no recovery is needed: an earlier reset or reboot has done it, and it is a warning.
    """
    if log["source"] is None:
        message = f"The kernel log cannot be read ({log['reason']}), so it was not searched for Xids."
        return [Verdict("gpu.xid", "skipped", LAYER, "GPUs", message)]
    verdicts = []
    for bus_id in sorted({entry["bus_id"] for entry in log["xids"]}):
        entries = [entry for entry in log["xids"] if entry["bus_id"] == bus_id]
        worst = max(entries, key=lambda entry: CLASSES.index(entry["class"]))
        if worst["class"] != "note":
            verdicts.append(_verdict(bus_id, worst, entries, bus_id in recovered))
    if verdicts:
        return verdicts
    message = "No Xid since boot asks for anything." if log["xids"] else "No Xid since boot."
    if not log["complete"]:
        message = f"No Xid in the kernel log that asks for anything. {log['reason']}"
    evidence = {"source": log["source"], "complete": log["complete"], "xids": list(log["xids"])}
    return [Verdict("gpu.xid", "pass", LAYER, "GPUs", message, evidence)]


def _verdict(bus_id: str, worst: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], recovered: bool) -> Verdict:
    """Return the verdict on the Xids of one GPU."""
    status, action = _JUDGEMENT[worst["class"]]
    words = NAMED.get(worst["xid"], ("", "see NVIDIA's Xid catalogue"))[1]
    times = "" if worst["count"] == 1 else f" {worst['count']} times"
    message = f"Xid {worst['xid']} ({words}){times} since boot."
    if recovered and status in ("needs-reset", "needs-reboot"):
        status, action = "warn", "Watch this GPU: it has failed since boot."
        message += " NVML says that nothing has to be done now."
    evidence = {"class": worst["class"], "xids": [dict(entry) for entry in entries]}
    return Verdict("gpu.xid", status, LAYER, f"GPU {bus_id}", message, evidence, action.format(bus_id=bus_id))


def _count(
    entries: dict[tuple[str, int], dict[str, Any]], bus_id: str, line: str, text: str, key: int = 0
) -> dict[str, Any]:
    """Add one line to its entry, and return the entry."""
    bus = short_bus_id(bus_id)
    bus = bus if "." in bus else f"{bus}.0"
    when = _seconds(line)
    entry = entries.setdefault((bus, key), {"bus_id": bus, "count": 0, "first_s": when})
    entry.update(count=entry["count"] + 1, last_s=when, text=text.strip()[:200])
    return entry


def _xid(xid: int, text: str) -> dict[str, Any]:
    """Return number, class and process of an Xid line; pid and name are optional in it."""
    process = _PROCESS.search(text)
    known = process.group(1) if process and process.group(1).isdigit() else None
    found = {
        "xid": xid,
        "class": class_of(xid),
        "pid": int(known) if known else None,
        "process": process.group(2) if process and known else None,
    }
    changed = _RECOVERY_CHANGED.search(text) if xid == 154 else None
    if changed:
        found["class"] = _RECOVERY.get(int(changed.group(1), 16), "unknown")
    return found


def _seconds(line: str) -> float | None:
    """Return when a line was logged, in seconds since boot, or None."""
    if match := _KMSG_TIME.match(line):
        return int(match.group(1)) / 1e6
    match = _DMESG_TIME.match(line)
    return float(match.group(1)) if match else None
