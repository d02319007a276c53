"""What the extensions in a wheel need, read once and kept by the wheel's sha256.

A wheel on disk or behind a URL is read in parts: its directory, and of each shared object the beginning, as far as the
symbol tables go. Where the tables are not at the beginning, that one member is read whole into a temporary file.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bedplate.node.abi.elf import STB_WEAK, ElfError, ElfFile
from bedplate.node.abi.installed import SHARED_OBJECT, is_module

from .elf_prefix import NeedMore, NotInFront, read_prefix
from .errors import BedplateError
from .files import replace_file, user_cache
from .range_reader import RemoteWheel

SCHEMA = 3
CACHE_VARIABLE = "BEDPLATE_CACHE"
FIRST_PIECE = 48 << 10  # compressed bytes of a member read first
MAX_PREFIX = 64 << 20  # bytes of a member inflated in search of its tables
MAX_MEMBER = 4 << 30
MAX_EXPORTS = 1 << 17


@dataclass
class FileNeeds:
    """What one shared object of a wheel needs.

    undefined: [name, version or "", library of the version or "", weak]; versions: [version, library]; exports: those
    names it exports that other members of the wheel want; how: ``prefix`` or ``whole``, or ``""`` with `error`;
    foreign: the error is that the file is for another word size, byte order or machine.
    """

    file: str
    machine: str = ""
    soname: str = ""
    needed: list[str] = field(default_factory=list)
    undefined: list[tuple[str, str, str, bool]] = field(default_factory=list)
    versions: list[tuple[str, str]] = field(default_factory=list)
    module: bool = False
    exports: list[str] = field(default_factory=list)
    how: str = ""
    error: str = ""
    foreign: bool = False


@dataclass
class WheelNeeds:
    """What a wheel needs and holds: its identity, its shared objects, and how much was read to know it."""

    wheel: str
    sha256: str
    size: int
    requires: list[str]
    files: list[FileNeeds]
    bytes_read: int

    def to_json(self) -> str:
        """Return the text of the cache file."""
        return json.dumps(
            {"schema": SCHEMA, **vars(self), "files": [vars(f) for f in self.files]}, separators=(",", ":")
        )

    @classmethod
    def from_json(cls, text: str) -> WheelNeeds:
        """Return what `to_json` wrote. Errors: ValueError, KeyError, TypeError for another shape or schema."""
        data: dict[str, Any] = json.loads(text)
        if data.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        files = [FileNeeds(**entry) for entry in data.pop("files")]
        for entry in files:
            entry.undefined = [(n, v, f, w) for n, v, f, w in entry.undefined]
            entry.versions = [(v, f) for v, f in entry.versions]
        return cls(files=files, **data)


def cache_directory() -> Path:
    """Return where needs are kept: $BEDPLATE_CACHE/abi, else the user's cache directory."""
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache()) / "abi"


