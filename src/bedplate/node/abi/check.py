"""The ABI check of an installed environment: would every extension load in a process that imported torch
first?

Nothing is run and nothing is loaded. ``check_environment`` builds the process with ``loader.Loader``: the
interpreter, then what ``import torch`` loads, then each extension by itself, and asks for every undefined
symbol and every needed library and version what the loader would bind it to. The answers are verdicts with
the ``abi.*`` codes.

Which files are judged: Python extension modules this interpreter would import, libraries that need torch
(they are loaded by ``torch.ops.load_library``), and everything those need. Other files are looked at and
listed apart: other Python tags, other torch or CUDA variants, other SM directories, plugins nothing here
needs.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..verdicts import Verdict, worst
from .demangle import demangle, nearest_of, source_token
from .elf import STB_WEAK, ElfError, ElfFile, Symbol
from .installed import (
    SHARED_OBJECT,
    Distributions,
    Environment,
    apart_reasons,
    find_environment,
    is_module,
    shared_objects,
)
from .judge import DRIVER_LIBRARIES, LAYER, MAX_SYMBOLS, SONAME, Context, ExportIndex, Findings, is_driver, verdicts_of
from .loader import Library, Loader, SystemLibraries

_FIRST_SCOPE = re.compile(r"_Z(?:T[VTIS]|GV|GR)?N[KVrRO]*(?P<scope>S[tabsiod]|\d+)")

MAX_NEAREST_CANDIDATES = 2000


@dataclass
class Report:
    """The result of a check: verdicts, and what was looked at.

    checked: files judged; apart: files this node would never load, each with the reason; driver: libraries
    expected from the driver with the number of symbols; duration_ms: wall time.
    """

    verdicts: list[Verdict]
    checked: int
    apart: list[dict[str, Any]]
    driver: dict[str, int]
    duration_ms: int

    @property
    def status(self) -> str:
        """The gravest status among the verdicts."""
        return worst(self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON dict."""
        return {
            "verdicts": [v.to_dict() for v in self.verdicts],
            "status": self.status,
            "checked": self.checked,
            "apart": self.apart,
            "driver": self.driver,
            "duration_ms": self.duration_ms,
        }


# -- the check


