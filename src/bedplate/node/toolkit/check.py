"""Is the CUDA toolkit the pinned one, and does it make programs that this node can run?

Versions are read from what the toolkit says of itself and from its files; then a small program is compiled for every
architecture of the profile, its machine code is found again in the file, and it is run as far as the node allows. A
check that cannot run here says ``skipped`` and why.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..abi.elf import ElfError, ElfFile
from ..child import run_probe
from ..verdicts import Verdict
from . import compile_child, extension_child
from .fatbin import FatbinError, cubins
from .layout import damage, read_versions
from .releases import expected_components, short, support, version_json_key

LAYER = "toolkit"
STEP_S = 120.0  # for each of: nvcc, the program, the kernel on all GPUs. An idle node needs about 2 s for all three
EXTENSION_S = 600.0  # import of torch, nvcc over torch's headers (about 40 s), linking
COMPILER_S = 20.0
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
MAX_CONFIG = 1 << 20  # bytes that are read of a configuration file

# What each component must have on disk, relative to the toolkit; "*" stands for the numbers of a library.
_FILES = {
    "cccl": ("include/cccl/cuda/std/version", "include/cuda/std/version"),
    "crt": ("include/crt/host_config.h",),
    "cublas": ("include/cublas_v2.h", "lib64/libcublas.so"),
    "cudart": ("include/cuda_runtime.h", "lib64/libcudart.so"),
    "cufft": ("include/cufft.h", "lib64/libcufft.so"),
    "curand": ("include/curand.h", "lib64/libcurand.so"),
    "cusolver": ("include/cusolverDn.h", "lib64/libcusolver.so"),
    "cusparse": ("include/cusparse.h", "lib64/libcusparse.so"),
    "nvcc": (
        "bin/nvcc",
        "bin/nvcc.profile",
        "bin/ptxas",
        "bin/nvlink",
        "bin/fatbinary",
        "bin/cudafe++",
        "lib64/libcudart_static.a",
    ),
    "nvjitlink": ("include/nvJitLink.h", "lib64/libnvJitLink.so"),
    "nvrtc": ("include/nvrtc.h", "lib64/libnvrtc.so"),
    "nvvm": ("nvvm/libdevice/libdevice.10.bc",),
}
_EITHER = {"cccl"}  # of these one file is enough: where it lies changed with CUDA 13

_EXTENSION = "torch extension"

# cudaError_t, driver_types.h: what cudaGetDeviceCount answers where there is no GPU to use, and where a compatibility
# library of another version shadows the driver's.
_INSUFFICIENT_DRIVER, _NO_DEVICE, _SYSTEM_MISMATCH, _COMPAT_UNSUPPORTED = 35, 100, 803, 804


def judge(
    wanted: Mapping[str, Any],
    *,
    root: str = "/",
    stack_python: str | None = None,
    stack_environment: Mapping[str, str] | None = None,
    user: str = "",
    step_s: float = STEP_S,
    extension_s: float = EXTENSION_S,
) -> list[Verdict]:
    """Return the verdicts of a toolkit.

    wanted: version ("13.0.1"); path ("" for /usr/local/cuda-X.Y); source ("nvidia", "wheels", "none"); arch (list such
        as ["sm_120"]); default (whether /usr/local/cuda must name it); components (names; none means all that the
        source has); host_compiler (path, "" for the gcc of PATH). Only version is needed.
    root: directory that stands for / when files are read; programs are compiled and run only where it is "/".
    stack_python: the interpreter of the stack that a torch extension is built for; None: no extension is built.
    stack_environment: the variables of that stack's generation.
    user: the name of the user that compiles and runs, when the caller is root.
    step_s, extension_s: seconds for each step of the program, and for the extension.

    Raises child.ChildError when a child cannot be started at all.
    """
    version = wanted["version"]
    path = wanted.get("path") or f"/usr/local/cuda-{short(version)}"
    toolkit = _under(root, path)
    if not os.path.isdir(toolkit):
        message = f"There is no CUDA toolkit at {path}; the profile pins {version}."
        if wanted.get("source", "none") == "none":
            # Not Bedplate's to install. What the stack compiles at run time will fail, what it brings compiled works.
            action = f"Install CUDA {version} there, or let Bedplate do it: cuda_toolkit_source nvidia or wheels."
            return [Verdict("toolkit.layout", "warn", LAYER, path, message, {"path": path}, action)]
        action = "Run the playbook provision.yml."
        return [Verdict("toolkit.layout", "fail", LAYER, path, message, {"path": path}, action)]
    expected = expected_components(version, wanted.get("source", "none"), wanted.get("components") or [])
    verdicts = [_layout(toolkit, path, expected), *_versions(toolkit, path, version, expected)]
    verdicts += _library_paths(root, path)
    if wanted.get("default"):
        verdicts.append(_default_link(root, path))
    compiler = _host_compiler(root, toolkit, version, wanted.get("host_compiler", ""))
    architectures = [_number(arch) for arch in wanted.get("arch") or []]
    if "nvcc" not in expected:
        reason = f"{path} has no nvcc: the wheels of CUDA {short(version)} bring none, or the profile asks for none."
        verdicts.append(Verdict("toolkit.compile", "skipped", LAYER, "nvcc", reason))
        return verdicts
    if isinstance(compiler, Verdict):
        return [*verdicts, compiler]
    if os.path.realpath(root) != "/":
        reason = f"Files are read below {root}, where nothing can be compiled."
        return [*verdicts, Verdict("toolkit.compile", "skipped", LAYER, "nvcc", reason)]
    if verdicts[0].status == "fail":
        reason = "It did not run, because files of the toolkit are missing."
        return [*verdicts, Verdict("toolkit.compile", "skipped", LAYER, "nvcc", reason)]
    program = _program(path, version, architectures, wanted.get("host_compiler", ""), user, step_s)
    verdicts += program
    if stack_python:
        verdicts.append(
            _extension(wanted, path, architectures, stack_python, stack_environment or {}, user, extension_s)
            if all(verdict.status != "fail" for verdict in program)
            else Verdict("toolkit.extension", "skipped", LAYER, _EXTENSION, "It did not run: nvcc does not work.")
        )
    return verdicts


# ---- files and versions -------------------------------------------------------------------------------------------


def _under(root: str, path: str) -> str:
    return os.path.normpath(os.path.join(root, path.lstrip("/")))


def _number(arch: str) -> int:
    """Return 120 of "sm_120". Raises ValueError for another form."""
    matched = re.fullmatch(r"(?:sm|compute)_(\d{2,3})[af]?", arch)
    if not matched:
        raise ValueError(f"{arch!r} is no architecture such as sm_120")
    return int(matched[1])


def _layout(toolkit: str, path: str, expected: Mapping[str, str]) -> Verdict:
    """Judge whether the files are there."""
    missing = []
    for component in sorted(set(expected) & set(_FILES)):
        absent = [name for name in _FILES[component] if not os.path.exists(os.path.join(toolkit, name))]
        if absent and not (component in _EITHER and len(absent) < len(_FILES[component])):
            missing += [f"{component}: {name}" for name in absent]
    differences = damage(toolkit) if _own(toolkit) else []
    evidence = {"path": path, "components": sorted(expected), "missing": missing[:20], "differences": differences}
    if missing:
        action = "Run the playbook provision.yml: it builds the toolkit again, beside this one."
        message = f"{path} lacks {missing[0].split(': ')[1]}, a part of {missing[0].split(':')[0]}."
        return Verdict("toolkit.layout", "fail", LAYER, path, message, evidence, action)
    if differences:
        action = "Something changed the toolkit in place. Run provision.yml: it builds it again, beside this one."
        return Verdict("toolkit.layout", "fail", LAYER, path, f"{differences[0]}.", evidence, action)
    return Verdict("toolkit.layout", "pass", LAYER, path, "Every file that was checked is there.", evidence)


def _own(toolkit: str) -> bool:
    """Tell whether Bedplate laid the toolkit out."""
    return "bedplate" in read_versions(toolkit)


def _versions(toolkit: str, path: str, version: str, expected: Mapping[str, str]) -> Iterator[Verdict]:
    """Judge the release, and the versions of the parts that tell it from its neighbours."""
    stated = read_versions(toolkit)
    release = _stated(stated, "cuda")
    found = {name: seen for name in expected if (seen := _component_version(toolkit, name, stated))}
    wrong = {name: seen for name, seen in found.items() if expected[name] and not _same_version(seen, expected[name])}
    action = (
        "Another release is installed there, or parts of one. Run the playbook provision.yml; where the source is "
        "`none`, install exactly that release or change the profile."
    )
    evidence = {"path": path, "version": release, "components": found}
    if release and release != version:
        message = f"{path} is CUDA {release}; the profile pins {version}."
        yield Verdict("toolkit.version", "fail", LAYER, path, message, evidence, action)
    elif wrong:
        name = min(wrong)
        message = f"{name} is {wrong[name]}; in CUDA {version} it is {expected[name]}."
        yield Verdict("toolkit.component", "fail", LAYER, name, message, {**evidence, "wrong": wrong}, action)
    elif release or any(expected[name] for name in found):
        told = ", ".join(f"{name} {found[name]}" for name in ("cudart", "cublas", "nvcc") if name in found)
        message = f"It is CUDA {version}" + (f" ({told})." if told else ".")
        yield Verdict("toolkit.version", "pass", LAYER, path, message, evidence)
    else:
        action = (
            "Install the package that brings version.json (cuda-documentation), or let Bedplate install the toolkit."
        )
        number = _defines(os.path.join(toolkit, "include", "cuda_runtime_api.h"), "CUDART_").get("VERSION", 0)
        series = f"{number // 1000}.{number % 1000 // 10}"  # CUDART_VERSION: 1000 * major + 10 * minor
        if series == short(version):
            message = f"It is a CUDA {series}; nothing in it tells whether it is {version}."
            yield Verdict("toolkit.version", "warn", LAYER, path, message, {**evidence, "series": series}, action)
        else:
            what = f"CUDA {series}" if number else "no CUDA release that can be told"
            message = f"{path} is {what}; the profile pins {version}."
            yield Verdict("toolkit.version", "fail", LAYER, path, message, {**evidence, "series": series}, action)


def _stated(document: Mapping[str, Any], key: str) -> str:
    """Return a version of version.json, "" where it has none."""
    entry = document.get(key)
    return str(entry.get("version", "")) if isinstance(entry, dict) else ""


def _component_version(toolkit: str, component: str, stated: Mapping[str, Any]) -> str:
    """Return the version of a component, "" where nothing tells: the files before version.json.

    cublas from its header, libraries from the numbers in their file name (NVIDIA's packages: libcudart.so.13.0.88),
    the rest from version.json. A file's number with fewer parts than the release's says less, and does not count.
    """
    if component == "cublas":
        numbers = _defines(os.path.join(toolkit, "include", "cublas_api.h"), "CUBLAS_VER_")
        if all(part in numbers for part in ("MAJOR", "MINOR", "PATCH", "BUILD")):
            return ".".join(str(numbers[part]) for part in ("MAJOR", "MINOR", "PATCH", "BUILD"))
    if component == "cudart":
        real = os.path.basename(os.path.realpath(os.path.join(toolkit, "lib64", "libcudart.so")))
        matched = re.fullmatch(r"libcudart\.so\.(\d+\.\d+\.\d+)", real)
        if matched:
            return matched[1]
    return _stated(stated, version_json_key(component))


def _same_version(found: str, expected: str) -> bool:
    """Tell whether two versions agree as far as the shorter one goes; NVIDIA drops a last number here and there."""
    one, other = found.split("."), expected.split(".")
    count = min(len(one), len(other))
    return count >= 3 and one[:count] == other[:count]


def _defines(header: str, prefix: str) -> dict[str, int]:
    """Return the numbers that a C header defines under names with a prefix."""
    return {
        name: int(value) for name, value in re.findall(rf"#define\s+{prefix}(\w+)\s+(\d+)", _text(header))
    }  # fmt: skip


def _text(path: str) -> str:
    """Return the beginning of a text file; "" when it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return stream.read(MAX_CONFIG).decode("utf-8", "replace")
    except OSError:
        return ""


# ---- links and search paths -----------------------------------------------------------------------------------------


def _default_link(root: str, path: str) -> Verdict:
    """Judge whether /usr/local/cuda names the toolkit."""
    link = os.path.join(os.path.dirname(path), "cuda")
    here = _under(root, link)
    evidence = {"link": link, "names": os.path.realpath(here), "wanted": path}
    if os.path.islink(here) and os.path.realpath(here) == os.path.realpath(_under(root, path)):
        return Verdict("toolkit.default_link", "pass", LAYER, link, f"It names {path}.", evidence)
    message = (
        f"It is a directory, and the profile wants it to name {path}."
        if os.path.isdir(here) and not os.path.islink(here)
        else f"It names {os.path.realpath(here)}; the profile wants {path}."
        if os.path.islink(here)
        else f"It does not exist; the profile wants it to name {path}."
    )
    action = "Run the playbook provision.yml, or set `default: false` in the profile's block toolkit."
    return Verdict("toolkit.default_link", "fail", LAYER, link, message, evidence, action)


def _library_paths(root: str, path: str) -> Iterator[Verdict]:
    """Judge what the node adds to every program's search for libraries."""
    found = [*_loader_directories(root), *_environment_directories(root)]
    compat = [entry for entry in found if re.search(r"/compat/?$", entry[1])]
    own = os.path.realpath(_under(root, path))
    other = [
        entry
        for entry in found
        if entry not in compat and "cuda" in entry[1] and not _inside(os.path.realpath(_under(root, entry[1])), own)
    ]
    variables = [
        entry for entry in found if entry not in compat and entry not in other and entry[2] == "LD_LIBRARY_PATH"
    ]
    evidence = {"found": [{"file": file, "directory": directory, "by": by} for file, directory, by in found][:20]}
    if compat:
        file, directory, _ = compat[0]
        message = f"{file} adds {directory}, which shadows the driver's libcuda and fails on these GPUs (803, 804)."
        action = f"Remove that line from {file} (and the package cuda-compat), then run ldconfig."
        yield Verdict("toolkit.library_path", "fail", LAYER, file, message, evidence, action)
    elif other or variables:
        file, directory, by = (other or variables)[0]
        what = "sets LD_LIBRARY_PATH for every program to" if by == "LD_LIBRARY_PATH" else "has the loader search"
        message = f"{file} {what} {directory}, which can shadow the libraries that the stack brings."
        action = "Remove it: programs find their CUDA libraries by their own search paths."
        yield Verdict("toolkit.library_path", "warn", LAYER, file, message, evidence, action)
    else:
        message = "Nothing makes every program search another CUDA directory."
        yield Verdict("toolkit.library_path", "pass", LAYER, "library search path", message, evidence)


def _inside(path: str, tree: str) -> bool:
    return path == tree or path.startswith(tree + os.sep)


def _files(root: str, folder: str, end: str) -> list[str]:
    """Return the paths of a directory's files whose name has an end; none when there is no directory."""
    try:
        names = sorted(os.listdir(_under(root, folder)))
    except OSError:
        return []
    return [f"{folder}/{name}" for name in names if name.endswith(end)]


def _loader_directories(root: str) -> Iterator[tuple[str, str, str]]:
    """Yield file, directory and "ld.so.conf" of each directory that the loader is told to search."""
    for file in ["/etc/ld.so.conf", *_files(root, "/etc/ld.so.conf.d", ".conf")]:
        for line in _text(_under(root, file)).splitlines():
            directory = line.partition("#")[0].strip()
            if directory.startswith("/"):
                yield file, directory, "ld.so.conf"


def _environment_directories(root: str) -> Iterator[tuple[str, str, str]]:
    """Yield file, directory and "LD_LIBRARY_PATH" of each directory in a variable that every login or service gets."""
    files = ["/etc/environment", "/etc/profile", "/etc/bash.bashrc", "/etc/systemd/system.conf"]
    files += _files(root, "/etc/profile.d", ".sh") + _files(root, "/etc/environment.d", ".conf")
    files += _files(root, "/etc/systemd/system.conf.d", ".conf")
    for file in files:
        for line in _text(_under(root, file)).splitlines():
            matched = re.search(r"(?:^|[\s\"'])LD_LIBRARY_PATH=(\S+)", line.partition("#")[0])
            if matched:
                for directory in matched[1].strip("\"'").split(":"):
                    if directory.startswith("/"):
                        yield file, directory, "LD_LIBRARY_PATH"


# ---- the host compiler --------------------------------------------------------------------------------------------


def _host_compiler(root: str, toolkit: str, version: str, wanted: str) -> str | Verdict:
    """Return the path of the compiler that nvcc will call, or the verdict that there is none it takes."""
    oldest, newest = _supported_gcc(toolkit, version)
    takes = f"nvcc of CUDA {short(version)} takes gcc {oldest} to {newest}"
    compiler = _under(root, wanted) if wanted else _which(root, "gcc")
    major, full = _gcc_version(compiler) if compiler else (0, "")
    if not compiler or not major or not _has_cxx(compiler):
        what = wanted or "g++"
        message = f"There is no {what} that answers; {takes}."
        action = (
            "Install g++ (the packages in cuda_toolkit_compiler_packages), or name one in cuda_toolkit_host_compiler."
        )
        return Verdict("toolkit.compiler_missing", "fail", LAYER, what, message, {"compiler": compiler or ""}, action)
    if oldest <= major <= newest:
        return compiler
    others = [other for number in range(newest, oldest - 1, -1) if (other := _which(root, f"g++-{number}"))]
    evidence = {"compiler": compiler, "version": full, "oldest": oldest, "newest": newest, "others": others}
    message = f"{compiler} is gcc {full}; {takes}."
    action = (
        f"Set cuda_toolkit_host_compiler to {others[0]}."
        if others
        else f"Install g++-{newest} or an older one and name it in cuda_toolkit_host_compiler."
    )
    return Verdict("toolkit.compiler_unsupported", "fail", LAYER, "gcc", message, evidence, action)


def _supported_gcc(toolkit: str, version: str) -> tuple[int, int]:
    """Return the oldest and newest gcc: the newest from the toolkit's own header, where it has one."""
    oldest, newest = support(version).gcc
    matched = re.search(r"#if __GNUC__ > (\d+)", _text(os.path.join(toolkit, "include", "crt", "host_config.h")))
    return oldest, int(matched[1]) if matched else newest


def _which(root: str, name: str) -> str:
    """Return the path of a program as a probe finds it, "" when there is none."""
    paths = (_under(root, f"{folder}/{name}") for folder in PATH)
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), "")


