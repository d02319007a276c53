"""Verdicts on what surrounds the GPUs: bridges, IOMMU, PCIe errors, shared memory, kernel modules. Reads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..verdicts import Verdict

LAYER = "node"

# Correctable errors are repaired by the link, and a few are usual; many mean a bad cable, riser or slot.
MANY_CORRECTABLE = 1000

# NCCL sends through /dev/shm where GPUs do not reach each other, some ten MiB for each pair and channel; containers
# start with 64 MiB. memlock: what systemd gives a service by default; below it pinned buffers fail.
SHM = "/dev/shm"  # noqa: S108  # the name of what is judged; nothing is written there
SHM_BYTES = 1 << 30
SHM_FREE_BYTES = 512 << 20
MEMLOCK_BYTES = 8 << 20

# Architectures whose unified memory is known to hang or to damage pages with HMM (open-gpu-kernel-modules #968, #1223).
HMM_TROUBLE = ("sm_120",)


def judge(report: Mapping[str, Any], nvml: Mapping[str, Any] | None, expect: Mapping[str, Any]) -> list[Verdict]:
    """Return the verdicts node.*: arguments as ``host.judge``."""
    verdicts = [_nouveau(report), _shm(report, expect), _hmm(report, nvml, expect), _forward_compat(report)]
    if report["gpus"]:
        verdicts += [_iommu(report, expect), _acs(report), *_aer(report), _link_down(report)]
    return verdicts


def _nouveau(report: Mapping[str, Any]) -> Verdict:
    """Is the kernel's own driver for NVIDIA GPUs loaded? It holds them, and NVIDIA's then finds none.

    A warning only: what NVML and the checks of the driver see decides, and they know when a reboot is all it takes.
    """
    bound = [gpu["bus_id"] for gpu in report["gpus"] if gpu["driver"] == "nouveau"]
    if "nouveau" not in report["modules"] and not bound:
        return Verdict("node.nouveau", "pass", LAYER, "nouveau", "The module nouveau is not loaded.")
    message = f"The module nouveau is loaded and has {len(bound)} GPUs."
    action = "Blacklist it, rebuild the initramfs (`update-initramfs -u` or `dracut -f`) and reboot."
    return Verdict("node.nouveau", "warn", LAYER, "nouveau", message, {"bound": bound}, action)


def _iommu(report: Mapping[str, Any], expect: Mapping[str, Any]) -> Verdict:
    """Does the IOMMU work in the mode that the profile wants? ``off`` satisfies ``pt``: neither translates."""
    mode, wanted = report["iommu"]["mode"], expect.get("iommu") or "any"
    evidence = {"wanted": wanted, **report["iommu"], "groups": sorted({str(g["iommu_type"]) for g in report["gpus"]})}
    redirecting = _redirecting(report)
    if mode == "unknown":
        status = "skipped" if wanted == "any" else "inconclusive"
        message = "The kernel does not tell in which mode the IOMMU treats the GPUs."
        action = "" if wanted == "any" else "Run as root, and look at /sys/kernel/iommu_groups/*/type."
        return Verdict("node.iommu", status, LAYER, "IOMMU", message, evidence, action)
    if wanted == "any" and mode == "translated" and redirecting and len(report["gpus"]) > 1:
        message = "The IOMMU translates addresses, and bridges redirect peer-to-peer traffic to it: NCCL may hang."
        action = "Boot with `iommu=pt`, or turn ACS off in the BIOS; the profile may demand it: `expect: iommu: pt`."
        return Verdict("node.iommu", "warn", LAYER, "IOMMU", message, evidence, action)
    if wanted == "any" or mode == wanted or (wanted, mode) == ("pt", "off"):
        return Verdict("node.iommu", "pass", LAYER, "IOMMU", f"The IOMMU's mode for the GPUs is {mode}.", evidence)
    message = f"The IOMMU's mode for the GPUs is {mode}, and the profile wants {wanted}."
    word = "`iommu=pt`" if wanted == "pt" else "`iommu=off`, or turn the IOMMU off in the BIOS,"
    return Verdict("node.iommu", "fail", LAYER, "IOMMU", message, evidence, f"Boot with {word} and verify again.")


def _redirecting(report: Mapping[str, Any]) -> list[str]:
    """Return the bridges above GPUs that send peer-to-peer traffic upstream."""
    return [bridge["bus_id"] for bridge in report["bridges"] if bridge["acs"]["redirect"]]


def _acs(report: Mapping[str, Any]) -> Verdict:
    """Do bridges above the GPUs redirect peer-to-peer traffic to the root complex? Nothing is ever written to them."""
    bridges = report["bridges"]
    unreadable = [bridge["bus_id"] for bridge in bridges if not bridge["acs"]["readable"]]
    redirecting = _redirecting(report)
    paths = {gpu["bus_id"]: gpu["bridges"] for gpu in report["gpus"]}
    evidence = {
        "redirecting": redirecting,
        "unreadable": unreadable,
        "control": {bridge["bus_id"]: bridge["acs"]["on"] for bridge in bridges if bridge["acs"]["capable"]},
        "paths": paths,
    }
    if len(paths) < 2:
        message = "One GPU has no peer, so ACS does not matter."
        return Verdict("node.acs", "skipped", LAYER, "ACS", message, evidence)
    if redirecting:
        message = (
            f"{len(redirecting)} of the {len(bridges)} bridges above the GPUs redirect peer-to-peer traffic upstream: "
            f"{', '.join(redirecting[:4])}{f' and {len(redirecting) - 4} more' if len(redirecting) > 4 else ''}."
        )
        # Documentation/admin-guide/kernel-parameters.txt; a kernel with an IOMMU turns ACS on whatever the BIOS says.
        action = (
            "It halves the bandwidth between GPUs, and with a translating IOMMU NCCL may hang: boot with "
            f'"pci=disable_acs_redir={";".join(redirecting)}", or turn ACS off in the BIOS.'
        )
        return Verdict("node.acs", "warn", LAYER, "ACS", message, evidence, action)
    if unreadable:
        message = f"The extended configuration space of {len(unreadable)} bridges cannot be read: only root can."
        return Verdict("node.acs", "skipped", LAYER, "ACS", message, evidence)
    message = "No bridge above a GPU redirects peer-to-peer traffic." if bridges else "No bridge is above the GPUs."
    return Verdict("node.acs", "pass", LAYER, "ACS", message, evidence)


def _aer(report: Mapping[str, Any]) -> list[Verdict]:
    """Have GPUs or the bridges above them had PCIe errors since boot?"""
    verdicts, known = [], 0
    for device in (*report["gpus"], *report["bridges"]):
        aer = device["aer"]
        if all(aer[kind] is None for kind in ("fatal", "nonfatal", "correctable")):
            continue
        known += 1
        status, kind = _aer_status(aer)
        if status == "pass":
            continue
        message = f"{aer[kind]} {kind} PCIe errors since boot."
        action = (
            "Look at `dmesg` for AER; reseat the GPU, its riser or cable, and move it to another slot to see which."
        )
        subject = f"PCIe {device['bus_id']}"
        verdicts.append(Verdict("node.aer", status, LAYER, subject, message, {"aer": dict(aer)}, action))
    if verdicts:
        return verdicts
    if not known:
        message = "The kernel counts no PCIe errors here: AER is off or belongs to the firmware."
        return [Verdict("node.aer", "skipped", LAYER, "PCIe", message)]
    message = f"No PCIe errors that matter on {known} GPUs and bridges since boot."
    return [Verdict("node.aer", "pass", LAYER, "PCIe", message, {"devices": known})]


def _aer_status(aer: Mapping[str, Any]) -> tuple[str, str]:
    """Return the status for the counters of one device, and the kind of error that made it."""
    if aer["fatal"]:
        return "fail", "fatal"
    if aer["nonfatal"]:
        return "warn", "nonfatal"
    return ("warn" if (aer["correctable"] or 0) >= MANY_CORRECTABLE else "pass"), "correctable"


def _link_down(report: Mapping[str, Any]) -> Verdict:
    """Has a slot above a GPU, or one where a GPU was, lost its link since boot? A GPU can go without any Xid."""
    log = report["kernel_log"]
    if log["source"] is None:
        message = f"The kernel log cannot be read ({log['reason']}), so it was not searched for links that went down."
        return Verdict("node.link_down", "skipped", LAYER, "PCIe slots", message)
    if not log["link_down"]:
        return Verdict("node.link_down", "pass", LAYER, "PCIe slots", "No slot has lost its link since boot.")
    ports = ", ".join(f"{entry['bus_id']} (slot {entry['slot']})" for entry in log["link_down"])
    message = f"Slots have lost their link since boot: {ports}."
    action = "Compare with the GPUs on the bus; reseat what is in the slot, and try `pcie_aspm=off pcie_port_pm=off`."
    evidence = {"link_down": list(log["link_down"])}
    return Verdict("node.link_down", "warn", LAYER, "PCIe slots", message, evidence, action)


def _shm(report: Mapping[str, Any], expect: Mapping[str, Any]) -> Verdict:
    """Is there enough shared and lockable memory for NCCL without peer-to-peer?"""
    shm, memlock = report["shm"], report["memlock_bytes"]
    evidence = {"shm": shm, "memlock_bytes": memlock}
    if (expect.get("gpus") or len(report["gpus"])) < 2:
        message = "One GPU has no peer, so NCCL needs no shared memory."
        return Verdict("node.shm", "skipped", LAYER, SHM, message, evidence)
    if shm is None:
        action = "Mount a tmpfs there."
        return Verdict("node.shm", "fail", LAYER, SHM, "There is no /dev/shm.", evidence, action)
    if shm["total_bytes"] < SHM_BYTES or shm["free_bytes"] < SHM_FREE_BYTES:
        message = (
            f"{shm['free_bytes'] >> 20} of {shm['total_bytes'] >> 20} MiB are free; NCCL may need it between GPUs."
        )
        action = (
            "Make it larger (`mount -o remount,size=16G /dev/shm`, --shm-size of a container), or remove old files."
        )
        return Verdict("node.shm", "warn", LAYER, SHM, message, evidence, action)
    if memlock is not None and memlock < MEMLOCK_BYTES:
        message = f"Only {memlock >> 10} KiB of memory may be locked."
        action = "Raise it where the service is started: LimitMEMLOCK=infinity."
        return Verdict("node.shm", "warn", LAYER, SHM, message, evidence, action)
    message = f"{shm['free_bytes'] >> 20} MiB of shared memory are free."
    return Verdict("node.shm", "pass", LAYER, SHM, message, evidence)


def _hmm(report: Mapping[str, Any], nvml: Mapping[str, Any] | None, expect: Mapping[str, Any]) -> Verdict:
    """Is HMM on where it is known to hurt? The value is that of the loaded module, not of modprobe.d."""
    if report["hmm"] is None:
        return Verdict("node.hmm", "skipped", LAYER, "nvidia_uvm", "The module nvidia_uvm is not loaded.")
    evidence = {"hmm": report["hmm"]}
    arch = expect.get("arch") or next(
        (f"sm_{gpu['compute_capability'].replace('.', '')}" for gpu in (nvml or {}).get("gpus", []) if _capable(gpu)),
        "",
    )
    if report["hmm"] and arch in HMM_TROUBLE:
        message = f"HMM is on; with {arch} unified memory has hung, and cuInit has failed with error 3."
        action = "Set uvm_disable_hmm to 1 for nvidia_uvm in the profile's `driver: parameters`."
        return Verdict("node.hmm", "warn", LAYER, "nvidia_uvm", message, evidence, action)
    message = f"HMM is {'on' if report['hmm'] else 'off'} in the loaded module."
    return Verdict("node.hmm", "pass", LAYER, "nvidia_uvm", message, evidence)


def _capable(gpu: Mapping[str, Any]) -> bool:
    """Tell whether NVML told the compute capability of a GPU."""
    return bool(gpu.get("compute_capability"))


def _forward_compat(report: Mapping[str, Any]) -> Verdict:
    """Does the loader's path hold a forward-compatibility libcuda? It shadows the driver's own."""
    found = report["forward_compat"]
    if not found:
        message = "No forward-compatibility libcuda is in the loader's path."
        return Verdict("node.forward_compat", "pass", LAYER, "loader", message)
    message = f"The loader's path has a forward-compatibility libcuda: {', '.join(found)}."
    action = "Remove the packages cuda-compat-*, or the line in /etc/ld.so.conf.d, and run ldconfig."
    return Verdict("node.forward_compat", "warn", LAYER, "loader", message, {"directories": found}, action)
