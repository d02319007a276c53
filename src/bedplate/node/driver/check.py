"""The NVIDIA driver of a node as its files show it, before any driver exists or after one was changed.

``inspect`` reads and judges nothing; ``preflight`` says whether the driver may be changed now; ``judge`` says whether
what is there is what was wanted. All of it works under a root directory.
"""

from __future__ import annotations

import re
from typing import Any

from . import initramfs, kernel_modules, modprobe_config, package_state, secure_boot
from .judge import judge
from .preflight import idle, preflight, wait_for_users
from .sysroot import Sysroot

__all__ = ["idle", "inspect", "judge", "preflight", "wait_for_users"]

LIBRARY_DIRECTORIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",  # Debian, behind its alternatives
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
)
LIBRARIES = ("libnvidia-ml.so", "libcuda.so")
# The file systems that a driver's packages write to: initramfs images, libraries, DKMS trees and apt's archives.
WRITTEN = ("/boot", "/usr", "/var", "/lib/modules")

_LIBRARY = re.compile(r"(libnvidia-ml\.so|libcuda\.so)\.(\d+\.\d+(?:\.\d+)?)\Z")
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?\Z")
# "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ..." and
# "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.135  Fri Jan 10 ..." (utils.mk of open-gpu-kernel-modules)
_NVRM = re.compile(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)(?:\s|\Z)")


def inspect(root: str = "/", *, list_image: initramfs.ListImage | None = None) -> dict[str, Any]:
    """Return what a node's files say about its NVIDIA driver; judges nothing and raises for no file.

    root: the directory that stands for "/". list_image: called with the path of an initramfs image, returns the
    names in it or None; by default lsinitramfs or lsinitrd, and on another root than "/" nothing.

    Keys:
      os: {id, version} of /etc/os-release.
      kernel: {running, bootable, images} as kernel_modules.kernels.
      kernels: release -> {headers, modules (of kernel_modules.read_module), dkms (states), initramfs}, for the
        bootable ones and the running one.
      dkms: all states of kernel_modules.dkms_states.
      loaded: {module (whether nvidia is loaded), version, flavour, line}; the last three None where unknown.
      nouveau: {loaded, blacklisted (the file or None)}.
      parameters: {live, configured, blacklisted} as modprobe_config; configured_mtime: seconds since the epoch.
      libraries: name without version -> {versions (on disk), active (where NAME.1 leads to, or None)}.
      firmware: driver versions whose GSP firmware is on disk.
      packages, dpkg_interrupted, last_change, automatic_upgrades: as package_state.
      secure_boot: as secure_boot.inspect. reboot: {required, packages}.
      free_bytes: directory -> bytes. gpus: NVIDIA display devices on the PCI bus, as ids "10de:2bb5".
      unreadable: path -> why, for what is there and could not be read.
    """
    files = Sysroot(root)
    if list_image is None:
        list_image = initramfs.list_image if files.root == "/" else _no_listing
    kernel = kernel_modules.kernels(files)
    dkms = kernel_modules.dkms_states(files)
    configuration = modprobe_config.inspect(files)
    packages = package_state.packages(files)
    loaded_modules = _loaded_modules(files)
    of_interest = [*kernel["bootable"]]
    if kernel["running"] and kernel["running"] not in of_interest:
        of_interest.append(kernel["running"])
    report: dict[str, Any] = {
        "os": _os(files),
        "kernel": kernel,
        "kernels": {name: _kernel(files, name, dkms, list_image) for name in of_interest},
        "dkms": dkms,
        "loaded": _loaded(files, loaded_modules),
        "nouveau": {
            "loaded": "nouveau" in loaded_modules,
            "blacklisted": configuration["blacklisted"].get("nouveau"),
        },
        "parameters": {
            "live": modprobe_config.live_parameters(files),
            "configured": configuration["parameters"],
            "blacklisted": configuration["blacklisted"],
        },
        "configured_mtime": configuration["newest"],
        "libraries": _libraries(files),
        "firmware": _firmware(files),
        "packages": packages,
        "dpkg_interrupted": package_state.interrupted(files),
        "last_change": package_state.last_change(files),
        "automatic_upgrades": package_state.automatic_upgrades(
            files, (item["name"] for item in packages if not item["hold"])
        ),
        "secure_boot": secure_boot.inspect(files),
        "reboot": {
            "required": any(files.exists(f"{run}/reboot-required") for run in ("/run", "/var/run")),
            "packages": sorted(
                {name for run in ("/run", "/var/run") for name in _words(files, f"{run}/reboot-required.pkgs")}
            ),
        },
        "free_bytes": {name: files.free_bytes(name) for name in WRITTEN if files.is_dir(name)},
        "gpus": _gpus(files),
    }
    _tell_enrolled(report)
    return {**report, "unreadable": files.unreadable}