def _gcc_version(compiler: str) -> tuple[int, str]:
    """Return the major and the full version of a gcc; (0, "") when it does not answer with one."""
    answer = _ask(compiler, "-dumpfullversion", "-dumpversion")
    matched = re.fullmatch(r"(\d+)(\.\d+)*", answer)
    return (int(matched[1]), answer) if matched else (0, "")


def _has_cxx(compiler: str) -> bool:
    """Tell whether a gcc can compile C++: the name comes back as a path where the program is installed."""
    return os.path.isabs(_ask(compiler, "-print-prog-name=cc1plus"))


def _ask(*command: str) -> str:
    """Return what a program prints, stripped; "" when it fails or does not end in time."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMPILER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# ---- the program ----------------------------------------------------------------------------------------------------


def _program(
    path: str, version: str, architectures: Sequence[int], host_compiler: str, user: str, step_s: float
) -> list[Verdict]:
    """Compile, look into the file, run."""
    library = os.path.join(path, "lib64", "libcudart.so")
    outcome = run_probe(
        compile_child,
        {
            "path": path,
            "arch": list(architectures),
            "host_compiler": host_compiler,
            "library": library if os.path.exists(library) else "",
            "step_s": step_s,
        },
        # The distribution's, which every user may run; Ansible's own may lie in root's home.
        python=_which("/", "python3") or sys.executable,
        timeout_s=3 * step_s + 30,
        user=user,
    )
    found = outcome.result if isinstance(outcome.result, dict) else {}
    compiled = found.get("compile")
    names = ", ".join(f"sm_{arch}" for arch in architectures) or "the default architecture"
    if not compiled or compiled["exit_code"] != 0:
        told = (
            compiled["output"] if compiled else f"The process that compiles {outcome.ending()}. {outcome.stderr[-500:]}"
        )
        message = f"nvcc cannot compile and link a program for {names}: {_first_error(told)}"
        action = "Look at the output of nvcc in the evidence."
        evidence = {"output": told[-4000:], "exit_code": compiled["exit_code"] if compiled else None}
        return [Verdict("toolkit.compile_failed", "fail", LAYER, "nvcc", message, evidence, action)]
    machine_code = _machine_code(found.get("program", ""), architectures)
    verdicts = [machine_code]
    verdicts.append(_runtime(found, version))
    if machine_code.status == "pass":
        verdicts += _kernel(found, outcome.ending(), version)
    return verdicts


def _first_error(output: str) -> str:
    """Return the line of a compiler's output that says most, on one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = next((line for line in lines if re.search(r"error|fatal|cannot|not found|undefined", line, re.I)), "")
    return (told or (lines[-1] if lines else "it printed nothing"))[:300]


