"""What a node is like below the driver: GPUs on the bus, bridges, IOMMU, kernel log. Reporting is apart from judging.

``inspect`` reports and judges nothing; ``judge`` turns the report and NVML's answers into verdicts and reads nothing.
Everything is read only, and lies under a root directory, so that a directory can play a node.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..child import run_probe
from ..verdicts import Verdict
from . import gpu_verdicts, host_child, host_verdicts, xid
from .pci import (
    AER_FILES,
    acs,
    aer_named,
    aer_total,
    answers,
    bars,
    gpus_on_bus,
    link_speed,
    link_width,
    number,
    pci_id,
    read_text,
)

__all__ = ["gpu_users", "gpus_on_bus", "inspect", "judge"]

# Seconds for reading everything; the journal alone may take ten.
TIMEOUT_S = 30.0

# What holds the devices open on a node at rest, as the kernel shortens the names: the persistence daemon, the fabric
# manager, DCGM's host engine, and its exporter.
DAEMONS = ("nvidia-persiste", "nv-fabricmanage", "nv-hostengine", "dcgm-exporter")


def inspect(root: str = "/", *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return what the node is like, judging nothing; always the same keys.

    root: the directory that stands for ``/``. timeout_s: seconds after which the child that reads is killed.

    Keys:
    - error: None, or why not everything could be read;
    - gpus: one dict per NVIDIA display device: bus_id, pci_id, class, driver, answers (False: configuration reads give
      only ones), width, width_max (lanes), speed_gts, speed_max_gts, bars ({index, start, size}), numa_node, aer,
      iommu_group, iommu_type, bridges (bus ids from the root port down);
    - bridges: those above them: bus_id, pci_id, width, width_max, speed_gts, speed_max_gts, aer, acs (of ``pci.acs``);
      aer: {fatal, nonfatal, correctable: number or None, named: the counters that are not zero};
    - cmdline; iommu: {mode: "off", "pt", "translated", "vfio" or "unknown", units, settings};
    - modules: version by name of those loaded among nvidia, nvidia_uvm, nouveau, vfio_pci;
    - hmm: whether the loaded nvidia_uvm uses it, None when it is not loaded;
    - shm: {total_bytes, free_bytes} or None; memlock_bytes: None for no limit;
    - kernel_log: {source, complete, reason} and what ``xid.read_log`` returns;
    - forward_compat: directories of the loader's path that hold a forward-compatibility libcuda;
    - users: of ``gpu_users``, daemons too.

    Raises child.ChildError when the child cannot be started.
    """
    outcome = run_probe(host_child, {"root": root}, python=sys.executable, timeout_s=timeout_s)
    raw = outcome.result if isinstance(outcome.result, dict) else {}
    error = None
    if outcome.exit_code != 0 or "kernel_log" not in raw:
        error = f"The process that reads the node {outcome.ending()} in {outcome.stages.get('host', 'starting')}"
    return interpret(raw, root, error)


def interpret(raw: Mapping[str, Any], root: str, error: str | None = None) -> dict[str, Any]:
    """Return the report of ``inspect`` for what the child answered: raw may lack every key when it did not end.

    root: as for ``inspect``; the loader's directories and the users of the GPUs are looked up here. error: why raw is
    not whole.
    """
    no_log: dict[str, Any] = {"source": None, "complete": False, "reason": error or "", "lines": []}
    log = raw.get("kernel_log", no_log)
    gpus = [_gpu(entry) for entry in raw.get("gpus", [])]
    return {
        "error": error,
        "gpus": gpus,
        "bridges": [_bridge(entry) for entry in raw.get("bridges", [])],
        "cmdline": raw.get("cmdline"),
        "iommu": iommu(raw.get("cmdline") or "", raw.get("iommu_units", []), gpus),
        "modules": raw.get("modules", {}),
        "hmm": _hmm(raw),
        "shm": raw.get("shm"),
        "memlock_bytes": raw.get("memlock_bytes"),
        "kernel_log": {
            **{key: log[key] for key in ("source", "complete", "reason")},
            **xid.read_log(log["lines"]),
        },
        "forward_compat": forward_compat(raw.get("loader_files", {}), root),
        "users": gpu_users(root, daemons=True),
    }


def judge(
    report: Mapping[str, Any],
    nvml: Mapping[str, Any] | None,
    expect: Mapping[str, Any],
) -> list[Verdict]:
    """Return the verdicts on the devices and the host; reads nothing.

    report: of ``inspect``. nvml: of ``gpu.query``; None where no driver was asked yet. expect: the profile's block:
    gpus (number, or None when it is not known), and optional gpu_ids, arch, bar1_min_mib, pcie_width, ecc, iommu. What
    is None or absent is not demanded.

    No verdict here blames software that a rollback could bring back, but for ``gpu.init_failed``: hardware does not
    get better by it.
    """
    verdicts = []
    if report["error"]:
        action = "Look at `dmesg`: a device or a driver does not answer. Verify again after a reboot."
        verdicts.append(Verdict("node.report", "inconclusive", "node", "node", f"{report['error']}.", {}, action))
    verdicts.append(gpu_verdicts.pci_count(report, nvml, expect))
    if not report["gpus"] and not (nvml or {}).get("gpus"):
        return verdicts  # no GPU: nothing of what follows matters to this node
    return verdicts + gpu_verdicts.judge(report, nvml, expect) + host_verdicts.judge(report, nvml, expect)


