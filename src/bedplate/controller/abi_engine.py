"""The ABI check without an installed environment: wheels and locks against the index of torch releases.

The same findings and the same sentences as on a node (`bedplate.node.abi.judge`), from less: a wheel's needs
instead of its files, the exports of a torch release instead of its libraries, the names of the files in the other
wheels instead of the libraries themselves. What only a node knows is left to the node: its own libraries, the C++
runtime, symbols that come with a version from a library outside torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bedplate.node.abi.demangle import demangle, nearest_of, source_token
from bedplate.node.abi.elf import STB_GLOBAL, Symbol
from bedplate.node.abi.exports import Release, TorchIndex
from bedplate.node.abi.installed import Environment, Torch, apart_reasons
from bedplate.node.abi.judge import CUDA_LIBRARIES, SONAME, Context, Findings, is_driver, verdicts_of, version_key
from bedplate.node.verdicts import Verdict, failing

from .needs import FileNeeds, WheelNeeds

# Libraries every Linux with glibc has: those the manylinux policies allow a wheel to take from the system (PEP 600).
SYSTEM_LIBRARIES = re.compile(
    r"(?:ld-linux[\w-]*|libgcc_s|libstdc\+\+|libm|libdl|librt|libc|libnsl|libutil|libpthread|libresolv|libX11|libXext|"
    r"libXrender|libICE|libSM|libGL|libgobject-2\.0|libgthread-2\.0|libglib-2\.0|libatomic|libz|libexpat|libmvec|libanl|"
    r"libpython3[\d.]*)\.so(?:\.\d+)*"
)
# CUDA libraries beside those whose SONAME tells the CUDA version: they come from wheels, never from the system.
CUDA_WHEEL_LIBRARIES = (*CUDA_LIBRARIES, "nccl", "cusparseLt", "nvshmem_host", "cudss", "cutensor")
TORCH_SCOPES = re.compile(r"_Z(?:T[VTIS]|GV|GR)?N?[KVrRO]*(?:3c10|2at|5torch|6caffe2|4c10d)")
_DATA_PREFIX = re.compile(r"^[^/]+\.data/(?:purelib|platlib)/")


@dataclass
class Extension:
    """A wheel with extensions: `name version`, and what it needs."""

    label: str
    needs: WheelNeeds

    def files(self) -> list[FileNeeds]:
        """Return the shared objects under their installed names."""
        return [file for file in self.needs.files if not re.search(r"\.data/(?!purelib|platlib)", file.file)]


def installed_name(member: str) -> str:
    """Return where a member of a wheel lies below site-packages."""
    return _DATA_PREFIX.sub("", member)


@dataclass
class Setting:
    """What the extensions are checked against; the machine is that of the engine's index.

    release: the torch release of the index; cuda: CUDA of the torch at hand; python: (major, minor), or None to leave
    Python tags alone; arch: SM number or None; glibc: of the target ("2.34") or "" to leave it alone; libraries: file
    names that other wheels bring, or None to trust that torch's own needs are met.
    """

    release: Release
    cuda: str
    python: tuple[int, int] | None = None
    arch: int | None = None
    glibc: str = ""
    libraries: set[str] | None = None


@dataclass
class WheelReport:
    """Verdicts, and what was looked at.

    Files judged, files set apart with the reason, libraries the node must bring.
    """

    verdicts: list[Verdict]
    findings: list[Findings]
    apart: list[dict[str, str]] = field(default_factory=list)
    from_node: list[str] = field(default_factory=list)
    driver: dict[str, int] = field(default_factory=dict)


class Engine:
    """Checks extensions against releases of one index; keeps what the checks share."""

    def __init__(self, index: TorchIndex) -> None:
        """Keep the index."""
        self.index = index
        self._candidates: dict[str, list[str]] = {}
        self._nearest: dict[tuple[str, str], str | None] = {}

    def check(self, extensions: Sequence[Extension], setting: Setting) -> WheelReport:
        """Return the verdicts on all extensions together in one setting."""
        torch = Torch(setting.release.version, setting.cuda, "")
        owners: dict[str, str] = {}
        findings: list[Findings] = []
        report = WheelReport([], findings)
        judged = total = 0
        for extension in extensions:
            files = {installed_name(file.file): file for file in extension.files()}
            owners.update(dict.fromkeys(files, extension.label))
            total += len(files)
            apart = self._apart(files, torch, setting)
            report.apart += [{"file": f, "reason": r} for f, r in sorted(apart.items())]
            for name in self._loaded(files, apart, setting.release):
                judged += 1
                findings.append(self._examine(name, files, setting, report))
        context = Context(
            torch=torch,
            python=setting.python or (0, 0),
            index=self.index,
            owner=lambda file: owners.get(file, file.split("/")[0]),
            nearest=lambda name: self.nearest(name, setting.release.version),
            files=total,
            judged=judged,
            apart=len(report.apart),
            driver=report.driver,
        )
        report.from_node = sorted(set(report.from_node))
        report.verdicts = verdicts_of(context, findings)
        return report

    def nearest(self, mangled: str, version: str) -> str | None:
        """Return the name exported by a release that is nearest to a missing one: same name, other parameters."""
        key = (mangled, version)
        if key not in self._nearest:
            token = source_token(demangle(mangled))
            if token not in self._candidates:
                self._candidates[token] = self.index.names_with(token) if token else []
            bit = self.index.versions().index(version)
            present = [n for n in self._candidates[token] if self.index.mask_of(n) >> bit & 1]
            self._nearest[key] = nearest_of(mangled, present)
        return self._nearest[key]

    @staticmethod
    def _apart(files: dict[str, FileNeeds], torch: Torch, setting: Setting) -> dict[str, str]:
        environment = Environment("", None, setting.python or (0, 0), torch)
        reasons = apart_reasons(files, environment, setting.arch)
        if setting.python is None:
            reasons = {f: r for f, r in reasons.items() if "Python" not in r}
        if setting.arch is None:  # any node: every architecture's files are judged
            reasons = {f: r for f, r in reasons.items() if "architecture" not in r}
        return {**reasons, **{name: file.error for name, file in files.items() if file.foreign}}

    def _loaded(self, files: dict[str, FileNeeds], apart: dict[str, str], release: Release) -> list[str]:
        """Return the files that are loaded for sure: modules, users of torch, and what those need of their wheel."""
        provided = set(release.provides)
        by_name: dict[str, str] = {}
        for name, file in files.items():
            if file.foreign:  # the loader passes over it
                continue
            by_name.setdefault(os.path.basename(name), name)
            by_name.setdefault(file.soname or os.path.basename(name), name)
        queue = [
            name
            for name, file in files.items()
            if name not in apart and (file.error or file.module or not provided.isdisjoint(file.needed))
        ]
        for name in queue:
            for needed in files[name].needed:
                if needed in by_name and by_name[needed] not in queue:
                    queue.append(by_name[needed])
        return queue

    def _examine(self, name: str, files: dict[str, FileNeeds], setting: Setting, report: WheelReport) -> Findings:
        file = files[name]
        found = Findings(name, name, error=file.error)
        if file.machine and file.machine != self.index.machine:  # the loader looks at nothing else then
            found.error = f"an ELF file for {file.machine}, to be loaded on {self.index.machine}"
            return found
        siblings = {os.path.basename(n) for n in files} | {f.soname for f in files.values()}
        for library in file.needed:
            self._library(library, siblings, setting, found, report)
        exported = {n for other in files.values() if other is not file for n in other.exports}
        bit = self.index.versions().index(setting.release.version)
        for symbol, version, library, weak in file.undefined:
            if version:
                if library in found.missing:
                    found.blamed.setdefault(library, []).append(symbol)
                continue
            mask = self.index.mask_of(symbol)
            if mask >> bit & 1:
                found.torch_symbols.append(symbol)
            elif not weak and symbol not in exported and (mask or TORCH_SCOPES.match(symbol)):
                found.undefined.append(
                    Symbol(os.fsencode(symbol), STB_GLOBAL, 0, False, None, False, 0)  # as the reader gives it
                )
        if setting.glibc:
            limit = version_key(setting.glibc)
            provider = f"glibc {setting.glibc}"
            for version, _ in file.versions:
                if version.startswith("GLIBC_2.") and version_key(version) > limit:
                    found.versions.append((version, provider))
        return found

    @staticmethod
    def _library(library: str, siblings: set[str], setting: Setting, found: Findings, report: WheelReport) -> None:
        """Decide who brings one needed library: the wheel, torch, another wheel, the driver, the node, or nobody."""
        if library in siblings or library in setting.release.provides or SYSTEM_LIBRARIES.fullmatch(library):
            return
        if is_driver(library):
            report.driver.setdefault(library, 0)
            return
        others = setting.libraries if setting.libraries is not None else set(setting.release.needed)
        if library in others:
            return
        match = SONAME.match(library)
        base = match.group("base") if match else ""
        if base in CUDA_WHEEL_LIBRARIES or base.startswith("cudnn"):
            found.missing.append(library)
        else:
            report.from_node.append(library)


@dataclass
class Solution:
    """Which releases satisfy all extensions together, and for the others their failing verdicts."""

    satisfied_by: list[str]
    reasons: dict[str, list[Verdict]]

    def to_dict(self) -> dict[str, Any]:
        """Return the solution as JSON values."""
        return {
            "satisfied_by": self.satisfied_by,
            "reasons": {v: [verdict.to_dict() for verdict in vs] for v, vs in self.reasons.items()},
        }


def solve(engine: Engine, extensions: Sequence[Extension], *, cuda: str = "") -> Solution:
    """Return which torch releases of the index satisfy all extensions together.

    Args: cuda: only releases of this CUDA version, such as `13` or `13.0`.
    """
    satisfied: list[str] = []
    reasons: dict[str, list[Verdict]] = {}
    for release in engine.index.releases:
        failures = failing(engine.check(extensions, Setting(release, release.cuda)).verdicts)
        if cuda and not f"{release.cuda}.".startswith(f"{cuda}."):
            failures.append(
                Verdict(
                    "abi.cuda_major",
                    "fail",
                    "stack",
                    f"torch {release.version}",
                    f"The wheel of torch {release.version} brings CUDA {release.cuda or 'none'}, not {cuda}.",
                    {"torch_cuda": release.cuda, "wanted": cuda},
                    f"Use a torch for CUDA {cuda}.",
                )
            )
        if failures:
            reasons[release.version] = failures
        else:
            satisfied.append(release.version)
    return Solution(satisfied, reasons)
