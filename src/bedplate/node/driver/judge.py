"""Is the driver that is there the one that was wanted? Judged from a report of driver.inspect and NVML's answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..verdicts import Verdict
from . import cuda_start, next_boot, rules
from .modprobe_config import canonical, same_value
from .secure_boot import insists
from .sources import LAYER, SUBJECT, Sources, changed_by, main_module, sources_of

NVML_MISMATCH = 18  # nvml.h, NVML_ERROR_LIB_RM_VERSION_MISMATCH

# What must be readable for a verdict on the driver to mean anything.
_ESSENTIAL = (
    "/proc/driver/nvidia/version",
    "/sys/module/nvidia/version",
    "/lib/modules",
    "/boot",
    "/var/lib/dkms",
    "/var/lib/dpkg/status",
)


def judge(
    report: Mapping[str, Any],
    wanted: Mapping[str, Any],
    nvml: Mapping[str, Any] | None = None,
    *,
    expected_gpus: int | None = None,
    cuda: Mapping[str, Any] | None = None,
) -> list[Verdict]:
    """Return the verdicts on the driver.

    report: of driver.inspect. wanted: {version, flavour, parameters, source, packages}; an empty version asks only
    whether the parts agree with each other. nvml: what gpu.query returned. expected_gpus: how many GPUs the node must
    have; 0 excuses a module that is not loaded because there is no GPU. cuda: what
    cuda_start.query returned, where somebody asked.
    """
    sources = sources_of(report, wanted, nvml or {})
    return [
        *_versions(report, wanted, sources, nvml or {}, expected_gpus),
        *_flavour(report, wanted),
        *next_boot.judge(report, wanted, sources),
        *_parameters(report, wanted),
        *(cuda_start.judge(cuda, report["parameters"]["live"]) if cuda else []),
        *_upgrades(report, wanted),
        *_half_installed(report),
        *_unreadable(report),
    ]


def _versions(
    report: Mapping[str, Any],
    wanted: Mapping[str, Any],
    sources: Sources,
    nvml: Mapping[str, Any],
    expected_gpus: int | None,
) -> list[Verdict]:
    """Return whether the loaded module, the one on disk, the library and the packages are of one version."""
    version = wanted.get("version") or ""
    evidence = {**sources.evidence(), "wanted": version, "last_change": report["last_change"]}
    if not report["loaded"]["module"]:
        if not sources.on_disk():
            message = "No NVIDIA driver is installed here: no module, no library, no package."
            action = f"Install the driver{f' {version}' if version else ''}: run the playbook provision.yml."
            return [Verdict("driver.version", "fail", LAYER, SUBJECT, message, evidence, action)]
        whole = _of_one_piece(version, sources, evidence)
        return [_not_loaded(report, evidence, expected_gpus, whole=whole.status == "pass"), whole]
    if sources.loaded is None:
        message = "Its module is loaded, and the version of it cannot be read."
        action = "Look at /proc/driver/nvidia/version and /sys/module/nvidia/version on the node."
        return [Verdict("driver.version", "inconclusive", LAYER, SUBJECT, message, evidence, action)]
    return [_loaded_version(version, sources, evidence, nvml, report)]


def _loaded_version(
    version: str, sources: Sources, evidence: dict[str, Any], nvml: Mapping[str, Any], report: Mapping[str, Any]
) -> Verdict:
    """Return the verdict on a driver whose module is loaded."""
    loaded, disk = sources.loaded, sources.on_disk()
    if len(disk) == 1 and loaded not in disk:
        (new,) = disk
        if not version or new == version:
            message = f"{new} is installed and {loaded} is still loaded: nothing is broken, a reboot is pending."
            action = "Reboot the node (nvidia_driver_reboot); new CUDA processes fail until then."
            return Verdict("driver.reboot_pending", "needs-reboot", LAYER, SUBJECT, message, evidence, action)
        message = f"{loaded} is loaded and {new} is on disk{changed_by(report)}; the profile pins {version}."
        action = f"Do not reboot yet, that would load {new}: install {version} first, with its pin (provision.yml)."
        return Verdict("driver.library_mismatch", "fail", LAYER, SUBJECT, message, evidence, action)
    if len(disk) > 1:
        differs = sources.library is not None and sources.library != loaded
        message = f"Its parts are of several versions{changed_by(report)}: {sources.sentence()}."
        action = f"Finish the installation of {version or 'one version'}: run the playbook provision.yml."
        code = "driver.library_mismatch" if differs else "driver.version"
        return Verdict(code, "fail", LAYER, SUBJECT, message, evidence, action)
    if version and loaded != version:
        message = f"The driver is {loaded}, and the profile pins {version}."
        action = "Install the pinned driver, or use a profile that pins this one."
        return Verdict("driver.version", "fail", LAYER, SUBJECT, message, evidence, action)
    error = nvml.get("error") or {}
    if error.get("code") == NVML_MISMATCH or (sources.nvml and sources.nvml != loaded):
        message = f"NVML loads another libnvidia-ml.so.1 than the {loaded} in the usual directories."
        action = "Find it with `ldconfig -p` and LD_LIBRARY_PATH, such as a cuda-compat package, and remove it."
        return Verdict("driver.library_mismatch", "fail", LAYER, SUBJECT, message, evidence, action)
    message = f"Loaded module, module on disk, library and packages are {loaded}."
    if not disk:
        message = f"The loaded module is {loaded}; nothing of a driver is on this file system, as in a container."
    elif version:
        message = f"{message[:-1]}, as the profile pins it."
    return Verdict("driver.version", "pass", LAYER, SUBJECT, message, evidence)


def _of_one_piece(version: str, sources: Sources, evidence: dict[str, Any]) -> Verdict:
    """Return the verdict on the versions on disk, where no module is loaded."""
    disk = sources.on_disk()
    if len(disk) == 1 and (not version or version in disk):
        message = f"What is on disk is {', '.join(disk)}; no module is loaded."
        return Verdict("driver.version", "pass", LAYER, SUBJECT, message, evidence)
    message = f"What is on disk is not {version or 'of one version'}: {sources.sentence()}."
    action = "Install the pinned driver: run the playbook provision.yml."
    return Verdict("driver.version", "fail", LAYER, SUBJECT, message, evidence, action)


def _not_loaded(
    report: Mapping[str, Any], evidence: dict[str, Any], expected_gpus: int | None, *, whole: bool
) -> Verdict:
    """Return the verdict on a module that is not loaded, with the cause where the files tell it.

    whole: what is on disk is the wanted driver, in all its parts.
    """
    status, cause, message, action = _why_not_loaded(report, expected_gpus)
    change = report["last_change"]
    if cause == "unknown" and whole and evidence["module"] and change and change["since_boot"]:
        message = f"It is not loaded yet: {evidence['module']} was installed on {change['date']}, after this boot."
        status, cause, action = "needs-reboot", "not booted since", "Reboot the node, or run `modprobe nvidia`."
    return Verdict(
        "driver.module_not_loaded", status, LAYER, "module nvidia", message, {**evidence, "cause": cause}, action
    )


def _why_not_loaded(report: Mapping[str, Any], expected_gpus: int | None) -> tuple[str, str, str, str]:
    """Return status, cause, message and action for a module that is not loaded."""
    running, boot = report["kernel"]["running"], report["secure_boot"]
    module = main_module(report, running)
    blacklist = report["nouveau"]["blacklisted"]
    if not report["gpus"]:
        if expected_gpus == 0:
            return "skipped", "no GPU", "It is not loaded: no GPU is on the PCI bus, and none is expected there.", ""
        action = "Look at `lspci -d 10de:` and the machine's own log: slot, power, the firmware's settings."
        return "fail", "no GPU", "It is not loaded, because no NVIDIA GPU is on the PCI bus.", action
    if report["nouveau"]["loaded"]:
        message = "It is not loaded, because nouveau holds the GPUs."
        if blacklist:
            return (
                "needs-reboot",
                "nouveau",
                f"{message} {blacklist} forbids that from the next boot on.",
                "Reboot the node.",
            )
        action = "Blacklist nouveau in /etc/modprobe.d, run `update-initramfs -u -k all`, and reboot."
        return "fail", "nouveau", message, action
    if running is None:
        message = "It is not loaded, and which kernel runs cannot be read."
        return "fail", "unknown", message, "Look at `uname -r`, `modprobe nvidia` and `dmesg` on the node."
    if module is None:
        others = [name for name in report["kernel"]["bootable"] if main_module(report, name)]
        newest = report["kernel"]["bootable"][-1:]
        message = f"It is not loaded, because there is no module for the running kernel {running}."
        if newest and newest[0] in others and newest[0] != running:
            message = f"{message} The kernel {newest[0]} has one."
            return "needs-reboot", "no module", message, f"Reboot into {newest[0]}."
        action = (
            f"Install the headers of {running}, then `dkms autoinstall -k {running}`; its make.log says why it failed."
        )
        return "fail", "no module", message, action
    if insists(boot) and module["trusted"] is False:
        who = f"signed by {module['signer']}, whose key is not enrolled" if module["signed"] else "not signed"
        message = (
            f"It is not loaded, because Secure Boot is on and {module['path']} is {who} (Key was rejected by service)."
        )
        key = boot["dkms_key"]["path"] if boot["dkms_key"] else "CERTIFICATE"
        return "fail", "key rejected", message, f"Run `mokutil --import {key}`, reboot, and confirm at the console."
    built_for = (module["vermagic"] or "").split(" ")[0]
    if built_for and running and built_for != running:
        message = (
            f"It is not loaded, because {module['path']} was built for the kernel {built_for}, and {running} runs."
        )
        return "fail", "other kernel", message, f"Build it again: `dkms install --force -k {running}`."
    configured = report["parameters"]["blacklisted"].get("nvidia")
    if configured:
        message = f"It is not loaded, because {configured} blacklists it."
        return "fail", "blacklisted", message, f"Remove the line from {configured}, and `modprobe nvidia`."
    message = f"It is not loaded, and {module['path']} ({module['version'] or 'version unknown'}) is there."
    action = "Run `modprobe nvidia`, and look at `dmesg` for what NVRM says."
    return "fail", "unknown", message, action


def _flavour(report: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Verdict]:
    """Return whether the modules are the open or the proprietary ones, as wanted and as the GPUs need."""
    open_only = rules.open_only(report["gpus"])
    flavour = wanted.get("flavour") or ("open" if open_only else "")
    if not flavour:
        return []
    verdicts: list[Verdict] = []
    right: list[str] = []
    for kernel in report["kernels"]:
        module = main_module(report, kernel)
        if module is None:
            continue
        found = {"Dual MIT/GPL": "open", "NVIDIA": "proprietary"}.get(module["license"] or "")
        evidence = {"kernel": kernel, "path": module["path"], "license": module["license"], "wanted": flavour}
        if found == flavour:
            right.append(kernel)
        elif found is None:
            message = f"The licence of {module['path']} cannot be read: {module['error'] or repr(module['license'])}."
            action = f"Run `modinfo -F license {module['path']}`: the open modules are Dual MIT/GPL."
            verdicts.append(
                Verdict("driver.flavour", "inconclusive", LAYER, f"kernel {kernel}", message, evidence, action)
            )
        else:
            need = f", and the GPU {open_only[0]} needs the open ones" if open_only and found == "proprietary" else ""
            message = f"{module['path']} is of the {found} kernel modules ({module['license']}){need}."
            action = f"Install the {flavour} modules: run the playbook provision.yml with driver.flavour {flavour}."
            verdicts.append(Verdict("driver.flavour", "fail", LAYER, f"kernel {kernel}", message, evidence, action))
    loaded = report["loaded"]["flavour"]
    if loaded and loaded != flavour:
        status, action = ("needs-reboot", "Reboot the node.") if right and not verdicts else ("fail", "")
        message = f"The {loaded} module is loaded, and the {flavour} one is wanted."
        action = action or f"Install the {flavour} modules, then reboot."
        evidence = {"loaded": report["loaded"]["line"], "wanted": flavour}
        verdicts.append(Verdict("driver.flavour", status, LAYER, "loaded module", message, evidence, action))
    if not verdicts and (right or loaded):
        message = f"The modules are the {flavour} ones."
        evidence = {"kernels": right, "loaded": report["loaded"]["line"]}
        verdicts.append(Verdict("driver.flavour", "pass", LAYER, SUBJECT, message, evidence))
    return verdicts


def _parameters(report: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Verdict]:
    """Return whether each wanted module parameter is configured and live."""
    verdicts: list[Verdict] = []
    for name, values in (wanted.get("parameters") or {}).items():
        module = canonical(name)
        for parameter, value in values.items():
            verdicts.append(_parameter(report, module, parameter, str(value)))
    return verdicts


def _parameter(report: Mapping[str, Any], module: str, parameter: str, value: str) -> Verdict:
    """Return the verdict on one module parameter."""
    subject = f"{module}.{parameter}"
    configured = report["parameters"]["configured"].get(module, {}).get(parameter)
    loaded = module in report["parameters"]["live"]
    live = report["parameters"]["live"].get(module, {}).get(parameter)
    evidence = {"wanted": value, "configured": configured, "live": live, "loaded": loaded}
    if configured is None or not same_value(configured["value"], value):
        where = "It is configured nowhere" if configured is None else f"{configured['file']} says {configured['value']}"
        message = f"{where}, and {value} is wanted."
        action = f"Write `options {module} {parameter}={value}` to /etc/modprobe.d: run the playbook provision.yml."
        return Verdict("driver.parameter", "fail", LAYER, subject, message, evidence, action)
    if not loaded:
        message = f"{configured['file']} says {value}, and {module} is not loaded yet."
        return Verdict("driver.parameter", "pass", LAYER, subject, message, evidence)
    if live is None:
        message = f"{configured['file']} says {value}; the loaded module does not show its value."
        return Verdict(
            "driver.parameter", "warn", LAYER, subject, message, evidence, f"Check the name with `modinfo {module}`."
        )
    if not same_value(live, value):
        message = f"It is {live} in the loaded module; {configured['file']} says {value}: a reboot is pending."
        action = f"Reboot the node, or reload {module} while nothing uses it."
        return Verdict("driver.parameter", "needs-reboot", LAYER, subject, message, evidence, action)
    return Verdict("driver.parameter", "pass", LAYER, subject, f"It is {live}, live and configured.", evidence)


def _upgrades(report: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Verdict]:
    """Return whether automatic upgrades may change the driver."""
    if not report["packages"]:
        return []
    upgrades, subject = report["automatic_upgrades"], "unattended-upgrades"
    # A newer nvidia-settings beside the driver harms nobody.
    matter = {item["name"] for item in report["packages"] if item["core"]} | set(wanted.get("packages") or {})
    names = [name for name in upgrades["exposed"] if name in matter]
    if not upgrades["enabled"] or not names:
        message = "It leaves the driver's packages alone."
        return [Verdict("driver.unattended_upgrades", "pass", LAYER, subject, message, dict(upgrades))]
    message = f"It may upgrade {len(names)} of the driver's packages under the running module, such as {names[0]}."
    action = "Add them to Unattended-Upgrade::Package-Blacklist, as the role nvidia_driver does for its own packages."
    return [Verdict("driver.unattended_upgrades", "warn", LAYER, subject, message, dict(upgrades), action)]


def _half_installed(report: Mapping[str, Any]) -> list[Verdict]:
    """Return a failure when dpkg left packages of the driver unfinished."""
    half = [f"{item['name']} ({item['state']})" for item in report["packages"] if item["state"] != "installed"]
    if not half:
        return []
    failed = next((state for state in report["dkms"] if state["state"] == "failed"), None)
    message = f"dpkg did not finish {', '.join(half[:5])}."
    action = "Run `dpkg --configure -a`, or the playbook provision.yml again, which does."
    if failed:
        message = f"{message[:-1]}: DKMS could not build it for the kernel {failed['kernel']}: {failed['error']}."
        action = f"Read {failed['log']}. Remove that kernel and its headers, or pin a driver that is made for it."
    evidence = {"packages": half, "dkms": failed}
    return [Verdict("driver.half_installed", "fail", LAYER, SUBJECT, message, evidence, action)]


def _unreadable(report: Mapping[str, Any]) -> list[Verdict]:
    """Return what could not be read of that on which the other verdicts stand."""
    paths = {path: why for path, why in report["unreadable"].items() if path.startswith(_ESSENTIAL)}
    if not paths:
        return []
    path, why = next(iter(paths.items()))
    message = f"It cannot be read: {why}; so the verdicts on the driver are incomplete."
    action = "Run as root, and look at the file on the node."
    return [Verdict("driver.unreadable", "inconclusive", LAYER, path, message, {"paths": paths}, action)]
