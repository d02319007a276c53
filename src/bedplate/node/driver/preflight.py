"""May the driver be changed now? Judged from a report of driver.inspect, before anything is touched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..verdicts import Verdict
from . import rules
from .package_state import is_driver_package
from .secure_boot import insists

LAYER = "driver"
SUBJECT = "NVIDIA driver"

MIB = 1 << 20
# What a change needs. /boot: a new image is written beside the old one, plus room for what the driver adds (the
# firmware of GSP is 60 MiB). /usr, /var, /lib/modules: the packages unpacked, apt's archives and DKMS's trees; a
# 580 set has about 400 MiB of archives and 1.2 GiB unpacked, a build of the modules about 500 MiB.
BOOT_MARGIN = 64 * MIB
NEEDED = {"/usr": 1536 * MIB, "/var": 1536 * MIB, "/lib/modules": 256 * MIB}

POLL_S = 2.0

Users = Sequence[Mapping[str, Any]]


def wait_for_users(
    users: Callable[[], Users], wait_s: float = 0.0, *, sleep: Callable[[float], None] = time.sleep
) -> list[Mapping[str, Any]]:
    """Return the processes that use the GPUs, after waiting up to wait_s seconds for them to end; kills none.

    users: asks for them, as host.gpu_users.
    """
    deadline = time.monotonic() + wait_s
    found = list(users())
    while found and time.monotonic() < deadline:
        sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
        found = list(users())
    return found


def preflight(
    report: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    gpus: Sequence[Mapping[str, Any]] | None = None,
    users: Users = (),
    waited_s: float = 0.0,
    cuda: str = "",
) -> list[Verdict]:
    """Return the verdicts of what stands for or against changing the driver now. Nothing is changed.

    report: of driver.inspect. wanted: {version, flavour, source, packages, parameters}. gpus: NVIDIA GPUs on the
    bus as host.gpus_on_bus gives them ({pci_id, ...}); None takes the ids of the report. users: processes that use
    the GPUs ({pid, comm, user}), waited_s: seconds that were spent waiting for them. cuda: the CUDA version that the
    toolkit or the stack needs, such as "13.0.1"; empty for none.
    """
    ids = [str(gpu.get("pci_id", "")) for gpu in gpus] if gpus is not None else list(report["gpus"])
    managed = wanted.get("source") != "none"
    verdicts = [
        _flavour(wanted, ids),
        _supported(report, wanted, ids),
        *_cuda(wanted, cuda),
        *_nouveau(report),
        *idle(users, waited_s),
    ]
    if managed:
        verdicts += [
            _secure_boot(report, wanted),
            *_headers(report, wanted),
            *_space(report),
            *_reboot(report),
            *_interrupted(report),
        ]
    return verdicts


def _flavour(wanted: Mapping[str, Any], ids: Sequence[str]) -> Verdict:
    """Return whether the GPUs work with the wanted kernel modules."""
    flavour, open_only = wanted.get("flavour") or "open", rules.open_only(ids)
    evidence = {"wanted": flavour, "gpus": sorted(set(ids)), "open_only": open_only}
    if flavour == "open" or not open_only:
        message = f"The {flavour} kernel modules are wanted, and no GPU here stands against them."
        return Verdict("driver.flavour", "pass", LAYER, SUBJECT, message, evidence)
    message = (
        f"The profile asks for the proprietary kernel modules, and the GPU {open_only[0]} works with the open ones "
        "only (Blackwell and later): it would be found and never start."
    )
    action = "Set driver.flavour to open in the profile."
    return Verdict("driver.flavour", "fail", LAYER, f"GPU {open_only[0]}", message, evidence, action)


def _supported(report: Mapping[str, Any], wanted: Mapping[str, Any], ids: Sequence[str]) -> Verdict:
    """Return whether the wanted driver exists for this system and knows its GPUs."""
    version, source = wanted.get("version") or "", wanted.get("source", "none")
    system, release = report["os"]["id"], report["os"]["version"]
    subject = f"{SUBJECT} {version}".strip()
    evidence = {"system": f"{system} {release}".strip(), "source": source, "version": version}
    old = rules.too_old_for(ids, version) if version else None
    if old:
        message = f"It is too old for the GPU {old[0]}, which {old[1]} was the first to know."
        return Verdict(
            "driver.unsupported",
            "fail",
            LAYER,
            subject,
            message,
            evidence,
            f"Pin a driver from {old[1]} on in the profile.",
        )
    if source == "nvidia":
        first = rules.first_branch(system, release)
        if first is None:
            message = (
                f"NVIDIA's repository has no driver for {evidence['system'] or 'this system'} that was tried here."
            )
            action = "Use Ubuntu 22.04 or 24.04, Debian 12 or RHEL 9, or set nvidia_driver_source to distro or none."
            return Verdict("driver.unsupported", "fail", LAYER, subject, message, evidence, action)
        if version and rules.branch(version) < first:
            message = (
                f"NVIDIA's repository for {evidence['system']} begins with {first}; another system's repository does "
                "not fit, because its key is refused here."
            )
            action = f"Pin a driver from {first} on with a toolkit that goes with it, or use Debian 12."
            return Verdict("driver.unsupported", "fail", LAYER, subject, message, evidence, action)
    return Verdict("driver.unsupported", "pass", LAYER, subject, "It exists for this system and its GPUs.", evidence)


def _cuda(wanted: Mapping[str, Any], cuda: str) -> list[Verdict]:
    """Return whether the wanted driver is new enough for a CUDA version."""
    version = wanted.get("version") or ""
    least = rules.minimum_for_cuda(cuda) if cuda and version else None
    if not least:
        return []
    subject, evidence = f"CUDA {cuda}", {"cuda": cuda, "driver": version, "minimum": least}
    if rules.numbers(version) >= rules.numbers(least):
        message = f"The driver {version} is new enough: {least} is the least."
        return [Verdict("driver.toolkit_minimum", "pass", LAYER, subject, message, evidence)]
    message = f"It needs a driver from {least} on, and the profile pins {version}."
    action = f"Pin a driver from {least} on, or a toolkit and a stack of an older CUDA."
    return [Verdict("driver.toolkit_minimum", "fail", LAYER, subject, message, evidence, action)]


def _nouveau(report: Mapping[str, Any]) -> list[Verdict]:
    """Return a warning when nouveau holds the GPUs."""
    if not report["nouveau"]["loaded"]:
        return []
    message = "The module nouveau is loaded and holds the GPUs; nvidia can take them after a reboot only."
    action = "Allow the reboot after the change: nvidia_driver_reboot."
    evidence = dict(report["nouveau"])
    return [Verdict("driver.nouveau", "warn", LAYER, "nouveau", message, evidence, action)]


def idle(users: Users, waited_s: float) -> list[Verdict]:
    """Return a refusal when processes use the GPUs; the arguments are those of ``preflight``."""
    if not users:
        return [Verdict("driver.gpu_in_use", "pass", LAYER, SUBJECT, "No process uses the GPUs.", {"processes": []})]
    listed = [{key: user.get(key) for key in ("pid", "comm", "user") if user.get(key) is not None} for user in users]
    names = ", ".join(f"{user.get('comm', '?')} ({user.get('pid', '?')})" for user in users[:5])
    more = f" and {len(users) - 5} more" if len(users) > 5 else ""
    waited = f" after {waited_s:.0f} s of waiting" if waited_s else ""
    message = f"The GPUs are in use{waited} by {names}{more}."
    action = "Drain the node: stop these processes, or let bedplate_before_change do it, and run again. None is killed."
    evidence = {"processes": listed, "waited_s": waited_s}
    return [Verdict("driver.gpu_in_use", "fail", LAYER, SUBJECT, message, evidence, action)]


def uses_dkms(wanted: Mapping[str, Any]) -> bool:
    """Tell whether the wanted packages build their modules on the node; when no packages are named, they do."""
    names = list(wanted.get("packages") or {})
    return not names or any("dkms" in name for name in names)


def _secure_boot(report: Mapping[str, Any], wanted: Mapping[str, Any]) -> Verdict:
    """Return whether the kernel would take the modules that DKMS is going to build."""
    boot = report["secure_boot"]
    demanded, key = insists(boot), boot["dkms_key"]
    evidence = {name: boot[name] for name in ("state", "setup_mode", "validation", "keys_readable", "dkms_key")}
    if demanded is False:
        return Verdict("driver.secure_boot", "pass", LAYER, "Secure Boot", "It does not stand in the way.", evidence)
    if demanded is None:
        message = "Whether it is on cannot be read from the EFI variables."
        action = "Run as root on the node itself: `mokutil --sb-state`."
        return Verdict("driver.secure_boot", "inconclusive", LAYER, "Secure Boot", message, evidence, action)
    if not uses_dkms(wanted):
        message = "It is on, and the distribution's prebuilt, signed modules are wanted."
        return Verdict("driver.secure_boot", "pass", LAYER, "Secure Boot", message, evidence)
    if key is None:
        message = "It is on, and DKMS has no key to sign with: the kernel would refuse the new module."
        action = (
            "Make and enrol a key first: `update-secureboot-policy --new-key` (Ubuntu) or `dkms generate_mok`, then "
            "`mokutil --import` its certificate and confirm at the console in a reboot; or use signed prebuilt modules."
        )
        return Verdict("driver.secure_boot", "fail", LAYER, "Secure Boot", message, evidence, action)
    if key["enrolled"]:
        message = f"It is on, and the key of DKMS, {key['path']}, is enrolled."
        return Verdict("driver.secure_boot", "pass", LAYER, key["path"], message, evidence)
    if key["enrolled"] is None or not boot["keys_readable"]:
        message = f"It is on, and whether the key of DKMS, {key['path']}, is enrolled cannot be read."
        action = f"Run as root on the node itself: `mokutil --test-key {key['path']}`."
        return Verdict("driver.secure_boot", "inconclusive", LAYER, key["path"], message, evidence, action)
    message = f"It is on, and the key of DKMS, {key['path']}, is not enrolled: the kernel would refuse the new module."
    action = (
        f"Run `mokutil --import {key['path']}` and confirm at the console in a reboot, or use signed prebuilt modules."
    )
    return Verdict("driver.secure_boot", "fail", LAYER, key["path"], message, evidence, action)


def headers_package(report: Mapping[str, Any], kernel: str) -> str:
    """Return the package that holds the headers of a kernel on this system."""
    system = report["os"]["id"]
    return f"kernel-devel-{kernel}" if system in (*rules.RHEL_LIKE, "fedora") else f"linux-headers-{kernel}"


def _headers(report: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Verdict]:
    """Return whether DKMS can build for every kernel that can boot."""
    if not uses_dkms(wanted):
        return []
    kernels = report["kernel"]["bootable"]
    lacking = [kernel for kernel in kernels if not report["kernels"][kernel]["headers"]]
    verdicts: list[Verdict] = []
    for kernel in lacking:
        package = headers_package(report, kernel)
        message = f"Its headers are not installed, so DKMS would build no module for it, and it can boot: {package}."
        action = f"Install {package}, or remove the kernel."
        evidence = {"kernel": kernel, "package": package, "bootable": kernels}
        verdicts.append(Verdict("driver.headers_missing", "fail", LAYER, f"kernel {kernel}", message, evidence, action))
    if kernels and not lacking:
        message = f"The headers of every kernel that can boot are there: {', '.join(kernels)}."
        verdicts.append(Verdict("driver.headers_missing", "pass", LAYER, SUBJECT, message, {"bootable": kernels}))
    return verdicts


def needed_bytes(report: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes that a change needs, by directory."""
    images = [kernel["initramfs"]["bytes"] or 0 for kernel in report["kernels"].values() if kernel["initramfs"]]
    boot = {"/boot": max(images) + BOOT_MARGIN} if images else {}
    return {**boot, **NEEDED}


