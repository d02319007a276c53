"""The index of torch releases: which release exports which symbol, and how its classes are laid out.

One file holds many releases. It is xz-compressed; inside, a JSON header on one line and then the exported
names. Releases share most names, so the names are stored once, sorted, grouped by their *class*: the exact
set of (release, library) pairs that export them. Layout, after the header line::

class 0 names, each ended by a newline, front-coded: one byte 0x20 + number of characters shared with the name
before (at most 90), then the rest; an empty line ends the class; class 1 names ...

Header keys: ``schema`` (1), ``machine``, ``libraries`` (list of names), ``releases`` (list of dicts, oldest
first: ``version``, ``cuda``, ``glibc``, ``wheels`` [{file, sha256, size}], ``needed``, ``provides``,
``layout``), ``classes`` (list; each is a list of [library, bit mask of releases] pairs, the mask in
hexadecimal).
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1
MAX_INDEX_BYTES = 256 << 20  # decompressed; forty releases take about 40 MB
_BASE = 0x20
_LONGEST = 90


class IndexFormatError(ValueError):
    """The file is not an index of torch exports that this version reads."""


@dataclass
class Release:
    """One torch release of the index.

    version: public version; cuda: of the wheel, "" for a CPU build; glibc: newest GLIBC_ version its
    libraries need, such as "2.28"; wheels: dicts with file, sha256, size (bytes); needed: library names its
    libraries need from outside; provides: names of the libraries it carries; layout: type -> [size,
    alignment] in bytes.
    """

    version: str
    cuda: str = ""
    glibc: str = ""
    wheels: list[dict[str, Any]] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)
    provides: list[str] = field(default_factory=list)
    layout: dict[str, list[int]] = field(default_factory=dict)


class TorchIndex:
    """The index in memory. ``TorchIndex.load(path)`` reads a file, ``TorchIndex()`` is empty."""

    def __init__(self, machine: str = "x86_64") -> None:
        """Start an empty index for one machine."""
        self.machine = machine
        self.releases: list[Release] = []
        self.libraries: list[str] = []
        self._classes: list[tuple[tuple[int, int], ...]] = []
        self._class_of: dict[str, int] = {}
        self._masks: list[int] = []

    @classmethod
    def load(cls, path: str) -> TorchIndex:
        """Read an index file.

        Errors: OSError, IndexFormatError for anything that is not an index (wrong compression, wrong schema,
        cut).
        """
        with open(path, "rb") as file:
            return cls.parse(file.read())

    @classmethod
    def parse(cls, data: bytes) -> TorchIndex:
        """Read an index from its bytes. Errors: IndexFormatError."""
        try:
            decompressor = lzma.LZMADecompressor()
            raw = decompressor.decompress(data, MAX_INDEX_BYTES)
            if not decompressor.eof:
                raise IndexFormatError("the index is cut or larger than it may be")
            head, _, body = raw.partition(b"\n")
            header = json.loads(head)
            if header["schema"] != SCHEMA:
                raise IndexFormatError(f"the index has schema {header['schema']}, this Bedplate reads {SCHEMA}")
            index = cls(header["machine"])
            index.releases = [Release(**release) for release in header["releases"]]
            index.libraries = header["libraries"]
            index._classes = [tuple((int(n), int(m, 16)) for n, m in pairs) for pairs in header["classes"]]
            index._class_of = _decode(body.decode("ascii"), len(index._classes))
        except (lzma.LZMAError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, IndexFormatError):
                raise
            raise IndexFormatError(f"not an index of torch exports: {error}") from error
        index._masks = [_union(pairs) for pairs in index._classes]
        return index

    def dump(self) -> bytes:
        """Return the bytes of the index file; equal for equal content."""
        order = sorted(range(len(self._classes)), key=lambda c: self._classes[c])
        names: list[list[str]] = [[] for _ in self._classes]
        for name, number in self._class_of.items():
            names[number].append(name)
        order = [c for c in order if names[c]]
        header = {
            "schema": SCHEMA,
            "machine": self.machine,
            "libraries": self.libraries,
            "releases": [vars(release) for release in self.releases],
            "classes": [[[library, f"{mask:x}"] for library, mask in self._classes[c]] for c in order],
        }
        body = "".join(_encode(sorted(names[c])) for c in order)
        text = json.dumps(header, sort_keys=True, separators=(",", ":")) + "\n" + body
        filters = [
            {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 64 << 20, "lc": 4, "pb": 0}
        ]
        return lzma.compress(text.encode("ascii"), lzma.FORMAT_XZ, filters=filters)

    # -- questions

    def versions(self) -> list[str]:
        """Return the release versions, oldest first."""
        return [release.version for release in self.releases]

    def release(self, version: str) -> Release | None:
        """Return one release by its public version, or None."""
        return next((r for r in self.releases if r.version == version), None)

    def knows(self, name: str) -> bool:
        """Tell whether any release exports ``name``."""
        return name in self._class_of

    def mask_of(self, name: str) -> int:
        """Return the bit mask of the releases that export ``name``; bit 0 is the oldest."""
        number = self._class_of.get(name)
        return 0 if number is None else self._masks[number]

    def releases_with(self, names: Iterable[str]) -> list[str]:
        """Return the releases, oldest first, that export all ``names``."""
        mask = (1 << len(self.releases)) - 1
        for name in names:
            mask &= self.mask_of(name)
        return [r.version for bit, r in enumerate(self.releases) if mask >> bit & 1]

    def library_of(self, name: str, version: str) -> str | None:
        """Return the library of a release that exports ``name``, or None."""
        number = self._class_of.get(name)
        bit = self.versions().index(version)
        pairs = self._classes[number] if number is not None else ()
        return next((self.libraries[library] for library, mask in pairs if mask >> bit & 1), None)

    def exports(self, version: str) -> list[str]:
        """Return all names a release exports, sorted."""
        bit = self.versions().index(version)
        wanted = [mask >> bit & 1 for mask in self._masks]
        return sorted(name for name, number in self._class_of.items() if wanted[number])

    def exports_by_library(self, version: str) -> dict[str, list[str]]:
        """Return the names a release exports by the library that has them, as `add` takes them."""
        exports: dict[str, list[str]] = {}
        for name in self.exports(version):
            exports.setdefault(self.library_of(name, version) or "", []).append(name)
        return exports

    def names(self) -> Iterable[str]:
        """Return all names of the index."""
        return self._class_of.keys()

    def cuda_of(self, version: str) -> str:
        """Return the CUDA version of a release; "" when it is unknown or has none."""
        release = self.release(version)
        return release.cuda if release else ""

    def layout_of(self, version: str) -> dict[str, list[int]]:
        """Return type -> [size, alignment] in bytes of a release; empty when it is unknown."""
        release = self.release(version)
        return release.layout if release else {}

    # -- building

    def add(self, release: Release, exports: dict[str, list[str]]) -> None:
        """Add a release, or replace the one of the same version.

        Args: exports: library name -> exported names. Names that are not ASCII are left out: no compiler
        makes them.
        """
        from_name: dict[str, dict[int, int]] = {}
        keep = [r for r in self.releases if r.version != release.version]
        order = sorted([*keep, release], key=lambda r: version_key(r.version))
        moved = {old: order.index(r) for old, r in enumerate(self.releases) if r.version != release.version}
        for name, number in self._class_of.items():
            pairs: dict[int, int] = {}
            for library, mask in self._classes[number]:
                new = sum(1 << to for old, to in moved.items() if mask >> old & 1)
                if new:
                    pairs[library] = new
            if pairs:
                from_name[name] = pairs
        bit = 1 << order.index(release)
        for file, symbols in sorted(exports.items()):
            if file not in self.libraries:
                self.libraries.append(file)
            at = self.libraries.index(file)
            for name in symbols:
                if name.isascii() and name.isprintable():
                    pairs = from_name.setdefault(name, {})
                    pairs[at] = pairs.get(at, 0) | bit
        numbers: dict[tuple[tuple[int, int], ...], int] = {}
        self._class_of = {}
        for name, pairs in from_name.items():
            key = tuple(sorted(pairs.items()))
            self._class_of[name] = numbers.setdefault(key, len(numbers))
        self._classes = list(numbers)
        self._masks = [_union(pairs) for pairs in self._classes]
        self.releases = order


def version_key(version: str) -> tuple[int, ...]:
    """Return the sort key of a release version: its leading numbers."""
    parts = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        parts.append(int(digits) if digits else 0)
    return tuple(parts)


def _union(pairs: tuple[tuple[int, int], ...]) -> int:
    mask = 0
    for _, part in pairs:
        mask |= part
    return mask


def _encode(names: list[str]) -> str:
    lines = []
    before = ""
    for name in names:
        shared = 0
        limit = min(len(before), len(name), _LONGEST)
        while shared < limit and before[shared] == name[shared]:
            shared += 1
        lines.append(chr(_BASE + shared) + name[shared:] + "\n")
        before = name
    return "".join(lines) + "\n"


def _decode(text: str, classes: int) -> dict[str, int]:
    found: dict[str, int] = {}
    number = 0
    before = ""
    for line in text.split("\n")[:-1]:
        if not line:
            number += 1
            before = ""
            continue
        before = before[: ord(line[0]) - _BASE] + line[1:]
        found[before] = number
    if number != classes:
        raise IndexFormatError(f"the index holds {number} groups of names instead of {classes}")
    return found