class Checker:
    """One run of the check. Use ``check_environment``."""

    def __init__(self, environment: Environment, loader: Loader, index: ExportIndex | None) -> None:
        """Prepare a run; nothing is read yet."""
        self.environment = environment
        self.loader = loader
        self.index = index
        self.distributions = Distributions(environment.site_packages)
        self.judged: set[str] = set()
        self.driver: dict[str, set[str]] = {}
        self.python_names: set[str] = set()  # what an interpreter that was not found would have to bring
        self.torch_libraries: list[Library] = []
        self._nearest: dict[str, str | None] = {}

    def preload_torch(self) -> list[Findings]:
        """Load what ``import torch`` loads, in its order; return what is wrong with it.

        torch/__init__.py opens libtorch_global_deps.so with RTLD_GLOBAL and then imports torch._C; a torch
        without those gets all its libraries loaded.
        """
        torch = self.environment.torch
        if torch is None:
            return []
        library = os.path.join(torch.directory, "lib")
        names = sorted(os.listdir(library)) if os.path.isdir(library) else []
        extension = [
            os.path.join(torch.directory, n)
            for n in sorted(os.listdir(torch.directory))
            if n.startswith("_C.") and n.endswith(".so") and not self.environment.foreign_python(n)
        ]
        first = [n for n in names if n == "libtorch_global_deps.so"]
        rest = extension or [os.path.join(library, n) for n in names if SHARED_OBJECT.search(n) and n not in first]
        found = [self.judge(os.path.join(library, n), to_global=True) for n in first]
        found += [self.judge(path) for path in self._preloaded_cuda()]
        found += [self.judge(path) for path in rest]
        for path in [os.path.join(library, n) for n in names]:
            known = self.loader.loaded(path)
            if known is not None:
                self.torch_libraries.append(known)
        return [f for group in found for f in group]

    def _preloaded_cuda(self) -> list[str]:
        """Return the CUDA libraries that torch/__init__.py opens by path when CUDA comes from the nvidia
        wheels.
        """
        pattern = os.path.join(glob.escape(self.environment.site_packages), "nvidia", "*", "lib")
        return [
            path
            for library in ("libnvrtc.so.*[0-9]", "libnvJitLink.so.*[0-9]")
            for path in sorted(glob.glob(os.path.join(pattern, library)))
            if ".alt." not in os.path.basename(path)
        ]

    def judge(self, path: str, *, to_global: bool = False) -> list[Findings]:
        """Load one file into the simulated process.

        Return findings for it and for what it newly brings in.
        """
        try:
            root = self.loader.dlopen(path, to_global=to_global)
        except (ElfError, OSError) as error:
            self.judged.add(path)
            return [Findings(self.relative(path), path, error=str(error))]
        found = []
        for library in root.scope():
            if library.path not in self.judged:
                self.judged.add(library.path)
                found.append(self._examine(library, root))
        return found

    def relative(self, path: str) -> str:
        """Return a path below site-packages relative to it, others unchanged."""
        site = self.environment.site_packages + os.sep
        return path[len(site) :] if path.startswith(site) else path

    def _examine(self, library: Library, root: Library) -> Findings:
        found = Findings(self.relative(library.path), library.path, broken=library.broken)
        found.borrowed = {name: self.relative(path) for name, path in library.borrowed.items()}
        driver = [name for name in library.missing if is_driver(name)]
        found.missing = [name for name in library.missing if name not in driver]
        for name in driver:
            self.driver.setdefault(name, set())
        absent = {name for member in root.scope() for name in member.missing}
        try:
            self._versions(library, found, absent)
            bad_versions = {version for version, _ in found.versions}
            unresolved = []
            for symbol in library.elf.undefined():
                provider = self.loader.provider(symbol, root)
                if provider is not None:
                    if provider in self.torch_libraries:
                        found.torch_symbols.append(os.fsdecode(symbol.name))
                elif symbol.bind != STB_WEAK:
                    unresolved.append(symbol)
            if unresolved:
                referred = library.elf.relocated({s.number for s in unresolved})
                unresolved = [s for s in unresolved if s.number in referred]
            if self.environment.python is None:
                of_python = {os.fsdecode(s.name) for s in unresolved if s.name.startswith((b"Py", b"_Py"))}
                self.python_names |= of_python
                unresolved = [s for s in unresolved if os.fsdecode(s.name) not in of_python]
            for symbol in unresolved:
                self._blame(symbol, root, absent, bad_versions, found)
        except ElfError as error:
            found.error = str(error)
        return found

    def _versions(self, library: Library, found: Findings, absent: set[str]) -> None:
        """Check the version needs as ``_dl_check_map_versions`` does.

        A library without versions is accepted.
        """
        for version in library.elf.needed_versions():
            file = os.fsdecode(version.file)
            provider = self.loader.loaded(file)
            if provider is None or file in absent or version.weak:
                continue
            defined = provider.elf.defined_versions()
            if defined and version.name not in defined:
                found.versions.append((os.fsdecode(version.name), provider.path))

    def _blame(self, symbol: Symbol, root: Library, absent: set[str], bad_versions: set[str], found: Findings) -> None:
        """Say who fails to bring an unresolved symbol.

        A missing library, the driver, or a library that is there.
        """
        name = os.fsdecode(symbol.name)
        if symbol.version is not None:
            file, version = os.fsdecode(symbol.version.file), os.fsdecode(symbol.version.name)
            if file in absent:
                self._blame_library(file, name, found)
            elif version not in bad_versions or not version.startswith(("GLIBC_", "GLIBCXX_", "CXXABI_", "GCC_")):
                found.undefined.append(symbol)
            return
        for library in sorted(absent):
            for pattern, functions in DRIVER_LIBRARIES:
                if functions and pattern.match(library) and functions.match(name):
                    self.driver.setdefault(library, set()).add(name)
                    return
        lost = sorted(library for library in absent if not is_driver(library))
        if lost and not name.startswith(("Py", "_Py")) and not self._scope_is_present(name, root):
            base = re.sub(r"[^a-z0-9]", "", name.lower())
            for library in lost:
                match = SONAME.match(library)
                if match and base.startswith(re.sub(r"[^a-z0-9]", "", match.group("base").lower())):
                    self._blame_library(library, name, found)
                    return
            self._blame_library(lost[0], name, found)
            return
        found.undefined.append(symbol)

    @staticmethod
    def _blame_library(library: str, name: str, found: Findings) -> None:
        found.blamed.setdefault(library, []).append(name)

    def _scope_is_present(self, name: str, root: Library) -> bool:
        """Tell whether a library in scope exports names of the same outermost C++ scope (c10, at ...)."""
        match = _FIRST_SCOPE.match(name)
        if match is None:
            return name.startswith("_ZS")
        if not match.group("scope").isdigit():
            return True  # std: the C++ runtime is always there
        at = match.start("scope")
        prefix = b"_ZN" + name[at : match.end("scope") + int(match.group("scope"))].encode()
        others = (library.elf for library in root.scope() if library is not root)
        return any(e.data.find(prefix, e.tables.strtab, e.tables.strtab + e.tables.strsz) >= 0 for e in others)

    # -- the nearest export

    def nearest(self, mangled: str) -> str | None:
        """Return torch's exported name that is nearest to a missing C++ function.

        Same name, other parameters.
        """
        if mangled not in self._nearest:
            self._nearest[mangled] = self._find_nearest(mangled)
        return self._nearest[mangled]

    def _find_nearest(self, mangled: str) -> str | None:
        wanted = demangle(mangled)
        token = source_token(wanted).encode()
        if not token:
            return None
        candidates = (
            os.fsdecode(name)
            for library in self.torch_libraries
            for name in _names_with(library.elf, token)
            if _exports(library.elf, name)
        )
        return nearest_of(mangled, candidates)


