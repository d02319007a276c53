"""Does the stack fit together? What the imports found, against the lock, the profile and the environment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..abi.installed import site_packages_of
from ..child import ChildError, child_failed, run_probe
from ..verdicts import Verdict
from . import nvcc_child

LAYER = "stack"
NVCC_TIMEOUT_S = 30.0

# Distributions that own the same files: whichever was installed last wins, and nothing says so.
_CONFLICTS = (("sgl-kernel", "sglang-kernel"), ("nvidia-nccl-cu12", "nvidia-nccl-cu13"))
_FLASHINFER = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s\\;]+)", re.M)
_NVCC_RELEASE = re.compile(r"release (?P<release>\d+\.\d+)")


def check_stack(
    imports: Sequence[Verdict],
    *,
    generation: str,
    environment: Mapping[str, str],
    user: str = "",
    arch: str = "",
) -> list[Verdict]:
    """Return the verdicts about the packages of a generation as a set.

    imports: the verdicts of ``imports.check_imports``, whose evidence says what torch and NCCL are. generation:
    its directory, which holds venv and requirements.lock. environment: the variables of its file
    ``environment``. user: as for ``child.run_probe``. arch: the architecture that the profile expects, such as
    "sm_120"; empty when it names none.
    """
    packages = installed_packages(Path(site_packages_of(generation)))
    # Every import that brought torch along tells of it; the one of torch itself most directly.
    tell = [v for v in imports if v.subject == "torch" and "arch_list" in v.evidence]
    tell += [v for v in imports if v.evidence.get("cuda")]
    torch = tell[0].evidence if tell else None
    pins = locked_versions(Path(generation) / "requirements.lock")
    verdicts = [_nccl(torch, pins)]
    if arch:
        verdicts.append(_arch(torch, arch))
    verdicts += _conflicts(packages)
    verdicts.append(_flashinfer(packages, environment))
    verdicts.append(_cuda_home(torch, generation, environment, user))
    return verdicts


def installed_packages(site_packages: Path) -> dict[str, str]:
    """Return {distribution: version} from the names of the .dist-info directories (PEP 503, PEP 427)."""
    found = {}
    for path in site_packages.glob("*.dist-info"):
        name, _, version = path.name[: -len(".dist-info")].rpartition("-")
        found[re.sub(r"[-_.]+", "-", name).lower()] = version
    return found


def locked_versions(lock: Path) -> dict[str, str]:
    """Return {distribution: version} of a requirements file; nothing when there is none."""
    if not lock.is_file():
        return {}
    return {m["name"].lower(): m["version"] for m in _PIN.finditer(lock.read_text(encoding="utf-8"))}


def nccl_text(number: int) -> str:
    """Return NCCL's version as text: 22705 is 2.27.5 (NCCL_VERSION in nccl.h, which holds since 2.9)."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def runs_on(built: str, arch: str) -> bool:
    """Tell whether what was built for one architecture runs on a GPU of another.

    Machine code (sm_XY) runs on the same major and the same or a later minor; PTX (compute_XY) is compiled
    for any later one. With the suffix a it is for that one only, with f for its family (the major).
    Source: CUDA C++ Programming Guide, "Compute capability".
    """
    pattern = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)$")
    have, want = pattern.match(built), pattern.match(arch)
    if not have or not want:
        return False
    kind, major, minor, suffix = have[1], int(have[2]), int(have[3]), have[4]
    wanted = (int(want[2]), int(want[3]))
    if suffix == "a":
        return wanted == (major, minor)
    if kind == "sm" or suffix == "f":
        return wanted[0] == major and wanted[1] >= minor
    return wanted >= (major, minor)


def _nccl(torch: Mapping[str, Any] | None, pins: Mapping[str, str]) -> Verdict:
    """Return the verdict about the loaded NCCL, against the lock."""
    pin = next(((name, pins[name]) for name in sorted(pins) if re.fullmatch(r"nvidia-nccl-cu\d+", name)), None)
    code, subject = "stack.nccl_version", "NCCL"
    if torch is None:
        return Verdict(code, "skipped", LAYER, subject, "torch was not imported, so it is not known which is loaded.")
    if pin is None:
        return Verdict(code, "skipped", LAYER, subject, "The lock pins no NCCL.")
    files = [path for name, paths in torch["libraries"].items() if name.startswith("libnccl") for path in paths]
    evidence = {"locked": pin[1], "package": pin[0], "files": files}
    if not files:
        message = f"The import of torch loads none; the lock has {pin[0]} {pin[1]}."
        return Verdict(code, "skipped", LAYER, subject, message, evidence)
    if torch["nccl"] is None:
        message = f"{', '.join(files)} does not say its version; {pin[0]} {pin[1]} is locked."
        action = "Install the generation again, and look at the file: it is not NCCL, or damaged."
        return Verdict(code, "fail", LAYER, subject, message, evidence, action)
    seen = nccl_text(torch["nccl"])
    evidence["loaded"] = seen
    if ".".join(pin[1].split(".")[:3]) == seen:
        return Verdict(code, "pass", LAYER, subject, f"{seen} is loaded, as {pin[0]} is locked.", evidence)
    message = f"{seen} is loaded from {', '.join(files)}, and {pin[0]} {pin[1]} is locked."
    action = "Find what brings the other one: LD_LIBRARY_PATH, LD_PRELOAD, or a second NCCL package."
    return Verdict(code, "fail", LAYER, subject, message, evidence, action)


