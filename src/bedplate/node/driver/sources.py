"""The places that each say which driver version this is: loaded module, module on disk, library, packages, NVML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .package_state import upstream

LAYER = "driver"
SUBJECT = "NVIDIA driver"


@dataclass(frozen=True)
class Sources:
    """Driver versions by source; None or empty where the source says nothing.

    module: the module file that the running kernel would load. library: what libnvidia-ml.so.1 leads to. cuda: the
    same of libcuda.so.1. packages: version -> names of the core packages that have it.
    """

    loaded: str | None
    module: str | None
    library: str | None
    cuda: str | None
    packages: dict[str, list[str]]
    nvml: str | None

    def on_disk(self) -> set[str]:
        """Return the versions on disk; more than one means that the parts do not belong together."""
        return {version for version in (self.module, self.library, self.cuda, *self.packages) if version}

    def sentence(self) -> str:
        """Return which source says what, for a message."""
        parts = [
            ("loaded module", self.loaded),
            ("module on disk", self.module),
            ("libnvidia-ml", self.library),
            ("libcuda", self.cuda),
            *((", ".join(names[:3]), version) for version, names in self.packages.items()),
        ]
        return "; ".join(f"{name} {version}" for name, version in parts if version)

    def evidence(self) -> dict[str, Any]:
        """Return the versions as JSON."""
        return {
            "loaded": self.loaded,
            "module": self.module,
            "library": self.library,
            "cuda_library": self.cuda,
            "packages": self.packages,
            "nvml": self.nvml,
        }


def main_module(report: Mapping[str, Any], kernel: str | None) -> dict[str, Any] | None:
    """Return the file of the module nvidia that a kernel would load, None when it has none."""
    modules = report["kernels"].get(kernel, {}).get("modules", [])
    return next((module for module in modules if module["name"] == "nvidia"), None)


def sources_of(report: Mapping[str, Any], wanted: Mapping[str, Any], nvml: Mapping[str, Any]) -> Sources:
    """Return what each source says."""
    module = main_module(report, report["kernel"]["running"])
    named = wanted.get("packages") or {}
    of_driver = {name for name, version in named.items() if upstream(str(version)) == wanted.get("version")}
    packages: dict[str, list[str]] = {}
    for item in report["packages"]:
        if item["core"] or item["name"] in of_driver:
            packages.setdefault(item["upstream"], []).append(item["name"])
    return Sources(
        loaded=report["loaded"]["version"],
        module=module["version"] if module else None,
        library=_active(report, "libnvidia-ml.so"),
        cuda=_active(report, "libcuda.so"),
        packages=packages,
        nvml=nvml.get("driver_version"),
    )


def _active(report: Mapping[str, Any], library: str) -> str | None:
    """Return the version of a library that the loader would take, None when that is not known."""
    found: dict[str, Any] = report["libraries"][library]
    if found["active"]:
        return str(found["active"])
    return str(found["versions"][0]) if len(found["versions"]) == 1 else None


def changed_by(report: Mapping[str, Any]) -> str:
    """Return who changed the driver since the kernel started, as part of a sentence; empty when nobody did."""
    change = report["last_change"]
    if not change or not change["since_boot"]:
        return ""
    who = (
        "unattended-upgrades" if change["automatic"] else f"`{change['command'][:80]}`" if change["command"] else "apt"
    )
    return f" since {who} changed it on {change['date']}"
