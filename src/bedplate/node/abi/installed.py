"""An installed Python environment as files: its interpreter, its torch, its shared objects, and who owns
them.

Also which of the files this node would ever load. The rules are about names, because names are what packages
choose by: the interpreter's extension suffixes, directories per SM, tags of torch and CUDA versions.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from .elf import ElfFile

SHARED_OBJECT = re.compile(r"\.so(\.\d+)*$")
CPYTHON_TAG = re.compile(r"\.(?:cpython-(?P<number>\d+)(?P<flags>[a-z]*)|(?:pypy|graalpy)[\w-]*)(?:-[\w-]+)?\.so$")
_SM_DIRECTORY = re.compile(r"^(?:sm|compute)_?(\d{2,3})[af]?$")
_TORCH_TAG = re.compile(r"(?<![a-z])(?:torch|pt|th)[-_]?(\d)[._]?(\d{1,2})(?!\d)", re.IGNORECASE)
_CUDA_TAG = re.compile(r"(?<![a-z])(?:cu|cuda)[-_]?(1\d)(?:[._]?(\d))?(?!\d)", re.IGNORECASE)
_ROCM_TAG = re.compile(r"(?<![a-z])(?:rocm|hip|xpu|musa|npu)\d*(?![a-z])", re.IGNORECASE)


@dataclass
class Torch:
    """The installed torch: its version, CUDA version ("" for a CPU build) and directory."""

    version: str
    cuda: str
    directory: str

    @property
    def public(self) -> str:
        """The version without the local part."""
        return self.version.split("+")[0]


@dataclass
class Environment:
    """One site-packages directory and the interpreter it belongs to."""

    site_packages: str
    python: str | None
    version: tuple[int, int]
    torch: Torch | None
    free_threaded: bool = False

    def foreign_python(self, name: str) -> bool:
        """Tell whether a file's name says that it is for another Python: number, free threading, implementation."""
        tag = CPYTHON_TAG.search(name)
        if tag is None:
            return False
        number = "{}{}".format(*self.version)
        return tag.group("number") != number or ("t" in (tag.group("flags") or "")) is not self.free_threaded


# -- the environment


def find_environment(site_packages: str, python: str | None = None) -> Environment:
    """Describe an installed environment by its site-packages directory.

    Errors: NotADirectoryError when there is no such directory.
    """
    site = os.path.abspath(site_packages)
    if not os.path.isdir(site):
        raise NotADirectoryError(f"{site} is not a directory")
    match = re.search(r"/python(\d)\.(\d+)(t?)/(?:site|dist)-packages$", site)
    version = (int(match.group(1)), int(match.group(2))) if match else sys.version_info[:2]
    free_threaded = bool(match.group(3)) if match else "t" in sys.abiflags
    if python is None and match:
        candidate = os.path.join(site[: match.start()], "..", "bin", "python")
        python = candidate if os.path.exists(candidate) else None
    return Environment(site, os.path.realpath(python) if python else None, version, find_torch(site), free_threaded)


def site_packages_of(root: str) -> str:
    """Return the site-packages directory of a virtual environment or of a generation that holds one in
    ``venv``.

    Errors: FileNotFoundError when there is none.
    """
    for base in (root, os.path.join(root, "venv")):
        library = os.path.join(base, "lib")
        if os.path.isdir(library):
            for name in sorted(os.listdir(library), reverse=True):
                candidate = os.path.join(library, name, "site-packages")
                if name.startswith("python") and os.path.isdir(candidate):
                    return candidate
    raise FileNotFoundError(f"{root} holds no lib/python*/site-packages, neither itself nor in venv/")


