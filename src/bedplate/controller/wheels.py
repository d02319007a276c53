"""Which one wheel an installer takes on a target.

Both pip and uv rank the wheels of one version by the best of their tags (PEP 425, in the order of
`packaging.tags`), then by build number; this module does the same, for machines other than this one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import BuildTag, InvalidWheelFilename, parse_wheel_filename

from .errors import BedplateError

# The oldest glibc of any manylinux tag, and the older names of some (PEP 600).
_OLDEST_GLIBC = {"x86_64": 5, "aarch64": 17}
_LEGACY = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


@dataclass(frozen=True)
class Candidate:
    """A wheel on offer: file name, where it is, sha256 and size in bytes (None: the source does not tell)."""

    file: str
    url: str
    sha256: str | None
    size: int | None


def target_tags(target: str, glibc: str) -> list[Tag]:
    """Return the wheel tags that fit a target such as `cp312-x86_64` with that glibc (`2.34`), best first."""
    python, arch = target.split("-", 1)
    version = (int(python[2]), int(python[3:]))
    platforms = list(_platforms(int(glibc.split(".")[1]), arch))
    return [
        *cpython_tags(version, abis=[python], platforms=platforms),
        *compatible_tags(version, interpreter=python, platforms=platforms),
    ]


def choose(candidates: Iterable[Candidate], tags: Sequence[Tag], allowed: Sequence[str] | None) -> Candidate:
    """Return the wheel that an installer with *tags* takes; only those with a sha256 in *allowed*, if given.

    BedplateError (without the package's name) when none fits, none is allowed, or two different files are
    equally good: then the version alone does not say which file is meant.
    """
    rank = {tag: number for number, tag in enumerate(tags)}
    fitting = [(key, wheel) for wheel in candidates if (key := _key(wheel.file, rank)) is not None]
    if not fitting:
        raise BedplateError("no wheel fits")
    if allowed is not None:
        found = [f"{wheel.sha256} ({wheel.file})" for _, wheel in fitting]
        fitting = [(key, wheel) for key, wheel in fitting if wheel.sha256 in allowed]
        if not fitting:
            raise BedplateError(
                f"no file has an allowed sha256. Allowed: {', '.join(allowed)}. Found: {', '.join(found)}"
            )
    best = min(key for key, _ in fitting)
    equal = {wheel.sha256: wheel for key, wheel in fitting if key == best}
    if len(equal) > 1:
        files = ", ".join(f"{wheel.sha256} ({wheel.file})" for wheel in equal.values())
        raise BedplateError(f"{len(equal)} different files fit equally well: {files}. Allow one in `stack.hashes`")
    return next(iter(equal.values()))


def parse_file_name(file: str) -> tuple[BuildTag, frozenset[Tag]]:
    """Return build number and tags of a wheel by its file name; ValueError for text that is no such name.

    `parse_wheel_filename` alone takes any character after a build number, so a path as well.
    """
    if not re.fullmatch(r"[\w.+!-]+", file):
        raise ValueError(f"`{file}` is not the file name of a wheel: it may hold letters, digits and . _ + ! - only")
    try:
        _, _, build, tags = parse_wheel_filename(file)
    except InvalidWheelFilename as error:
        raise ValueError(f"`{file}` is not the file name of a wheel: {error}") from error
    return build, tags


def _platforms(glibc_minor: int, arch: str) -> Iterator[str]:
    for minor in range(glibc_minor, _OLDEST_GLIBC[arch] - 1, -1):
        yield f"manylinux_2_{minor}_{arch}"
        if minor in _LEGACY:
            yield f"{_LEGACY[minor]}_{arch}"
    yield f"linux_{arch}"


def _key(file: str, rank: dict[Tag, int]) -> tuple[int, int, str] | None:
    """Return the sort key of a wheel, smallest is best; None when it does not fit."""
    try:
        build, tags = parse_file_name(file)
    except ValueError:
        return None
    best = min((rank[tag] for tag in tags if tag in rank), default=None)
    if best is None:
        return None
    # a higher build number is better: among equals the number counts first, then the text after it
    number, text = build if build else (-1, "")
    return best, -number, "".join(chr(0x10FFFF - ord(letter)) for letter in text)
