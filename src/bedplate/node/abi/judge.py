"""From findings to verdicts: the sentences an operator reads, with the evidence beside them.

``Findings`` say what the loader would miss for one file; ``verdicts_of`` turns them into verdicts with stable
codes. A library that is missing is one verdict however many files and symbols want it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Protocol

from ..verdicts import Verdict
from .demangle import Signature, demangle, differing, split_signature
from .elf import Symbol
from .installed import Torch

LAYER = "stack"

# Libraries of the NVIDIA driver: they come from the node, whatever the environment. The patterns are of the C
# functions each one exports: prefix and capital, since names of one's own may begin with "cu" as well.
DRIVER_LIBRARIES = (
    (re.compile(r"libcuda\.so(\.1)?$"), re.compile(r"cu[A-Z]")),
    (re.compile(r"libnvidia-ml\.so(\.1)?$"), re.compile(r"nvml[A-Z]")),
    (re.compile(r"libnvcuvid\.so(\.1)?$"), re.compile(r"cuvid[A-Z]")),
    (re.compile(r"libnvidia-encode\.so(\.1)?$"), re.compile(r"NvEncode[A-Z]")),
    (re.compile(r"libnvoptix\.so(\.1)?$"), re.compile(r"(?:optix|rt)[A-Z]")),
    (re.compile(r"libnvidia-[a-z0-9-]+\.so(\.\d+)*$"), None),
)

# CUDA libraries whose number behind .so. is the CUDA major version (or moves with it).
CUDA_LIBRARIES = (
    "cudart",
    "nvrtc",
    "nvrtc-builtins",
    "cublas",
    "cublasLt",
    "cufft",
    "curand",
    "cusolver",
    "cusolverMg",
    "cusparse",
    "nvJitLink",
    "cupti",
    "nvToolsExt",
    "nppc",
    "nppial",
    "nppicc",
    "nppidei",
    "nppif",
    "nppig",
    "nppim",
    "nppist",
    "nppitc",
    "nvjpeg",
    "nvfatbin",
    "cufile",
)

SONAME = re.compile(r"lib(?P<base>.+?)\.so(?:\.(?P<number>\d+))?")

MAX_SYMBOLS = 50  # symbols listed in one verdict; the count is always given


def is_driver(name: str) -> bool:
    """Tell whether a library comes with the NVIDIA driver of the node."""
    return any(pattern.match(name) for pattern, _ in DRIVER_LIBRARIES)


class ExportIndex(Protocol):
    """What the check asks of the index of torch releases (``exports.TorchIndex``)."""

    def releases_with(self, names: Iterable[str]) -> list[str]:
        """Return the releases, oldest first, that export all ``names``."""

    def knows(self, name: str) -> bool:
        """Tell whether any release exports ``name``."""

    def cuda_of(self, version: str) -> str:
        """Return the CUDA version a release was built with."""

    def layout_of(self, version: str) -> dict[str, list[int]]:
        """Return type -> [size, alignment] of a release, empty when it is not known."""


@dataclass
class Findings:
    """What is wrong with one file, before it becomes verdicts. Names of libraries and mangled symbols."""

    file: str
    path: str
    missing: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    borrowed: dict[str, str] = field(default_factory=dict)
    undefined: list[Symbol] = field(default_factory=list)
    blamed: dict[str, list[str]] = field(default_factory=dict)
    versions: list[tuple[str, str]] = field(default_factory=list)
    torch_symbols: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def clean(self) -> bool:
        """True when the loader would have nothing to complain about."""
        return not (self.missing or self.broken or self.undefined or self.versions or self.error)


@dataclass
class Context:
    """What the sentences need to know besides the findings.

    torch: the torch in question, or None; python: (major, minor); index: the index of torch releases, or
    None; owner: file -> distribution; nearest: mangled name -> torch's nearest exported one; files, judged,
    apart: counts of files; driver: library of the driver -> number of symbols it must bring.
    """

    torch: Torch | None
    python: tuple[int, int]
    index: ExportIndex | None
    owner: Callable[[str], str]
    nearest: Callable[[str], str | None]
    files: int = 0
    judged: int = 0
    apart: int = 0
    driver: dict[str, int] = field(default_factory=dict)

    @property
    def torch_label(self) -> str:
        """``torch 2.10.0``, or ``the installed libraries`` where there is no torch."""
        return f"torch {self.torch.public}" if self.torch else "the installed libraries"


def verdicts_of(context: Context, findings: Iterable[Findings]) -> list[Verdict]:
    """Return the verdicts, gravest first; a single ``abi.ok`` when there is nothing to complain about."""
    findings = list(findings)
    verdicts = [_unreadable(context, f) for f in findings if f.error]
    verdicts += _undefined(context, findings)
    verdicts += _libraries(context, findings)
    verdicts += _broken(context, findings)
    verdicts += _versions(context, findings)
    verdicts += _layouts(context, findings)
    if not any(v.status == "fail" for v in verdicts):
        verdicts.append(_all_well(context))
    return verdicts


def _all_well(context: Context) -> Verdict:
    cuda = f" (CUDA {context.torch.cuda})" if context.torch and context.torch.cuda else ""
    torch = f" with {context.torch_label}{cuda}" if context.torch else ""
    return Verdict(
        "abi.ok",
        "pass",
        LAYER,
        "shared objects",
        f"{_count(context.judged, 'file')} of {context.files} would be loaded, and each finds its symbols and "
        f"libraries{torch}.",
        {
            "files": context.files,
            "judged": context.judged,
            "apart": context.apart,
            "driver": context.driver,
            "torch": context.torch.version if context.torch else None,
            "cuda": context.torch.cuda if context.torch else None,
            "python": "{}.{}".format(*context.python),
        },
    )


def _unreadable(context: Context, found: Findings) -> Verdict:
    return Verdict(
        "abi.unreadable_file",
        "fail",
        LAYER,
        context.owner(found.file),
        f"{found.file} cannot be read as a shared object: {found.error}.",
        {"file": found.file, "reason": found.error},
        f"Install {context.owner(found.file)} again from its locked wheel.",
    )


# -- undefined symbols


def describe_symbol(context: Context, mangled: str, version: str = "", provider: str = "") -> dict[str, Any]:
    """Return the evidence for one missing symbol: names, the nearest export, where they differ, who has it."""
    name = demangle(mangled)
    nearest_mangled = context.nearest(mangled) if mangled.startswith("_Z") else None
    nearest = demangle(nearest_mangled) if nearest_mangled else None
    return {
        "mangled": mangled,
        "demangled": name,
        "version": version or None,
        "provider": provider or None,
        "nearest": nearest,
        "nearest_mangled": nearest_mangled,
        "differs": differing(split_signature(name), split_signature(nearest)) if nearest else [],
        "satisfied_by": context.index.releases_with([mangled]) if context.index else [],
    }


def _undefined(context: Context, findings: Sequence[Findings]) -> list[Verdict]:
    verdicts = []
    for found in sorted(findings, key=lambda f: (-len(f.undefined), f.file)):
        python = [s for s in found.undefined if s.name.startswith((b"Py", b"_Py")) and not s.version]
        others = [s for s in found.undefined if s not in python]
        if others:
            verdicts.append(_undefined_verdict(context, found, others, findings))
        if python:
            verdicts.append(_python_verdict(context, found, python))
    return verdicts


def _undefined_verdict(
    context: Context, found: Findings, symbols: Sequence[Symbol], findings: Sequence[Findings]
) -> Verdict:
    described = [
        describe_symbol(
            context,
            os.fsdecode(s.name),
            os.fsdecode(s.version.name) if s.version else "",
            os.fsdecode(s.version.file) if s.version else "",
        )
        for s in symbols[:MAX_SYMBOLS]
    ]
    described.sort(key=_plainness)
    releases = _releases(context, found, findings)
    owner = context.owner(found.file)
    return Verdict(
        "abi.undefined_symbol",
        "fail",
        LAYER,
        owner,
        undefined_sentence(context, found.file, described, len(symbols), releases),
        {
            "file": found.file,
            "count": len(symbols),
            "symbols": described,
            "satisfied_by": releases,
            "torch": context.torch.version if context.torch else None,
        },
        undefined_action(context, owner, releases),
    )


def _plainness(described: dict[str, Any]) -> tuple[bool, bool, int, int, str]:
    """Return the sort key that puts the easiest symbol to explain first: one parameter of another type."""
    resized = sum(1 for d in described["differs"] if d["has"] is None or d["wanted"] is None)
    return (
        described["nearest"] is None,
        not described["differs"],
        resized,
        len(described["differs"]),
        described["demangled"],
    )


def _releases(context: Context, found: Findings, findings: Sequence[Findings]) -> list[str]:
    """Return the torch releases that export all that a file's distribution wants of torch.

    Where no release does (its files were built for different ones), those that have all this file wants. Of these, the
    ones with the CUDA major version that the distribution's libraries are for, if there are any.
    """
    if context.index is None:
        return []
    owner = context.owner(found.file)
    members = [f for f in findings if context.owner(f.file) == owner]
    releases = _with_all(context.index, members) or _with_all(context.index, [found])
    majors = {m for f in members for name in f.missing if (m := library_major(name))}
    if not majors and context.torch and context.torch.cuda:
        majors = {context.torch.cuda.split(".")[0]}
    return [r for r in releases if context.index.cuda_of(r).split(".")[0] in majors] or releases


def _with_all(index: ExportIndex, members: Iterable[Findings]) -> list[str]:
    names = {
        n for f in members for n in (*f.torch_symbols, *(os.fsdecode(s.name) for s in f.undefined if not s.version))
    }
    return index.releases_with(names)


def undefined_sentence(
    context: Context, file: str, described: Sequence[dict[str, Any]], count: int, releases: Sequence[str]
) -> str:
    """Return the plain sentence for the missing symbols of one file."""
    first = described[0]
    wanted = first["demangled"] + (f" (version {first['version']})" if first["version"] else "")
    text = f"{file} needs {short(wanted)}, but "
    if first["nearest"]:
        signature = split_signature(first["nearest"])
        text += f"{context.torch_label} has it as {short(_parameters(signature))}"
        if signature.qualified != split_signature(first["demangled"]).qualified:
            text = text.replace(" has it as ", f" has only {short(signature.qualified)}", 1)
        text += _differences(first["differs"])
    elif first["provider"]:
        text += f"the {first['provider']} it would load does not define it"
    else:
        text += f"neither {context.torch_label} nor another library it loads has it"
    if count > 1:
        text += f"; {_count(count - 1, 'more symbol')} {'is' if count == 2 else 'are'} missing"
    if releases:
        have = "has" if len(releases) == 1 else "have"
        what = "the wanted one" if count == 1 else "all of them"
        text += f"; torch {_listing(releases)} {have} {what}"
        if context.torch and context.torch.public in releases:
            text += ", so this one is another build of it, or was changed"
    return text + "."


def _parameters(signature: Signature) -> str:
    return f"({', '.join(signature.parameters or ())}){signature.suffix}"


def short(name: str) -> str:
    """Return a C++ name with the long form of the standard string written as people say it."""
    return name.replace(
        "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >", "std::__cxx11::string"
    )


def _differences(differs: Sequence[dict[str, Any]]) -> str:
    parts = []
    for difference in differs[:3]:
        position = difference["position"]
        wanted, has = (difference[key] and short(difference[key]) for key in ("wanted", "has"))
        if has is None:
            parts.append(f"without parameter {position}, {wanted}")
        elif wanted is None:
            parts.append(f"with a parameter {position} more, {has}")
        else:
            parts.append(f"parameter {position} is {has} instead of {wanted}")
    return f": {', '.join(parts)}" if parts else ""


def undefined_action(context: Context, owner: str, releases: Sequence[str]) -> str:
    """Return the next step for missing symbols."""
    name = owner.split(" ")[0]
    if context.torch is None:
        return f"Install what {owner} was built against."
    if context.torch.public in releases:
        # A build without CUDA, one's own build, or files that something wrote into the environment.
        return f"Install torch {context.torch.public} again, the build that {owner} was compiled for."
    if releases:
        return f"Use torch {releases[-1]}, or a {name} built for {context.torch_label}."
    return f"Use the torch release that {owner} was built for, or a {name} built for {context.torch_label}."


def _python_verdict(context: Context, found: Findings, symbols: Sequence[Symbol]) -> Verdict:
    names = sorted(os.fsdecode(s.name) for s in symbols)
    python = "{}.{}".format(*context.python)
    return Verdict(
        "abi.python_abi",
        "fail",
        LAYER,
        context.owner(found.file),
        f"{found.file} needs {names[0]}, which Python {python} does not have"
        + (f"; {_count(len(names) - 1, 'more symbol')} of Python missing." if len(names) > 1 else "."),
        {"file": found.file, "count": len(names), "symbols": names[:MAX_SYMBOLS], "python": python},
        f"Use a build of {context.owner(found.file)} for Python {python}.",
    )


# -- libraries


def _libraries(context: Context, findings: Sequence[Findings]) -> list[Verdict]:
    wanted: dict[str, list[Findings]] = {}
    for found in findings:
        for name in found.missing:
            wanted.setdefault(name, []).append(found)
    other_major: dict[str, dict[str, list[Findings]]] = {}
    verdicts = []
    for name, users in sorted(wanted.items()):
        torch_major = context.torch.cuda.split(".")[0] if context.torch and context.torch.cuda else ""
        major = library_major(name)
        if torch_major and major and major != torch_major:
            other_major.setdefault(major, {})[name] = users
            continue
        verdicts.append(_missing_verdict(context, name, users))
    for major, libraries in sorted(other_major.items()):
        verdicts.insert(0, _cuda_verdict(context, major, libraries))
    return verdicts + _borrowed(context, findings)


def library_major(name: str) -> str:
    """Return the CUDA major version that a library's name belongs to; "" when it does not tell.

    cufft and cusolver keep their own numbers: libcufft.so.11 and libcusolver.so.11 are of CUDA 12, libcufft.so.12 and
    libcusolver.so.12 of CUDA 13. libcusparse.so.12 is of both, libcurand.so.10 and libcufile.so.0 of many.
    """
    match = SONAME.match(name)
    if match is None or match.group("base") not in CUDA_LIBRARIES:
        return ""
    base, number = match.group("base"), match.group("number") or ""
    if base in ("cufft", "cusolver", "cusolverMg"):
        return {"11": "12", "12": "13"}.get(number, "")
    return "" if base in ("curand", "cufile", "cusparse", "nvToolsExt") else number


def _missing_verdict(context: Context, name: str, users: Sequence[Findings]) -> Verdict:
    symbols = sum(len(f.blamed.get(name, ())) for f in users)
    files = [f.file for f in users]
    more = f" and {_count(len(files) - 1, 'other file')}" if len(files) > 1 else ""
    verb = "need" if more else "needs"
    return Verdict(
        "abi.missing_library",
        "fail",
        LAYER,
        context.owner(files[0]),
        f"{files[0]}{more} {verb} {name}, which is neither in the environment nor on the node.",
        {"library": name, "files": files, "symbols": symbols},
        f"Install the package that brings {name}, or remove {context.owner(files[0])} from the profile.",
    )


def _cuda_verdict(context: Context, major: str, libraries: dict[str, list[Findings]]) -> Verdict:
    files = sorted({f.file for users in libraries.values() for f in users})
    names = sorted(libraries)
    more = f" and {_count(len(files) - 1, 'other file')}" if len(files) > 1 else ""
    verb = "were" if more else "was"
    assert context.torch is not None  # noqa: S101 - the caller asked for torch's CUDA version
    owner = context.owner(files[0])
    return Verdict(
        "abi.cuda_major",
        "fail",
        LAYER,
        owner,
        f"{files[0]}{more} {verb} built for CUDA {major} ({', '.join(names)}), but {context.torch_label} brings CUDA "
        f"{context.torch.cuda}.",
        {
            "libraries": names,
            "files": files,
            "wanted_major": major,
            "torch_cuda": context.torch.cuda,
            "symbols": sum(len(f.blamed.get(n, ())) for n, users in libraries.items() for f in users),
        },
        f"Use a {owner.split(' ')[0]} built for CUDA {context.torch.cuda.split('.')[0]}, or a torch for CUDA {major}.",
    )


def _borrowed(context: Context, findings: Sequence[Findings]) -> list[Verdict]:
    """Warn of libraries that are in the environment but not where the loader looks.

    torch and the nvidia packages are left out, because torch/__init__.py preloads those by path; and so are
    files of one distribution, which knows what it loads first.
    """
    users: dict[tuple[str, str], list[str]] = {}
    for found in findings:
        if not found.file.startswith(("torch/", "nvidia/")):
            for name, path in found.borrowed.items():
                if context.owner(found.file) == context.owner(path):
                    continue
                users.setdefault((name, path), []).append(found.file)
    return [
        Verdict(
            "abi.missing_library",
            "warn",
            LAYER,
            context.owner(files[0]),
            f"{files[0]} needs {name}, which lies at {path}, where the loader does not look; it loads only if "
            "another package has loaded that file before.",
            {"library": name, "files": files, "present_at": path},
            "Nothing, if the import check passes.",
        )
        for (name, path), files in sorted(users.items())
    ]


def _broken(context: Context, findings: Sequence[Findings]) -> list[Verdict]:
    users: dict[tuple[str, str], list[str]] = {}
    for found in findings:
        for name, reason in found.broken.items():
            users.setdefault((name, reason), []).append(found.file)
    return [
        Verdict(
            "abi.unreadable_file",
            "fail",
            LAYER,
            context.owner(files[0]),
            f"{files[0]} needs {name}, which cannot be read: {reason}.",
            {"library": name, "files": files, "reason": reason},
            "Install the package or system library that holds it again.",
        )
        for (name, reason), files in sorted(users.items())
    ]


# -- versions


def _versions(context: Context, findings: Sequence[Findings]) -> list[Verdict]:
    verdicts = []
    for found in findings:
        kinds: dict[str, list[tuple[str, str]]] = {}
        for version, provider in found.versions:
            if version.startswith("GLIBC_"):
                kinds.setdefault("abi.glibc_too_old", []).append((version, provider))
            elif version.startswith(("GLIBCXX_", "CXXABI_", "GCC_")):
                kinds.setdefault("abi.cxxabi", []).append((version, provider))
        for code, wanted in kinds.items():
            verdicts.append(_version_verdict(context, found, code, wanted))
    return verdicts


def version_key(version: str) -> tuple[int, ...]:
    """Return the numbers of a version name such as GLIBC_2.34, for comparing."""
    return tuple(int(n) for n in re.findall(r"\d+", version))


def _version_verdict(context: Context, found: Findings, code: str, wanted: Sequence[tuple[str, str]]) -> Verdict:
    names = sorted({version for version, _ in wanted}, key=version_key)
    provider = wanted[0][1]
    what = "the glibc at" if code == "abi.glibc_too_old" else "the C++ runtime at"
    if "/" not in provider:
        what = "the target with"
    action = (
        "Use a node with a newer glibc, or a build for an older one."
        if code == "abi.glibc_too_old"
        else f"Bring a newer {os.path.basename(provider)}, or use a build for an older compiler."
    )
    return Verdict(
        code,
        "fail",
        LAYER,
        context.owner(found.file),
        f"{found.file} needs {names[-1]}, which {what} {provider} does not have.",
        {"file": found.file, "versions": names, "provider": provider},
        action,
    )


# -- layouts


def _layouts(context: Context, findings: Sequence[Findings]) -> list[Verdict]:
    """Find files that resolve every symbol with a torch whose class layouts are not those they were compiled
    for.

    A file does not say which torch it was compiled for. Its distribution does, through all its files
    together: the releases that satisfy every one of them. When none of these is the torch at hand, and all of
    them lay out some type differently from it, then the files that do resolve (the loader will take them)
    were compiled for other layouts.
    """
    index, torch = context.index, context.torch
    if index is None or torch is None or not index.layout_of(torch.public):
        return []
    groups: dict[str, list[Findings]] = {}
    for found in findings:
        if (found.torch_symbols or found.undefined) and not found.file.startswith("torch/"):
            groups.setdefault(context.owner(found.file), []).append(found)
    verdicts: list[Verdict] = []
    for owner, members in sorted(groups.items()):
        names = {n for f in members for n in f.torch_symbols} | {
            os.fsdecode(s.name) for f in members for s in f.undefined
        }
        known = [n for n in names if index.knows(n)]
        releases = index.releases_with(known)
        if torch.public in releases or not releases:
            continue
        changed = _changed_types(index, torch.public, releases)
        suspects = [found for found in members if found.clean] if changed else []
        verdicts += [_layout_verdict(context, owner, found, releases, changed) for found in suspects]
    return verdicts


def _changed_types(index: ExportIndex, version: str, releases: Sequence[str]) -> dict[str, Any]:
    """Return the types whose size or alignment in ``version`` is that of none of the releases."""
    mine = index.layout_of(version)
    others = [index.layout_of(r) for r in releases]
    if not all(others):
        return {}
    return {
        name: {"has": size, "built_for": sorted({tuple(o[name]) for o in others if name in o})}
        for name, size in mine.items()
        if any(name in o for o in others) and all(o.get(name) != size for o in others)
    }


def _layout_verdict(
    context: Context, owner: str, found: Findings, releases: Sequence[str], changed: dict[str, Any]
) -> Verdict:
    name, sizes = sorted(changed.items())[0]
    return Verdict(
        "abi.layout_suspect",
        "fail",
        LAYER,
        owner,
        f"{found.file} finds all its symbols, but {owner} was built for torch {_listing(releases)}, where {name} has "
        f"{sizes['built_for'][0][0]} bytes; in {context.torch_label} it has {sizes['has'][0]}.",
        {"file": found.file, "built_for": list(releases), "types": changed},
        f"Use torch {releases[-1]}, or a {owner.split(' ')[0]} built for {context.torch_label}.",
    )


# -- words


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _listing(names: Sequence[str]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``, or ``a to z`` for more than four."""
    if len(names) > 4:
        return f"{names[0]} to {names[-1]}"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