def _arch(torch: Mapping[str, Any] | None, arch: str) -> Verdict:
    """Return the verdict about the architectures that torch was built for."""
    if torch is None:
        return Verdict("stack.arch", "skipped", LAYER, arch, "torch was not imported, so it cannot be asked.")
    if torch["arch_list"] is None:
        return Verdict("stack.arch", "skipped", LAYER, arch, "This torch does not tell what it was built for.")
    built = torch["arch_list"]
    evidence = {"wanted": arch, "built_for": built, "cuda": torch["cuda"]}
    fitting = [name for name in built if runs_on(name, arch)]
    if fitting:
        how = arch if arch in fitting else fitting[-1]
        return Verdict("stack.arch", "pass", LAYER, arch, f"torch was built for it ({how}).", evidence)
    message = f"torch was built for {', '.join(built) or 'no GPU'}, and not for {arch}."
    action = "Lock a torch of a CUDA release that knows this GPU; sm_120 needs CUDA 12.8 or newer."
    return Verdict("stack.arch_missing", "fail", LAYER, arch, message, evidence, action)


def _conflicts(packages: Mapping[str, str]) -> list[Verdict]:
    """Return a failing verdict for each set of installed packages that own the same files."""
    verdicts = []
    for names in _CONFLICTS:
        both = {name: packages[name] for name in names if name in packages}
        if len(both) > 1:
            message = f"{' and '.join(f'{n} {v}' for n, v in both.items())} are both installed, and own the same files."
            action = "Keep one of them in the profile, and lock it again."
            subject = ", ".join(both)
            verdicts.append(
                Verdict("stack.package_conflict", "fail", LAYER, subject, message, {"packages": both}, action)
            )
    return verdicts


def _flashinfer(packages: Mapping[str, str], environment: Mapping[str, str]) -> Verdict:
    """Return the verdict about flashinfer's three packages, whose versions must be one.

    The local part (+cu130) names the CUDA release and does not count. flashinfer compares them itself, the last
    one by the beginning of the text only (0.6.130 passes for 0.6.13), and not at all when a variable says so.
    """
    code, subject = "stack.flashinfer_versions", "flashinfer"
    have = {name: packages[name] for name in _FLASHINFER if name in packages}
    evidence: dict[str, Any] = {"packages": have}
    if environment.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        message = "FLASHINFER_DISABLE_VERSION_CHECK is set in the generation's environment, which hides a mismatch."
        return Verdict(code, "fail", LAYER, subject, message, evidence, "Take it out, and lock versions that agree.")
    if _FLASHINFER[0] not in have:
        return Verdict(code, "skipped", LAYER, subject, "It is not installed.", evidence)
    bases = {version.partition("+")[0] for version in have.values()}
    listed = ", ".join(f"{name} {version}" for name, version in have.items())
    if len(bases) == 1:
        return Verdict(code, "pass", LAYER, subject, f"Its packages agree: {listed}.", evidence)
    action = "Pin all of them to one version in the profile, and lock it again."
    return Verdict(code, "fail", LAYER, subject, f"Its packages do not agree: {listed}.", evidence, action)


def _cuda_home(torch: Mapping[str, Any] | None, generation: str, environment: Mapping[str, str], user: str) -> Verdict:
    """Return the verdict about CUDA_HOME and its nvcc, which compile kernels at run time."""
    code, home = "stack.cuda_home", environment.get("CUDA_HOME", "")
    subject, action = home or "CUDA_HOME", "Install the toolkit that the profile names, or correct CUDA_HOME."
    if not home:
        reason = "The generation's environment names no CUDA_HOME, so the stack compiles nothing at run time."
        return Verdict(code, "skipped", LAYER, subject, reason)
    nvcc = os.path.join(home, "bin", "nvcc")
    if not os.path.isfile(nvcc):
        return Verdict(code, "fail", LAYER, subject, f"There is no {nvcc}.", {"nvcc": nvcc}, action)
    if torch is None or not torch["cuda"]:
        return Verdict(code, "skipped", LAYER, subject, "torch does not say which CUDA release it was built with.")
    config = {"nvcc": nvcc, "bin": os.path.join(generation, "venv", "bin")}
    try:
        # The interpreter of the caller: this is about the toolkit, and must work where the stack is broken.
        outcome = run_probe(
            nvcc_child, config, python=sys.executable, timeout_s=NVCC_TIMEOUT_S, environment=environment, user=user
        )
    except ChildError as error:
        return child_failed(error, layer=LAYER, subject=subject)
    answer = outcome.result
    if not isinstance(answer, dict) or answer["error"]:
        why = answer["error"] if isinstance(answer, dict) else outcome.ending()
        return Verdict(code, "fail", LAYER, subject, f"{nvcc} --version does not work: {why}.", {"nvcc": nvcc}, action)
    release = _NVCC_RELEASE.search(answer["text"])
    seen = release["release"] if release else ""
    evidence = {
        "nvcc": nvcc,
        "release": seen,
        "torch_cuda": torch["cuda"],
        "tools": answer["tools"],
        "says": answer["text"],
    }
    if seen != torch["cuda"]:
        message = f"Its nvcc is of CUDA {seen or 'an unknown release'}, and torch was built with {torch['cuda']}."
        return Verdict(code, "fail", LAYER, subject, message, evidence, action)
    absent = [name for name, path in answer["tools"].items() if path is None]
    if absent:
        message = f"nvcc is of CUDA {seen}, as torch is, but {' and '.join(absent)} cannot be found."
        action = "Install it, or lock the package that brings it: without it no kernel is compiled at run time."
        return Verdict(code, "warn", LAYER, subject, message, evidence, action)
    if os.path.realpath(home) != os.path.normpath(home):
        message = f"nvcc is of CUDA {seen}, as torch is, but the path is a link to {os.path.realpath(home)}."
        action = "Name the directory itself: a link that is moved changes the compiler under kernels compiled before."
        return Verdict(code, "warn", LAYER, subject, message, evidence, action)
    return Verdict(code, "pass", LAYER, subject, f"nvcc is of CUDA {seen}, as torch is.", evidence)
