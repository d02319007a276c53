"""`check` of whatever is given: a profile's lock, an environment on this machine, or wheels, through one engine."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name
from packaging.version import Version

from bedplate.node.abi.exports import IndexFormatError, Release, TorchIndex
from bedplate.node.abi.installed import shared_objects, site_packages_of
from bedplate.node.verdicts import Verdict

from .abi_engine import Engine, Extension, Setting, WheelReport
from .abi_index import load_index, read_torch_wheel
from .abi_sources import Looked, at_hand, from_file, from_lock
from .errors import BedplateError
from .files import replace_file, sha256_of
from .needs import cache_directory
from .range_reader import RangeError

if TYPE_CHECKING:
    from .profiles import Profile
    from .schema import LockedFile

BIG_WHEEL = 300 << 20  # bytes; a torch wheel larger than this is read only when the index does not know its version


def check_lock(
    profile: Profile,
    target: str,
    *,
    find_links: Sequence[Path] = (),
    index_url: str | None = "",
    engine: Engine | None = None,
) -> list[Verdict]:
    """Return the ABI verdicts on the locked wheels of one target, before any node is touched.

    The needs of each wheel are read from `find_links`, or by HTTP range from its package index, once; later calls find
    them in the cache. A wheel that cannot be had gives one inconclusive verdict, not an error. Who checks several
    targets gives them one engine, which remembers what it was asked. index_url: as for `from_lock`.

    Errors: BedplateError for a lock that may not be used, or a missing index of torch releases.
    """
    return lock_report(profile, target, find_links=find_links, index_url=index_url, engine=engine)[0].verdicts


def lock_report(
    profile: Profile,
    target: str,
    *,
    find_links: Sequence[Path] = (),
    index_url: str | None = "",
    engine: Engine | None = None,
) -> tuple[WheelReport, list[Looked]]:
    """Return the whole report of `check_lock`, and what was read for it."""
    locked = profile.target_lock(target)
    stack = profile.data.stack
    torch = next((f for f in locked.files if canonicalize_name(f.name) == "torch"), None)
    engine = engine or Engine(load_index())
    if torch is None:
        return WheelReport(
            [_skipped(profile.name, "the profile has no torch: nothing to hold the wheels against")], []
        ), []
    machine = target.partition("-")[2]
    if machine != engine.index.machine:
        reason = f"the index of torch releases is of {engine.index.machine}, and the target is {machine}"
        return WheelReport([_inconclusive(profile.name, reason)], []), []
    indexes: dict[str, str] = {canonicalize_name(name): entry.url for entry in stack.indexes for name in entry.packages}
    try:
        release, cuda, index = _torch_of(torch, engine.index, find_links)
        extensions, looked = from_lock(locked.files, find_links=find_links, indexes=indexes, index_url=index_url)
    except (RangeError, BedplateError) as error:
        return WheelReport([_inconclusive(profile.name, str(error))], []), []
    python = (int(target[2]), int(target[3:].split("-")[0]))
    arch = re.search(r"\d+", profile.data.expect.arch or "")
    setting = Setting(
        release,
        cuda,
        python=python,
        arch=int(arch.group()) if arch else None,
        glibc=stack.glibc,
        libraries=_file_names(extensions),
    )
    if index is not engine.index:
        engine = Engine(index)
    return engine.check([e for e in extensions if _carries_extensions(e)], setting), looked


def check_wheels(
    paths: Sequence[Path], torch_version: str = "", get_index: Callable[[], TorchIndex] = load_index
) -> tuple[WheelReport, list[Looked]]:
    """Return the verdicts on wheels on disk together.

    Args: torch_version: a release of the index to hold them against; not needed when a torch wheel is among them;
    get_index: returns the index of torch releases.
    A torch wheel is read, unless the index was built from that very file.
    Errors: BedplateError when there is no torch to hold them against, or a file is not a readable wheel.
    """
    index = get_index()
    torch = next((p for p in paths if p.name.startswith("torch-")), None)
    if torch is None and not torch_version:
        raise BedplateError("no torch among the wheels: add its wheel, or say which release with --torch VERSION")
    extensions, looked = [], []
    for path in paths:
        if path != torch:
            extension, seen = from_file(path)
            extensions.append(extension)
            looked.append(seen)
    if torch is not None:
        release = _release_of_file(torch, index)
        if release is None:
            release, exports = read_torch_wheel(torch, layout=False)
            index = copy.copy(index)  # the caller may use it for other things too
            index.add(release, exports)
    else:
        release = index.release(torch_version)
        if release is None:
            raise BedplateError(f"the index has no torch {torch_version}; it has {', '.join(index.versions())}")
    return Engine(index).check(extensions, Setting(release, release.cuda)), looked


def check_directory(
    path: Path, *, arch: int | None = None, get_index: Callable[[], TorchIndex] = load_index
) -> list[Verdict]:
    """Return the verdicts on an environment on this machine: a virtual environment, a generation, or site-packages.

    Errors: BedplateError when it is none.
    """
    from bedplate.node.abi.check import check_environment

    try:
        site = site_packages_of(str(path))
    except FileNotFoundError as error:
        if not shared_objects(str(path)):
            raise BedplateError(f"{path} is no Python environment: {error}") from error
        site = str(path)
    try:
        index: TorchIndex | None = get_index()
    except BedplateError:
        index = None  # the check stands without it; only "which release has it" is lost
    return check_environment(site, index=index, arch=arch).verdicts


def _release_of_file(wheel: Path, index: TorchIndex) -> Release | None:
    """Return the release that was built from this very file, or None. Only a file of such a size is hashed."""
    try:
        size = wheel.stat().st_size
        sizes = {w["size"] for release in index.releases for w in release.wheels}
        return _release_of(sha256_of(wheel), index) if size in sizes else None
    except OSError as error:
        raise BedplateError(f"{wheel} cannot be read as a wheel of torch: {error}") from error


def _release_of(sha256: str, index: TorchIndex) -> Release | None:
    return next((r for r in index.releases if any(w["sha256"] == sha256 for w in r.wheels)), None)


def _torch_of(locked: LockedFile, index: TorchIndex, find_links: Sequence[Path]) -> tuple[Release, str, TorchIndex]:
    """Return the release that stands for the locked torch, its CUDA version, and an index that has it.

    A file the index was built from stands for itself. Another one (a private build, a local version such as
    2.9.1+cu130) is read when it is at hand; else the release of the same public version stands for it, but only for
    builds with CUDA as the release is: a build for CPUs or for ROCm has other exports and other libraries.
    """
    version = Version(locked.version)
    known = _release_of(locked.sha256, index)
    if known is not None:
        return known, known.cuda, index
    kept = cache_directory() / f"{locked.sha256}.idx"
    private: TorchIndex | None = None
    if kept.is_file():
        try:
            private = TorchIndex.load(str(kept))
        except (OSError, IndexFormatError):
            private = None  # cut or of another version: it is made anew
    local = re.fullmatch(r"cu(\d+)(\d)", version.local or "")
    public = index.release(version.public) if local or not version.local else None
    limit = BIG_WHEEL if public else None
    place = at_hand(locked, find_links, limit) if private is None else None
    if place is not None:
        release, exports = read_torch_wheel(place, layout=False)
        private = TorchIndex()
        private.add(release, exports)
        with suppress(OSError):  # only a memory: without it the wheel is read again
            replace_file(kept, private.dump())
    if private is not None:
        release = private.releases[0]
        release.layout = public.layout if public else {}
        # The caller's index may serve other targets too, where the public release of this version stands for itself;
        # `add` changes nothing of it, but replaces what it changes in the copy.
        index = copy.copy(index)
        index.add(release, private.exports_by_library(release.version))
        return release, release.cuda, index
    if public is None:
        raise BedplateError(
            f"no release of the index stands for torch {locked.version} and {locked.file} is not at hand: give its "
            "directory with --find-links, or add it with `bedplate abi index add --private`"
        )
    return public, f"{local.group(1)}.{local.group(2)}" if local else public.cuda, index


def _file_names(extensions: Sequence[Extension]) -> set[str]:
    """Return the base names and SONAMEs of all shared objects in the wheels."""
    names = {file.file.rsplit("/", 1)[-1] for e in extensions for file in e.needs.files}
    return names | {file.soname for e in extensions for file in e.needs.files if file.soname}


def _carries_extensions(extension: Extension) -> bool:
    """Tell whether a wheel's shared objects were read; those of wheels with libraries only are listed by name."""
    return any(file.how or file.error for file in extension.needs.files)


def _inconclusive(subject: str, reason: str) -> Verdict:
    return Verdict(
        "abi.unreadable_file",
        "inconclusive",
        "stack",
        subject,
        f"The ABI of the lock was not checked: {reason.rstrip('.')}.",
        {"reason": reason},
        "Run it again where the wheels can be reached.",
    )


def _skipped(subject: str, reason: str) -> Verdict:
    return Verdict("abi.ok", "skipped", "stack", subject, f"Not checked: {reason}.", {"reason": reason})