def _exports(elf: ElfFile, name: bytes) -> bool:
    """Tell whether a library exports a name; one with damaged tables, which is a verdict of its own, does not."""
    try:
        return elf.lookup(name)
    except ElfError:
        return False


def _names_with(elf: ElfFile, token: bytes) -> Iterable[bytes]:
    """Yield the C++ names of a string table that hold ``token``, at most MAX_NEAREST_CANDIDATES of them."""
    start = elf.tables.strtab
    end = start + elf.tables.strsz
    at = elf.data.find(token, start, end)
    seen = 0
    while at >= 0 and seen < MAX_NEAREST_CANDIDATES:
        first = elf.data.rfind(b"\0", start, at) + 1
        last = elf.data.find(b"\0", at, end)
        if last < 0:
            return
        if elf.data[first : first + 2] == b"_Z":
            seen += 1
            yield bytes(elf.data[first:last])
        at = elf.data.find(token, last, end)


def check_environment(
    site_packages: str,
    *,
    python: str | None = None,
    index: ExportIndex | None = None,
    arch: int | None = None,
    library_path: Iterable[str] = (),
    system: SystemLibraries | None = None,
) -> Report:
    """Check one installed environment.

    Args: site_packages: its directory; python: the interpreter, found beside it when None; index: the index
    of torch releases, for "which release has it"; arch: the SM number of the node's GPUs; library_path:
    directories of LD_LIBRARY_PATH; system: where system libraries are looked for.

    Errors: NotADirectoryError. Everything else is a verdict.
    """
    started = time.monotonic()
    environment = find_environment(site_packages, python)
    verdicts: list[Verdict] = []
    try:
        loader = Loader(environment.python, library_path=library_path, system=system)
    except (ElfError, OSError) as error:
        verdicts.append(
            Verdict(
                "abi.unreadable_file", "fail", LAYER, environment.python or "python",
                f"The interpreter cannot be read: {error}.", {"file": environment.python},
                "Repair the environment's interpreter, or build the environment again.",
            )
        )  # fmt: skip
        return Report(verdicts, 0, [], {}, _milliseconds(started))
    files = shared_objects(environment.site_packages)
    loader.elsewhere = _by_basename(environment.site_packages, files)
    checker = Checker(environment, loader, index)
    findings = checker.preload_torch()
    apart = apart_reasons(files, environment, arch)
    required, others, unreadable = _sort_files(checker, files, apart)
    findings += unreadable
    for file in required:
        path = os.path.join(environment.site_packages, file)
        if path not in checker.judged:
            state = loader.snapshot()
            findings += checker.judge(path)
            loader.restore(state)
    listed = [{"file": file, "reason": reason} for file, reason in sorted(apart.items())]
    idle = [file for file in others if os.path.join(environment.site_packages, file) not in checker.judged]
    listed += [{"file": file, "reason": "loaded by name, if at all: no module, and no user of torch"} for file in idle]
    context = Context(
        torch=environment.torch,
        python=environment.version,
        index=index,
        owner=checker.distributions.owner,
        nearest=checker.nearest,
        files=len(files),
        judged=sum(1 for path in checker.judged if path.startswith(environment.site_packages + os.sep)),
        apart=len(listed),
        driver={name: len(symbols) for name, symbols in sorted(checker.driver.items())},
    )
    if checker.python_names:
        verdicts.append(_no_interpreter(environment.site_packages, checker.python_names))
    verdicts += verdicts_of(context, findings)
    return Report(verdicts, context.judged, listed, context.driver, _milliseconds(started))