def _machine_code(program: str, architectures: Sequence[int]) -> Verdict:
    """Judge whether the program holds the kernel's machine code for every architecture."""
    wanted = sorted(set(architectures))
    try:
        elf = ElfFile(base64.b64decode(program, validate=True), "probe")
        found = sorted(cubins(elf, compile_child.KERNEL.encode()))
    except (ElfError, FatbinError, binascii.Error) as error:
        message = f"The program that nvcc made cannot be read: {error}."
        action = "Look at the disk, and at bin/fatbinary and the linker of this node."
        return Verdict("toolkit.arch_missing", "fail", LAYER, "nvcc", message, {}, action)
    evidence = {"wanted": wanted, "found": found}
    missing = [arch for arch in wanted if arch not in found]
    if missing:
        message = f"The program holds no machine code for sm_{missing[0]}, although nvcc was asked for it."
        action = (
            "Another nvcc.profile, NVCC_APPEND_FLAGS or a wrapper around nvcc is in the way; look at `nvcc --dryrun`."
        )
        return Verdict("toolkit.arch_missing", "fail", LAYER, "nvcc", message, evidence, action)
    names = ", ".join(f"sm_{arch}" for arch in found)
    message = f"A program compiles, links and holds machine code for {names}."
    return Verdict("toolkit.compile", "pass", LAYER, "nvcc", message, evidence)