def gpu_users(root: str = "/", *, daemons: bool = False) -> list[dict[str, Any]]:
    """Return the processes that have a device of the NVIDIA driver open; root sees those of everybody.

    root: the directory that stands for ``/``. daemons: whether to return also those that run on a node at rest, such as
    nvidia-persistenced.

    Keys: pid, comm (the kernel's 15 characters of its name), user (name, or number when it has none), devices, daemon
    (whether it is one of those). Reads neither the memory maps nor the command line of a process: both wait for one
    that hangs in the driver.
    """
    users = []
    for directory in Path(root, "proc").glob("[0-9]*"):
        devices = _devices(directory / "fd")
        if not devices:
            continue
        comm = read_text(directory / "comm") or ""
        user = {"pid": int(directory.name), "comm": comm, "user": _owner(directory), "devices": devices}
        users.append({**user, "daemon": comm in DAEMONS})
    return sorted((user for user in users if daemons or not user["daemon"]), key=lambda user: user["pid"])


def _devices(directory: Path) -> list[str]:
    """Return the NVIDIA devices among the open files of a process; none when it is gone, or another user's."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    targets = set()
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            targets.add(os.readlink(directory / name))
    return sorted(target for target in targets if target.startswith("/dev/nvidia"))


def _owner(directory: Path) -> str:
    """Return the name of the user who owns a process."""
    try:
        uid = directory.stat().st_uid
    except OSError:
        return "?"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def iommu(cmdline: str, units: list[str], gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how the IOMMU treats the GPUs: {mode, units, settings}.

    cmdline: the kernel's. units: the names in /sys/class/iommu. gpus: with iommu_group and iommu_type.

    What is live counts: the type of the GPUs' groups (Documentation/ABI/testing/sysfs-kernel-iommu_groups), and
    the command line only where the kernel does not tell the type. mode: "off", "pt" (pass-through: addresses are not
    translated), "translated", "vfio" (handed to a virtual machine), "unknown".
    """
    words = re.findall(r"\b(?:iommu|intel_iommu|amd_iommu|iommu\.passthrough|iommu\.strict)=\S+", cmdline)
    settings = dict(word.split("=", 1) for word in words)
    types = {gpu["iommu_type"] for gpu in gpus if gpu["iommu_group"]}
    if not units and not any(gpu["iommu_group"] for gpu in gpus):
        mode = "off"
    elif types & {"DMA", "DMA-FQ"}:
        mode = "translated"
    elif types and types <= {"identity"}:
        mode = "pt"
    elif types & {"unmanaged", "blocked"}:
        mode = "vfio"
    elif not any(gpu["iommu_group"] for gpu in gpus):
        mode = "off"  # there is one, and it has nothing to do with the GPUs
    elif settings.get("iommu") == "pt" or settings.get("iommu.passthrough") == "1":
        mode = "pt"
    else:
        mode = "unknown"
    return {"mode": mode, "units": units, "settings": settings}


def forward_compat(files: Mapping[str, str], root: str = "/") -> list[str]:
    """Return the directories in the loader's configuration that hold a libcuda for forward compatibility.

    files: texts of /etc/ld.so.conf and /etc/ld.so.conf.d/*.conf by path. CUDA's packages of that name put it into
    ``compat`` below the toolkit; with a newer driver it fails with error 803, on other hardware with 804.
    """
    found = []
    for text in files.values():
        for line in text.splitlines():
            directory = line.split("#")[0].strip()
            if not directory.startswith("/") or "compat" not in directory.split("/") or directory in found:
                continue
            if list(Path(root, directory.lstrip("/")).glob("libcuda.so*")):
                found.append(directory)
    return found


def _gpu(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of one GPU."""
    return {
        **_device(raw),
        "class": raw["class"],
        "driver": raw["driver"],
        "answers": answers(_config(raw)),
        "bars": bars(raw["resource"]),
        "numa_node": number(raw["numa_node"]),
        "iommu_group": raw["iommu_group"],
        "iommu_type": raw["iommu_type"],
        "bridges": raw["bridges"],
    }


def _bridge(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of one bridge."""
    return {**_device(raw), "acs": acs(_config(raw))}


def _device(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what GPUs and bridges have in common."""
    aer: dict[str, Any] = {kind: aer_total(raw[name]) for kind, name in AER_FILES.items()}
    aer["named"] = {kind: aer_named(raw[name]) for kind, name in AER_FILES.items() if aer_named(raw[name])}
    return {
        "bus_id": raw["bus_id"],
        "pci_id": pci_id(raw),
        "width": link_width(raw["current_link_width"]),
        "width_max": link_width(raw["max_link_width"]),
        "speed_gts": link_speed(raw["current_link_speed"]),
        "speed_max_gts": link_speed(raw["max_link_speed"]),
        "aer": aer,
    }


def _config(raw: Mapping[str, Any]) -> bytes:
    """Return the configuration space of a device, as far as it could be read."""
    return bytes.fromhex(raw["config"])


def _hmm(raw: Mapping[str, Any]) -> bool | None:
    """Return whether the loaded nvidia_uvm uses heterogeneous memory management; None when it is not loaded.

    Its parameter uvm_disable_hmm is a boolean, which sysfs shows as Y or N.
    """
    text = raw.get("uvm_disable_hmm")
    return None if text not in ("0", "1", "N", "Y") else text in ("0", "N")
