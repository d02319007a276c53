"""Will the next boot find its driver? Modules, signatures, initramfs and firmware for every kernel that can boot.

A reboot must not be the discovery: what is wrong here does not show until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..verdicts import Verdict
from .secure_boot import insists
from .sources import LAYER, SUBJECT, Sources, main_module

# CUDA needs these two; the others (modeset, drm, peermem) are of displays and of RDMA.
NEEDED_MODULES = ("nvidia", "nvidia_uvm")
MTIME_SLACK_S = 1.0


def judge(report: Mapping[str, Any], wanted: Mapping[str, Any], sources: Sources) -> list[Verdict]:
    """Return the verdicts on what the next boot will find.

    report: of driver.inspect. wanted: {version, flavour, ...}. sources: of driver_sources.sources_of.
    """
    kernels = report["kernel"]["bootable"]
    if not kernels:
        message = "There is no kernel on this file system, as in a container, so its modules were not checked."
        return [Verdict("driver.dkms_missing", "skipped", LAYER, SUBJECT, message)]
    version = wanted.get("version") or sources.library or ""
    return [
        *_modules(report, version),
        *_signatures(report, sources),
        *_initramfs(report, version),
        *_nouveau(report),
        *_firmware(report, wanted, version),
    ]


def _modules(report: Mapping[str, Any], version: str) -> list[Verdict]:
    """Return whether every kernel that can boot has the modules."""
    verdicts = [verdict for kernel in report["kernel"]["bootable"] for verdict in _modules_of(report, kernel, version)]
    if not verdicts:
        kernels = ", ".join(report["kernel"]["bootable"])
        message = f"Every kernel that can boot has its modules: {kernels}."
        evidence = {"kernels": report["kernel"]["bootable"], "version": version}
        verdicts.append(Verdict("driver.dkms_missing", "pass", LAYER, SUBJECT, message, evidence))
    return verdicts


def _modules_of(report: Mapping[str, Any], kernel: str, version: str) -> list[Verdict]:
    """Return what is wrong with the modules of one kernel."""
    found = report["kernels"][kernel]
    first: dict[str, dict[str, Any]] = {}
    for module in sorted(found["modules"], key=lambda item: str(item["name"])):  # stable: preferred files stay first
        first.setdefault(module["name"], module)
    evidence = {
        "kernel": kernel,
        "modules": {name: module["version"] for name, module in first.items()},
        "dkms": found["dkms"] or report["dkms"],
        "headers": found["headers"],
    }
    subject = f"kernel {kernel}"
    missing = [name for name in NEEDED_MODULES if name not in first]
    if missing:
        failed = next((state for state in found["dkms"] if state["state"] == "failed"), None)
        if failed:
            message = f"It can boot and has no module {missing[0]}; DKMS could not build it: {failed['error']}."
            action = f"Read {failed['log']}. Pin a driver that is made for this kernel, or remove the kernel."
            return [Verdict("driver.dkms_missing", "fail", LAYER, subject, message, evidence, action)]
        built = any(state["state"] == "built" for state in found["dkms"])
        state = "DKMS has built it and not installed it" if built else "DKMS has not built it"
        why = "" if found["headers"] or built else ", and its headers are not installed"
        message = f"It can boot and has no module {' and no '.join(missing)}; {state}{why}."
        action = f"Run `dkms autoinstall -k {kernel}`" + (
            ", and read its make.log when that fails." if found["headers"] else ""
        )
        if not found["headers"] and not built:
            action = f"Install the headers of {kernel}, then run `dkms autoinstall -k {kernel}`."
        return [Verdict("driver.dkms_missing", "fail", LAYER, subject, message, evidence, action)]
    unknown = [module for module in first.values() if module["version"] is None]
    if unknown:
        message = f"The version of {unknown[0]['path']} cannot be read: {unknown[0]['error'] or 'it names none'}."
        action = f"Run `modinfo -F version {unknown[0]['path']}`, and compare it with {version or 'the library'}."
        return [Verdict("driver.dkms_missing", "inconclusive", LAYER, subject, message, evidence, action)]
    other = [module for module in first.values() if version and module["version"] != version]
    if other:
        message = f"It would load {other[0]['path']}, which is {other[0]['version']} and not {version}."
        name = next((state["module"] for state in report["dkms"]), "nvidia")  # Debian's is nvidia-current-open
        action = (
            f"Run `dkms install --force -m {name} -v {version} -k {kernel}`, or remove the file that is in the way."
        )
        return [Verdict("driver.dkms_missing", "fail", LAYER, subject, message, evidence, action)]
    return []


def _signatures(report: Mapping[str, Any], sources: Sources) -> list[Verdict]:
    """Return whether the kernel will accept the modules' signatures, where Secure Boot is on."""
    boot = report["secure_boot"]
    demanded = insists(boot)
    if demanded is False or not any(main_module(report, kernel) for kernel in report["kernel"]["bootable"]):
        return []
    running = main_module(report, report["kernel"]["running"])
    # What is loaded was accepted, whatever could be read of the keys.
    accepted = running["signer"] if running and sources.loaded and sources.loaded == sources.module else None
    verdicts: list[Verdict] = []
    for kernel in report["kernel"]["bootable"]:
        module = main_module(report, kernel)
        if module is None or module["trusted"] or (accepted and module["signer"] == accepted):
            continue
        evidence = {"kernel": kernel, **{key: module[key] for key in ("path", "signed", "signer", "serial", "trusted")}}
        evidence["secure_boot"] = boot["state"]
        subject = f"kernel {kernel}"
        if demanded and module["trusted"] is False:
            who = f"signed by {module['signer']}, whose key is not enrolled" if module["signed"] else "not signed"
            message = f"Secure Boot is on and {module['path']} is {who}: it will not load."
            key = boot["dkms_key"]["path"] if boot["dkms_key"] else "CERTIFICATE"
            action = f"Run `mokutil --import {key}`, reboot, and confirm at the console; build an unsigned one again."
            verdicts.append(Verdict("driver.secure_boot", "fail", LAYER, subject, message, evidence, action))
        else:
            message = f"Whether the kernel accepts the signature of {module['path']} cannot be read."
            action = "Run as root: `mokutil --sb-state`, `mokutil --list-enrolled`, `modinfo -F signer` of that file."
            verdicts.append(Verdict("driver.secure_boot", "inconclusive", LAYER, subject, message, evidence, action))
    if not verdicts:
        message = "The kernel accepts the signatures of the modules."
        evidence = {"secure_boot": boot["state"]}
        verdicts.append(Verdict("driver.secure_boot", "pass", LAYER, "Secure Boot", message, evidence))
    return verdicts