def _runtime(found: Mapping[str, Any], version: str) -> Verdict:
    """Judge the version that the runtime itself answers, linked into the program and as a shared library."""
    major, minor = (int(part) for part in short(version).split("."))
    expected = 1000 * major + 10 * minor  # CUDART_VERSION, cuda_runtime_api.h
    run, shared = found.get("run", {}), found.get("shared_runtime")
    static = _number_after("runtime", run.get("output", ""))
    evidence = {"expected": expected, "program": static, "library": shared, "exit_code": run.get("exit_code")}
    subject = "cudaRuntimeGetVersion"
    if static == expected and shared in (None, expected):
        return Verdict("toolkit.runtime", "pass", LAYER, subject, f"The runtime answers {static}.", evidence)
    wrong = f"libcudart.so answers {shared}" if static == expected else f"a compiled program answers {static}"
    message = (
        f"{wrong}; CUDA {version} answers {expected}. {_first_error(run.get('output', '')) if static is None else ''}"
    )
    action = "Files of two releases are mixed in this toolkit. Run provision.yml: it builds it again, beside this one."
    return Verdict("toolkit.runtime", "fail", LAYER, subject, message.strip(), evidence, action)


def _number_after(word: str, output: str) -> int | None:
    matched = re.search(rf"^{word} (\d+)", output, re.MULTILINE)
    return int(matched[1]) if matched else None