def _space(report: Mapping[str, Any]) -> list[Verdict]:
    """Return whether there is room for a change."""
    verdicts: list[Verdict] = []
    free = report["free_bytes"]
    for directory, needed in needed_bytes(report).items():
        there = free.get(directory)
        if there is not None and there < needed:
            evidence = {"directory": directory, "free_bytes": there, "needed_bytes": needed}
            message = f"It has {there // MIB} MiB free, and a change of the driver needs {needed // MIB} MiB."
            action = "Remove kernels that nobody boots (`apt autoremove`), or make room, and run again."
            verdicts.append(Verdict("driver.no_space", "fail", LAYER, directory, message, evidence, action))
    if not verdicts:
        message = "There is room for a change of the driver."
        verdicts.append(Verdict("driver.no_space", "pass", LAYER, "file systems", message, {"free_bytes": dict(free)}))
    return verdicts


def _reboot(report: Mapping[str, Any]) -> list[Verdict]:
    """Return whether a reboot is pending already, and not because of the driver itself."""
    reboot = report["reboot"]
    if not reboot["required"]:
        return []
    packages = reboot["packages"]
    evidence = dict(reboot)
    if packages and all(is_driver_package(name) for name in packages):
        # An interrupted run of ours, or a driver that is being taken back: refusing would keep the node as it is.
        message = "A reboot is pending for packages of the driver only; this change replaces what it would load."
        action = "Allow the reboot after the change: nvidia_driver_reboot."
        return [Verdict("driver.reboot_pending", "warn", LAYER, "node", message, evidence, action)]
    message = f"A reboot is pending already, for {', '.join(packages[:5]) or 'reasons that nobody noted'}."
    action = "Reboot the node first, so that a fault of that change is not taken for one of this."
    return [Verdict("driver.reboot_pending", "needs-reboot", LAYER, "node", message, evidence, action)]


def _interrupted(report: Mapping[str, Any]) -> list[Verdict]:
    """Return a note when dpkg was interrupted; installing settles it, so it does not refuse."""
    half = [item["name"] for item in report["packages"] if item["state"] != "installed"]
    if not half and not report["dpkg_interrupted"]:
        return []
    message = f"dpkg was interrupted; not finished: {', '.join(half[:5]) or 'its journal'}."
    action = "The change finishes it with `dpkg --configure -a` first."
    evidence = {"packages": half, "journal": report["dpkg_interrupted"]}
    return [Verdict("driver.half_installed", "warn", LAYER, SUBJECT, message, evidence, action)]