def find_torch(site_packages: str) -> Torch | None:
    """Return the torch installed in a site-packages directory, or None."""
    directory = os.path.join(site_packages, "torch")
    if not os.path.isdir(directory):
        return None
    version = cuda = ""
    try:
        with open(os.path.join(directory, "version.py"), encoding="utf-8") as file:
            text = file.read(65536)
        found = re.search(r"^__version__\s*(?::[^=]+)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        version = found.group(1) if found else ""
        found = re.search(r"^cuda\s*(?::[^=]+)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        cuda = found.group(1) if found else ""
    except (OSError, UnicodeDecodeError):
        version = ""
    if not version:
        names = [n for n in os.listdir(site_packages) if n.startswith("torch-") and n.endswith(".dist-info")]
        version = names[0][len("torch-") : -len(".dist-info")] if names else "of unknown version"
    return Torch(version, cuda, directory)


def shared_objects(site_packages: str) -> list[str]:
    """Return the shared objects below a directory, relative and sorted.

    Links are not followed into directories.
    """
    found: list[str] = []
    for base, directories, files in os.walk(site_packages):
        directories[:] = [d for d in directories if d != "__pycache__"]
        prefix = "" if base == site_packages else os.path.relpath(base, site_packages) + os.sep
        found += [prefix + name for name in files if ".so" in name and SHARED_OBJECT.search(name)]
    return sorted(found)


class Distributions:
    """Which distribution a file belongs to, read from the RECORD files on first use."""

    def __init__(self, site_packages: str) -> None:
        """Keep the directory; nothing is read yet."""
        self._site = site_packages
        self._owners: dict[str, str] | None = None

    def owner(self, file: str) -> str:
        """Return ``name version`` of the distribution that installed ``file``, or its top-level name."""
        if self._owners is None:
            self._owners = {}
            for name in sorted(os.listdir(self._site)):
                if name.endswith(".dist-info"):
                    self._read(name)
        return self._owners.get(file, file.split("/")[0])

    def _read(self, directory: str) -> None:
        stem, _, version = directory[: -len(".dist-info")].rpartition("-")
        label = f"{stem.replace('_', '-')} {version}"
        try:
            with open(
                os.path.join(self._site, directory, "RECORD"), encoding="utf-8", errors="surrogateescape"
            ) as file:
                for line in file:
                    if ".so" in line:
                        self._owners[line.split(",")[0].strip('"')] = label  # type: ignore[index]
        except OSError:
            return  # installed without a RECORD (by a system package): the top-level name has to do


# -- what would be loaded


def apart_reasons(files: Iterable[str], environment: Environment, arch: int | None = None) -> dict[str, str]:
    """Return the files this node would never load, with the reason in words.

    Args: arch: the SM number of the node's GPUs, such as 120; None where it is not known.
    """
    files = list(files)
    major, minor = environment.version
    reasons: dict[str, str] = {}
    sm_choices = _sm_choices(files, arch)
    torch = environment.torch
    torch_tag = tuple(torch.public.split(".")[:2]) if torch else ()
    cuda_tag = torch.cuda.split(".")[0] if torch else ""
    for file in files:
        name = os.path.basename(file)
        if environment.foreign_python(name):
            reasons[file] = f"built for another Python than {major}.{minor}"
            continue
        for parent, chosen in sm_choices.items():
            if file.startswith(parent) and not file.startswith(chosen + "/"):
                rest = file[len(parent) :].split("/")[0]
                if _SM_DIRECTORY.match(rest):
                    reasons[file] = f"another GPU architecture; this node takes {os.path.basename(chosen)}"
        if file in reasons or file.startswith(("torch/", "nvidia/")):
            continue
        found = _TORCH_TAG.search(file)
        if found and torch_tag and found.groups() != torch_tag:
            reasons[file] = f"built for torch {found.group(1)}.{found.group(2)}"
            continue
        found = _CUDA_TAG.search(file)
        if found and cuda_tag and found.group(1) != cuda_tag:
            reasons[file] = f"built for CUDA {found.group(1)}"
        elif cuda_tag and _ROCM_TAG.search(file):
            reasons[file] = "built for another kind of accelerator"
    return reasons


def _sm_choices(files: Iterable[str], arch: int | None) -> dict[str, str]:
    """Return parent directory (with slash) -> the one smNN directory below it that this node would use."""
    groups: dict[str, dict[str, int]] = {}
    for file in files:
        parts = file.split("/")
        for at, part in enumerate(parts[:-1]):
            match = _SM_DIRECTORY.match(part)
            if match:
                parent = "".join(p + "/" for p in parts[:at])
                groups.setdefault(parent, {})[parent + part] = int(match.group(1))
    chosen = {}
    for parent, directories in groups.items():
        usable = {d: n for d, n in directories.items() if arch is None or n <= arch} or directories
        chosen[parent] = max(usable, key=lambda d: usable[d])
    return chosen


def module_name(file: str) -> str:
    """Return the last part of the module name that a file would be imported by."""
    return os.path.basename(file).split(".")[0]


def is_module(elf: ElfFile, file: str) -> bool:
    """Tell whether a shared object is a Python extension module: it exports PyInit_<name>."""
    name = module_name(file)
    prefix, encoded = ("PyInit_", name) if name.isascii() else ("PyInitU_", name.encode("punycode").decode())
    return elf.lookup((prefix + encoded.replace("-", "_")).encode())