def _kernel(found: Mapping[str, Any], ending: str, version: str) -> Iterator[Verdict]:
    """Judge how the kernel ran on each GPU; skipped where there is none."""
    run = found.get("kernel", {})
    output = run.get("output", "")
    driver = _number_after("driver", output) or 0
    devices = re.search(r"^devices (\d+) (-?\d+)", output, re.MULTILINE)
    results = [
        tuple(int(part) for part in line) for line in re.findall(r"^device (\d+) (\d+) (\d+)", output, re.MULTILINE)
    ]
    evidence = {"driver": driver, "output": output[-2000:], "exit_code": run.get("exit_code")}
    subject = "kernel on the GPUs"
    if not devices:
        message = f"The program did not reach the GPUs: {_first_error(output) if output else ending}."
        action = "Look at `dmesg` for an Xid, and at the verdicts of the layer driver."
        yield Verdict("toolkit.kernel", "fail", LAYER, subject, message, evidence, action)
        return
    error, count = int(devices[1]), int(devices[2])
    needed = support(version).driver
    if error == _INSUFFICIENT_DRIVER and driver:
        has = f"{driver // 1000}.{driver % 1000 // 10}"
        message = f"The driver is for CUDA {has}; CUDA {version} needs a driver of branch {needed} or newer."
        action = f"Pin a driver of branch {needed} or newer in the profile, or an older toolkit."
        yield Verdict("toolkit.driver_too_old", "fail", LAYER, "driver", message, evidence, action)
    elif error in (_SYSTEM_MISMATCH, _COMPAT_UNSUPPORTED):
        message = (
            f"CUDA answers error {error}: a compatibility library of another version is loaded instead of the driver's."
        )
        action = "Remove the package cuda-compat and its directory from ld.so.conf and LD_LIBRARY_PATH."
        yield Verdict("toolkit.library_path", "fail", LAYER, "libcuda.so.1", message, evidence, action)
    elif error in (_INSUFFICIENT_DRIVER, _NO_DEVICE) or (not error and not count):
        reason = "There is no driver here." if error == _INSUFFICIENT_DRIVER else "The driver has no GPU here."
        yield Verdict("toolkit.kernel", "skipped", LAYER, subject, f"{reason} The kernel was not run.", evidence)
    else:
        yield _kernel_results(error, count, results, evidence)