def cached_needs(sha256: str) -> WheelNeeds | None:
    """Return the kept needs of a wheel, with `bytes_read` 0; None when there are none or they cannot be read."""
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        return None
    try:
        needs = WheelNeeds.from_json((cache_directory() / f"{sha256}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, cut, or of another version: it is read anew
    needs.bytes_read = 0
    return needs


def keep_needs(needs: WheelNeeds) -> None:
    """Keep the needs of a wheel for the next time; a cache that cannot be written is no failure."""
    with suppress(OSError):
        replace_file(cache_directory() / f"{needs.sha256}.json", needs.to_json())


def read_needs(wheel: RemoteWheel, name: str, sha256: str, *, libraries: bool = True) -> WheelNeeds:
    """Read the needs of a wheel.

    Args: name: its file name; sha256: its digest, "" when unknown; libraries: False lists the shared objects without
    reading them (for wheels that carry libraries only, such as CUDA's).
    Errors: RangeError, BedplateError. A member that is not a readable ELF file is recorded with its error.
    """
    before = wheel.source.bytes_read
    members = [m for m in wheel.members if SHARED_OBJECT.search(m) and "/__pycache__/" not in m]
    opened: list[tuple[FileNeeds, ElfFile | None]] = []
    known: dict[tuple[int, int], tuple[FileNeeds, ElfFile | None]] = {}
    with tempfile.TemporaryDirectory(prefix="bedplate-abi-") as place:
        for at, member in enumerate(sorted(members)):
            if not libraries:
                opened.append((FileNeeds(member), None))
                continue
            info = wheel.members[member]
            content = (info.CRC, info.file_size)
            if content in known:  # a wheel has no links: libfoo.so and libfoo.so.1 are the same bytes twice
                needs, elf = known[content]
                opened.append((replace(needs, file=member), elf))
                continue
            try:
                opened.append(_read_member(wheel, member, Path(place) / str(at)))
            except ElfError as error:
                opened.append((FileNeeds(member, error=str(error), foreign=error.foreign), None))
            known[content] = opened[-1]
        _fill_exports(opened)
    return WheelNeeds(
        wheel=name,
        sha256=sha256,
        size=wheel.source.size,
        requires=_requirements(wheel),
        files=[needs for needs, _ in opened],
        bytes_read=wheel.source.bytes_read - before,
    )


def needs_of_file(path: Path) -> FileNeeds:
    """Return the needs of one shared object on disk. Errors: BedplateError when it cannot be read."""
    try:
        elf = ElfFile.open(str(path))
        return _summary(elf, path.name, elf.needed, "whole")
    except (ElfError, OSError) as error:
        raise BedplateError(f"{path} cannot be read as a shared object: {error}") from error


def _read_member(wheel: RemoteWheel, member: str, place: Path) -> tuple[FileNeeds, ElfFile]:
    """Read one member from its beginning, or whole where that does not do."""
    if wheel.members[member].file_size > MAX_MEMBER:
        raise ElfError(f"{wheel.members[member].file_size} bytes are more than this reader takes")
    data = bytearray()
    wanted = 4096
    pieces = wheel.inflate(member, chunk=FIRST_PIECE)
    for piece in pieces:
        data += piece
        if len(data) < wanted:
            continue
        try:
            elf, libraries = read_prefix(bytes(data))
        except NeedMore as more:
            wanted = more.size
            if wanted > MAX_PREFIX:
                break
            continue
        except NotInFront:
            break
        return _summary(elf, member, libraries, "prefix"), elf
    with place.open("wb") as file:
        file.write(data)
        for piece in pieces:
            file.write(piece)
    elf = ElfFile.open(str(place))
    place.unlink()  # the mapping keeps the content
    return _summary(elf, member, elf.needed, "whole"), elf


def _summary(elf: ElfFile, member: str, libraries: list[str], how: str) -> FileNeeds:
    versions = elf.needed_versions()
    soname = elf.soname or ""
    if how == "prefix":
        # Among the names found in the strings, the one the file is called after is its SONAME.
        own = os.path.basename(member)
        soname = next((n for n in libraries if own.startswith(n) or n.startswith(own)), "")
        # A bundled libz.1a2b3c4d.so.1 still has the SONAME libz.so.1 in its strings.
        soname = soname or next((n for n in libraries if own.split(".")[0] == n.split(".")[0]), "")
        libraries = [name for name in libraries if name != soname]
        missing = [os.fsdecode(v.file) for v in versions if os.fsdecode(v.file) not in libraries]
        libraries += dict.fromkeys(missing)
    return FileNeeds(
        file=member,
        machine=elf.machine,
        soname=soname,
        needed=libraries,
        undefined=[
            (
                os.fsdecode(s.name),
                os.fsdecode(s.version.name) if s.version else "",
                os.fsdecode(s.version.file) if s.version else "",
                s.bind == STB_WEAK,
            )
            for s in elf.undefined()
        ],
        versions=[(os.fsdecode(v.name), os.fsdecode(v.file)) for v in versions if not v.weak],
        module=is_module(elf, member),
        how=how,
    )


def _fill_exports(opened: Iterable[tuple[FileNeeds, ElfFile | None]]) -> None:
    """Record which names each member exports that another one wants."""
    opened = list(opened)
    wanted = {name for needs, _ in opened for name, version, _, weak in needs.undefined if not version and not weak}
    if len(opened) < 2 or len(wanted) > MAX_EXPORTS:
        return
    for needs, elf in opened:
        if elf is not None:
            own = {name for name, _, _, _ in needs.undefined}
            with suppress(ElfError):
                needs.exports = sorted(n for n in wanted - own if elf.lookup(os.fsencode(n)))


def _requirements(wheel: RemoteWheel) -> list[str]:
    """Return the Requires-Dist lines of the wheel's metadata."""
    for member in wheel.members:
        if re.fullmatch(r"[^/]+\.dist-info/METADATA", member):
            with suppress(BedplateError):
                text = wheel.read(member, 4 << 20).decode("utf-8", "replace")
                head = text.partition("\n\n")[0]
                return [line[15:].strip() for line in head.splitlines() if line.startswith("Requires-Dist: ")]
    return []