def _no_interpreter(site_packages: str, names: set[str]) -> Verdict:
    """Return the verdict on names of Python's that nothing can be said about."""
    return Verdict(
        "abi.unreadable_file", "inconclusive", LAYER, "python",
        f"There is no interpreter beside {site_packages}: whether it has the {len(names)} names that extensions need "
        "of Python was not checked.",
        {"file": None, "site_packages": site_packages, "names": sorted(names)[:MAX_SYMBOLS]},
        "Give the environment its interpreter back, or build it again.",
    )  # fmt: skip


def _by_basename(site_packages: str, files: Iterable[str]) -> dict[str, str]:
    """Return file name -> path of the first file of that name.

    Where a package's own code could load it from.
    """
    found: dict[str, str] = {}
    for file in files:
        found.setdefault(os.path.basename(file), os.path.join(site_packages, file))
    return found


def _sort_files(
    checker: Checker, files: Iterable[str], apart: dict[str, str]
) -> tuple[list[str], list[str], list[Findings]]:
    """Sort the files not set apart into required ones, others, and unreadable ones (as findings).

    Files for another word size, byte order or machine are set apart here.

    Required is what a process would load for sure to use the packages: extension modules, and libraries that
    need a library of torch, because those register operators.
    """
    torch_names = {os.path.basename(library.path) for library in checker.torch_libraries}
    torch_names |= {library.elf.soname or "" for library in checker.torch_libraries} - {""}
    required: list[str] = []
    others: list[str] = []
    unreadable: list[Findings] = []
    for file in files:
        if file in apart:
            continue
        path = os.path.join(checker.environment.site_packages, file)
        try:
            elf = checker.loader.open(path)
            wanted = is_module(elf, file) or not torch_names.isdisjoint(elf.needed)
        except (ElfError, OSError) as error:
            if isinstance(error, ElfError) and error.foreign:  # the loader passes over it as well
                apart[file] = error.reason
                continue
            unreadable.append(Findings(file, path, error=str(error)))
            continue
        (required if wanted else others).append(file)
    return required, others, unreadable


def _milliseconds(started: float) -> int:
    return round((time.monotonic() - started) * 1000)