def _kernel_results(error: int, count: int, results: Sequence[tuple[int, ...]], evidence: dict[str, Any]) -> Verdict:
    """Judge what each GPU answered: (number, error, wrong values)."""
    subject = "kernel on the GPUs"
    bad = [result for result in results if result[1] or result[2]]
    if not error and not bad and len(results) == count:
        return Verdict("toolkit.kernel", "pass", LAYER, subject, f"It ran right on {count} GPUs.", evidence)
    if bad:
        number, code, wrong = bad[0]
        what = (
            f"GPU {number} answers CUDA error {code}" if code else f"GPU {number} computed {wrong} of 64 values wrong"
        )
    else:
        what = f"CUDA answers error {error}" if error else f"{len(results)} of {count} GPUs answered in time"
    action = (
        "Error 209 means no machine code for this GPU: look at `arch` in the profile. Else look at `dmesg` for an Xid, "
        "and at the verdicts of the layer driver."
    )
    return Verdict("toolkit.kernel", "fail", LAYER, subject, f"{what}.", evidence, action)


# ---- the torch extension --------------------------------------------------------------------------------------------


def _extension(
    wanted: Mapping[str, Any],
    path: str,
    architectures: Sequence[int],
    python: str,
    environment: Mapping[str, str],
    user: str,
    timeout_s: float,
) -> Verdict:
    """Build a torch extension against the stack and call it."""
    subject = _EXTENSION
    home = environment.get("CUDA_HOME", "")
    if home and os.path.realpath(home) != os.path.realpath(path):
        reason = f"The stack uses the toolkit at {home}."
        return Verdict("toolkit.extension", "skipped", LAYER, subject, reason, {"cuda_home": home})
    config = {
        "path": path,
        "version": wanted["version"],
        "arch": list(architectures),
        "host_compiler": wanted.get("host_compiler", ""),
    }
    outcome = run_probe(extension_child, config, python=python, timeout_s=timeout_s, environment=environment, user=user)
    found = outcome.result if isinstance(outcome.result, dict) else {}
    evidence = {**found, "elapsed_s": outcome.elapsed_s, "stage": outcome.stages.get("extension", "")}
    if "skipped" in found:
        return Verdict("toolkit.extension", "skipped", LAYER, subject, f"Not built: {found['skipped']}.", evidence)
    if found.get("ok"):
        message = (
            f"It builds with {path}/bin/nvcc against the stack's torch, loads, and computes right on {found['device']}."
        )
        return Verdict("toolkit.extension", "pass", LAYER, subject, message, evidence)
    evidence["output"] = (outcome.stdout + outcome.stderr)[-4000:]
    if "error" in found:
        told = _first_error(found["error"])
    elif "ok" in found:
        told = "it computes wrong values"
    else:
        told = f"the process {outcome.ending()} while {evidence['stage'] or 'starting'}"
    message = f"A torch extension cannot be built with this toolkit: {told}"
    action = f"Try it by hand: CUDA_HOME={shlex.quote(path)} with the stack's Python; the evidence has the output."
    return Verdict("toolkit.extension", "fail", LAYER, subject, message, evidence, action)