def _no_listing(path: str) -> None:
    """Stand in for the tool that lists an image, where images may not be of this machine."""


def _words(files: Sysroot, path: str) -> list[str]:
    """Return the words of a file."""
    return (files.text(path) or "").split()


def _os(files: Sysroot) -> dict[str, str]:
    """Return the id and the version of the distribution (os-release(5))."""
    text = files.text("/etc/os-release") or files.text("/usr/lib/os-release") or ""
    values = dict(re.findall(r"^(\w+)=[\"']?([^\"'\n]*)", text, re.MULTILINE))
    return {"id": values.get("ID", ""), "version": values.get("VERSION_ID", "")}


def _kernel(files: Sysroot, name: str, dkms: list[dict[str, str]], list_image: initramfs.ListImage) -> dict[str, Any]:
    """Return what there is for one kernel."""
    return {
        "headers": kernel_modules.headers(files, name),
        "modules": [kernel_modules.read_module(files, path) for path in kernel_modules.module_files(files, name)],
        "dkms": [state for state in dkms if state["kernel"] == name],
        "initramfs": initramfs.inspect(files, name, list_image),
    }


def _loaded_modules(files: Sysroot) -> set[str]:
    """Return the names of the loaded modules, from /proc/modules and from /sys/module."""
    listed = {line.split(" ")[0] for line in (files.text("/proc/modules") or "").splitlines()}
    # /sys/module has directories for built-in code as well; only a loaded module has an initstate.
    known = {name for name in ("nvidia", "nouveau") if files.exists(f"/sys/module/{name}/initstate")}
    return listed | known


def _loaded(files: Sysroot, modules: set[str]) -> dict[str, Any]:
    """Return version and flavour of the loaded nvidia module."""
    line = files.line("/proc/driver/nvidia/version")
    match = _NVRM.search((line or "")[:500])
    version = files.line("/sys/module/nvidia/version") or (match.group(1) if match else None)
    flavour = None
    if line and match:
        flavour = "open" if "Open Kernel Module" in line else "proprietary"
    return {"version": version, "flavour": flavour, "line": line, "module": "nvidia" in modules or version is not None}


def _libraries(files: Sysroot) -> dict[str, dict[str, Any]]:
    """Return of each library of the driver the versions on disk, and the one that its name for the loader leads to."""
    found: dict[str, dict[str, Any]] = {}
    for library in LIBRARIES:
        versions: set[str] = set()
        active: str | None = None
        for directory in LIBRARY_DIRECTORIES:
            matches = [_LIBRARY.match(name) for name in files.names(directory) if name.startswith(library)]
            versions |= {match.group(2) for match in matches if match}
            leads_to = _LIBRARY.match(files.target(f"{directory}/{library}.1"))
            active = active or (leads_to.group(2) if leads_to else None)
        found[library] = {"versions": sorted(versions), "active": active}
    return found


def _firmware(files: Sysroot) -> list[str]:
    """Return the driver versions whose GSP firmware is on disk."""
    base = "/lib/firmware/nvidia"
    versions = [name for name in files.names(base) if _VERSION.match(name)]
    return [name for name in versions if any(file.startswith("gsp") for file in files.names(f"{base}/{name}"))]


def _gpus(files: Sysroot) -> list[str]:
    """Return the ids of the NVIDIA display devices (class 03xx) on the PCI bus."""
    found: list[str] = []
    base = "/sys/bus/pci/devices"
    for name in files.names(base):
        vendor, device, kind = (files.line(f"{base}/{name}/{part}") or "" for part in ("vendor", "device", "class"))
        if vendor == "0x10de" and kind.startswith("0x03"):
            found.append(f"10de:{device[2:]}")
    return found


def _tell_enrolled(report: dict[str, Any]) -> None:
    """Add to each module whether the machine trusts its signer, and drop what is no JSON."""
    boot = report["secure_boot"]
    keys = boot.pop("_keys")
    for kernel in report["kernels"].values():
        for module in kernel["modules"]:
            who = module.pop("_signer")
            module["trusted"] = _trusted(module, who, keys, boot)


def _trusted(module: dict[str, Any], who: Any, keys: list[Any], boot: dict[str, Any]) -> bool | None:
    """Tell whether the kernel would accept a module's signature; None when that cannot be known.

    Names are compared, not signatures: issuer and serial with the enrolled certificates, the signer's name with the
    kernel's own keys.
    """
    if module["signed"] is None or (module["signed"] and not module["signer"]):
        return None
    if not module["signed"]:
        return False
    known = {key["serial"] for key in boot["keys"]}
    if who is not None and any(who.is_by(key) for key in keys):
        return True
    if who is None and module["serial"] and module["serial"] in known:  # modinfo prints no more than that
        return True
    if any(module["signer"] in key for key in boot["kernel_keys"]):
        return True
    return False if boot["keys_readable"] else None