def _initramfs(report: Mapping[str, Any], version: str) -> list[Verdict]:
    """Return whether the initramfs of every kernel that can boot holds this driver or none."""
    verdicts: list[Verdict] = []
    fresh: list[str] = []
    for kernel in report["kernel"]["bootable"]:
        image = report["kernels"][kernel]["initramfs"]
        if image is None:
            continue
        evidence = {"kernel": kernel, **image}
        if not image["listed"]:
            message = f"What {image['path']} holds cannot be listed."
            action = f"Run `lsinitramfs {image['path']}` (or lsinitrd) and look for nvidia and nouveau."
            verdicts.append(
                Verdict("driver.initramfs_stale", "inconclusive", LAYER, f"kernel {kernel}", message, evidence, action)
            )
            continue
        stale = _stale(report, kernel, image, version)
        if stale:
            action = f"Run `update-initramfs -u -k {kernel}` (dracut: `dracut -f --kver {kernel}`)."
            verdicts.append(
                Verdict("driver.initramfs_stale", "fail", LAYER, f"kernel {kernel}", stale, evidence, action)
            )
        else:
            fresh.append(kernel)
    if fresh and not verdicts:
        message = f"The initramfs of each kernel holds this driver or none: {', '.join(fresh)}."
        verdicts.append(Verdict("driver.initramfs_stale", "pass", LAYER, SUBJECT, message, {"kernels": fresh}))
    return verdicts


def _stale(report: Mapping[str, Any], kernel: str, image: Mapping[str, Any], version: str) -> str:
    """Return what is stale in an image, "" when nothing is."""
    made = (image["mtime"] or 0.0) + MTIME_SLACK_S
    if image["firmware"] and version and version not in image["firmware"]:
        return f"{image['path']} holds the firmware of {', '.join(image['firmware'])} and not of {version}."
    module = main_module(report, kernel)
    if image["nvidia"] and module and (module["mtime"] or 0.0) > made:
        return f"{image['path']} holds {', '.join(image['nvidia'])} and is older than {module['path']}."
    if image["nouveau"] and report["nouveau"]["blacklisted"] and (report["configured_mtime"] or 0.0) > made:
        return (
            f"{image['path']} holds nouveau and is older than what blacklists it, {report['nouveau']['blacklisted']}."
        )
    return ""


def _nouveau(report: Mapping[str, Any]) -> list[Verdict]:
    """Return what is wrong about nouveau: loaded, or free to load at the next boot."""
    nouveau = report["nouveau"]
    if not nouveau["loaded"]:
        return []
    evidence = dict(nouveau)
    if nouveau["blacklisted"]:
        message = f"It is loaded, and {nouveau['blacklisted']} forbids it from the next boot on."
        return [Verdict("driver.nouveau", "needs-reboot", LAYER, "nouveau", message, evidence, "Reboot the node.")]
    message = "It is loaded and not blacklisted, so it will hold the GPUs after the next boot as well."
    action = "Blacklist nouveau in /etc/modprobe.d, run `update-initramfs -u -k all`, and reboot."
    return [Verdict("driver.nouveau", "fail", LAYER, "nouveau", message, evidence, action)]


def _firmware(report: Mapping[str, Any], wanted: Mapping[str, Any], version: str) -> list[Verdict]:
    """Return whether the firmware that the open modules give to the GPU is there."""
    if not version:
        return []
    subject, evidence = f"firmware {version}", {"there": report["firmware"], "wanted": version}
    if version in report["firmware"]:
        return [Verdict("driver.firmware_missing", "pass", LAYER, subject, "It is on disk.", evidence)]
    there = f"; there is {', '.join(report['firmware'])}" if report["firmware"] else ""
    message = f"/lib/firmware/nvidia/{version} is missing{there}: the open modules cannot start a GPU without it."
    action = (
        f"Install the firmware package of {version} (nvidia-firmware-*, firmware-nvidia-gsp), exactly this version."
    )
    status = "fail" if (wanted.get("flavour") or "open") == "open" else "warn"
    return [Verdict("driver.firmware_missing", status, LAYER, subject, message, evidence, action)]
