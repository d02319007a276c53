"""Where the wheels to be checked come from: files, requirements on a package index, the files of a lock."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from .abi_engine import Extension
from .errors import BedplateError
from .files import sha256_of
from .needs import WheelNeeds, cached_needs, keep_needs, read_needs
from .package_index import open_index
from .range_reader import LocalSource, RangeError, RemoteSource, RemoteWheel, Source
from .wheels import target_tags

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage, PyPISimple

    from .schema import LockedFile

# These carry CUDA's own libraries: what counts is which files they bring, not what those need.
LIBRARY_WHEELS = re.compile(r"(?:(?:nvidia|cuda)[-_](?!cutlass|cudnn[-_]frontend)[\w-]+|triton|torch)-\d")
GLIBC = "2.40"  # newest glibc whose wheels are considered for a requirement


@dataclass
class Looked:
    """One file that was looked at: which, how much was read of it, and how."""

    label: str
    file: str
    sha256: str
    size: int
    bytes_read: int
    how: str

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return dict(vars(self))


def label_of(file: str) -> str:
    """Return `name version` of a wheel by its file name. Errors: BedplateError when it is none."""
    try:
        name, version, _, _ = parse_wheel_filename(file)
    except InvalidWheelFilename as error:
        raise BedplateError(f"{file} is not a wheel by its name: {error}") from error
    return f"{name} {version}"


def from_file(path: Path) -> tuple[Extension, Looked]:
    """Return the needs of a wheel on disk. Errors: BedplateError when it cannot be read."""
    needs = _read_local(path, path.name, "")
    return Extension(label_of(path.name), needs), _looked(needs, path.name, "file")


def from_requirement(text: str, *, python: str = "", index_url: str = "") -> list[tuple[Extension, Looked]]:
    """Return every file of a requirement that fits, each judged by itself, the one installers prefer first.

    Args: text: `name==version`, or a name for its newest version; python: such as `3.12`, by default this one;
    index_url: of the package index.
    Errors: BedplateError when nothing fits or the index does not answer.
    """
    requirement = _requirement(text)
    number = python or "{}.{}".format(*sys.version_info[:2])
    if not re.fullmatch(r"3\.\d{1,2}", number):
        raise BedplateError(
            f"{number} is not a version of Python whose wheels can be looked for: write one such as 3.12"
        )
    ranks = {tag: rank for rank, tag in enumerate(target_tags(f"cp{number.replace('.', '')}-x86_64", GLIBC))}
    with open_index(index_url) as client:
        packages = client.get_project_page(requirement.name).packages
        fitting = _fitting(packages, requirement, ranks)
        if not fitting:
            known = sorted({p.version for p in packages if p.version}, key=_sort_key)[-5:]
            raise BedplateError(
                f"the package index has no wheel of {text} for Python {number} on x86_64"
                + (f"; its newest versions: {', '.join(known)}" if known else "")
            )
        return [_remote(client, package) for package in fitting]


def from_lock(
    files: Sequence[LockedFile],
    *,
    find_links: Sequence[Path] = (),
    indexes: dict[str, str] | None = None,
    index_url: str | None = "",
) -> tuple[list[Extension], list[Looked]]:
    """Return the needs of all locked wheels but torch's, from the cache, from directories, or by range.

    Args: indexes: package name -> URL of the index it comes from, for those of one of their own. index_url: where the
    others come from; empty means the default index, None that no index may be asked.
    Errors: BedplateError when a wheel is found nowhere.
    """
    extensions: list[Extension] = []
    looked: list[Looked] = []
    for locked in files:
        if locked.file.endswith("-none-any.whl") or canonicalize_name(locked.name) == "torch":
            continue
        label = f"{locked.name} {locked.version}"
        needs = cached_needs(locked.sha256)
        how = "cache"
        if needs is None:
            place = at_hand(locked, find_links)
            if place is not None:
                needs, how = _read_local(place, locked.file, locked.sha256), "file"
            elif index_url is None:
                raise BedplateError(f"{locked.file} is in none of the given directories, and no index may be asked")
            else:
                with open_index((indexes or {}).get(canonicalize_name(locked.name), index_url)) as client:
                    package = _find(client, locked)
                    extension, seen = _remote(client, package)
                needs, how = extension.needs, seen.how
        extensions.append(Extension(label, needs))
        looked.append(_looked(needs, label, how))
    return extensions, looked


def at_hand(locked: LockedFile, directories: Sequence[Path], limit: int | None = None) -> Path | None:
    """Return where a locked wheel lies in one of the directories, or None.

    Its sha256 must be the locked one: a file is not believed by its name. Args: limit: bytes; a longer file is passed
    over, because to read it all takes seconds.
    """
    for path in (directory / locked.file for directory in directories):
        with suppress(OSError):  # absent, or not for this user: the next place, or the index, may have it
            if (limit is None or path.stat().st_size < limit) and sha256_of(path) == locked.sha256:
                return path
    return None


def _requirement(text: str) -> Requirement:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise BedplateError(f"{text!r} is neither a wheel file nor a requirement such as sgl-kernel==0.3.21") from error
    if requirement.url:
        raise BedplateError(f"{text!r}: give a version, not a URL; wheels on disk are given by their path")
    return requirement


def _fitting(
    packages: Sequence[DistributionPackage], requirement: Requirement, ranks: dict[Tag, int]
) -> list[DistributionPackage]:
    """Return the wheels of the newest version the requirement allows that fit, best tag first, newest build first."""
    found: list[tuple[Version, tuple[int, int], DistributionPackage]] = []
    for package in packages:
        if package.package_type != "wheel" or package.is_yanked:
            continue
        try:
            _, version, build, tags = parse_wheel_filename(package.filename)
        except InvalidWheelFilename:
            continue
        fits = [ranks[tag] for tag in tags if tag in ranks]
        if fits and requirement.specifier.contains(version, prereleases=True if requirement.specifier else None):
            found.append((version, (min(fits), -(build[0] if build else -1)), package))
    if not found:
        return []
    newest = max(version for version, _, _ in found)
    return [p for v, _, p in sorted(found, key=lambda item: item[1]) if v == newest]


def _find(client: PyPISimple, locked: LockedFile) -> DistributionPackage:
    for package in client.get_project_page(locked.name).packages:
        if package.digests.get("sha256") == locked.sha256:
            return package
    raise BedplateError(
        f"{locked.file} (sha256 {locked.sha256[:12]}...) is not on the package index; "
        "give its directory with --find-links"
    )


def _remote(client: PyPISimple, package: DistributionPackage) -> tuple[Extension, Looked]:
    sha256 = package.digests.get("sha256", "")
    label = label_of(package.filename)
    needs = cached_needs(sha256)
    if needs is not None:
        return Extension(label, needs), _looked(needs, label, "cache")
    try:
        source = RemoteSource(package.url, package.size, client.s)
        needs = _read(source, package.filename, sha256)
        how = "range"
    except RangeError as error:
        if not error.unsupported:
            raise
        needs, how = _downloaded(client, package, sha256), "download"
    return Extension(label, needs), _looked(needs, label, how)


def _downloaded(client: PyPISimple, package: DistributionPackage, sha256: str) -> WheelNeeds:
    """Read a wheel from a server without ranges: the whole file, checked, once.

    Its needs are kept, the file is not.
    """
    import requests

    try:
        with tempfile.TemporaryDirectory(prefix="bedplate-abi-") as place:
            path = Path(place) / package.filename
            client.download_package(package, path, verify=bool(sha256))
            needs = _read_local(path, package.filename, sha256)
            needs.bytes_read = path.stat().st_size
            return needs
    except requests.RequestException:  # an OSError as well; `open_index` words it
        raise
    except OSError as fault:
        raise BedplateError(
            f"{package.filename}: cannot be kept in {tempfile.gettempdir()}: {fault.strerror or fault}. Make room "
            "there, or choose another place with TMPDIR"
        ) from fault


def _read_local(path: Path, file: str, sha256: str) -> WheelNeeds:
    try:
        with closing(LocalSource(path)) as source:
            return _read(source, file, sha256)
    except OSError as error:
        raise BedplateError(f"cannot read {path}: {error.strerror or error}") from error


def _read(source: Source, file: str, sha256: str) -> WheelNeeds:
    needs = read_needs(RemoteWheel(source), file, sha256, libraries=not LIBRARY_WHEELS.match(file))
    if sha256:
        keep_needs(needs)
    return needs


def _looked(needs: WheelNeeds, label: str, how: str) -> Looked:
    return Looked(label, needs.wheel, needs.sha256, needs.size, needs.bytes_read, how)


def _sort_key(text: str) -> Version:
    try:
        return Version(text)
    except ValueError:
        return Version("0")
