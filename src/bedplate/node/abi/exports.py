"""The index of torch releases: which release exports which symbol, and how its classes are laid out.

One file holds many releases. It is xz-compressed; inside, a JSON header on one line and then one line for each exported
name, sorted by their bytes: the name, a tab, and the hexadecimal number of its *class*, the exact set of (library,
releases) pairs that export it. Releases share most names, so there are many names and few classes, and the commonest
class has the smallest number. Nothing but the header is decoded when a file is read: a question about one name is a
bisection over the text.

Header keys: ``schema`` (2), ``machine``, ``libraries`` (list of names), ``releases`` (list of dicts, oldest
first: ``version``, ``cuda``, ``glibc``, ``wheels`` [{file, sha256, size}], ``needed``, ``provides``,
``layout``), ``classes`` (list; each is a list of [library, bit mask of releases] pairs, the mask in
hexadecimal).
"""

from __future__ import annotations

import json
import lzma
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 2
MAX_INDEX_BYTES = 256 << 20  # decompressed; the releases from 2.4 to 2.15 take 48 MB
_BLOCK = 1 << 14  # bytes of text searched for one name

Pairs = tuple[tuple[int, int], ...]  # a class: (library, bit mask of releases), by library


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
        self._set_names(b"\n", 0, [])

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
            end = raw.index(b"\n")
            header = json.loads(raw[:end])
            if header["schema"] != SCHEMA:
                raise IndexFormatError(f"the index has schema {header['schema']}, this Bedplate reads {SCHEMA}")
            index = cls(header["machine"])
            index.releases = [Release(**release) for release in header["releases"]]
            index.libraries = header["libraries"]
            index._set_names(raw, end, [tuple((int(n), int(m, 16)) for n, m in pairs) for pairs in header["classes"]])
        except (lzma.LZMAError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, IndexFormatError):
                raise
            raise IndexFormatError(f"not an index of torch exports: {error}") from error
        return index

    def dump(self) -> bytes:
        """Return the bytes of the index file; equal for equal content."""
        header = {
            "schema": SCHEMA,
            "machine": self.machine,
            "libraries": self.libraries,
            "releases": [vars(release) for release in self.releases],
            "classes": [[[library, f"{mask:x}"] for library, mask in pairs] for pairs in self._classes],
        }
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii") + self._text[self._start :]
        filters = [
            {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 64 << 20, "lc": 4, "pb": 0}
        ]
        return lzma.compress(text, lzma.FORMAT_XZ, filters=filters)

    def _set_names(self, text: bytes, start: int, classes: list[Pairs]) -> None:
        """Take the lines of names, which begin behind the newline at ``start``; remember every _BLOCK-th byte's line.

        Errors: ValueError when the last line has no end, or a line no tab.
        """
        if not text.endswith(b"\n"):
            raise ValueError("the last name does not end")
        self._text = text
        self._start = start
        self._classes = classes
        self._masks = [_union(pairs) for pairs in classes]
        self._asked: dict[str, int] = {}
        self._blocks: list[int] = []  # where the newline before a line is
        self._firsts: list[bytes] = []  # the name of that line
        at, last = start, len(text) - 1
        while 0 <= at < last:
            self._blocks.append(at)
            self._firsts.append(text[at + 1 : text.index(b"\t", at)])
            at = text.find(b"\n", at + _BLOCK)
        self._blocks.append(last)

    # -- questions

    def versions(self) -> list[str]:
        """Return the release versions, oldest first."""
        return [release.version for release in self.releases]

    def release(self, version: str) -> Release | None:
        """Return one release by its public version, or None."""
        return next((r for r in self.releases if r.version == version), None)

    def _class_of(self, name: str) -> int:
        """Return the number of a name's class, -1 when no release exports it.

        Errors: IndexFormatError when the index gives the name a class that it does not describe.
        """
        number = self._asked.get(name)
        if number is None:
            number = self._asked[name] = self._look_up(name)
        return number

    def _look_up(self, name: str) -> int:
        if not _is_plain(name):
            return -1
        key = name.encode("ascii")
        block = bisect_right(self._firsts, key) - 1
        if block < 0:
            return -1
        line = b"\n" + key + b"\t"
        at = self._text.find(line, self._blocks[block], self._blocks[block + 1] + 1)
        if at < 0:
            return -1
        number = self._text[at + len(line) : self._text.index(b"\n", at + 1)]
        try:
            return range(len(self._classes))[int(number, 16)]
        except (ValueError, IndexError) as error:
            raise IndexFormatError(f"the index gives {name} the class {number!r}, which it does not have") from error

    def knows(self, name: str) -> bool:
        """Tell whether any release exports ``name``."""
        return self._class_of(name) >= 0

    def mask_of(self, name: str) -> int:
        """Return the bit mask of the releases that export ``name``; bit 0 is the oldest."""
        number = self._class_of(name)
        return 0 if number < 0 else self._masks[number]

    def releases_with(self, names: Iterable[str]) -> list[str]:
        """Return the releases, oldest first, that export all ``names``."""
        mask = (1 << len(self.releases)) - 1
        for name in names:
            mask &= self.mask_of(name)
        return [r.version for bit, r in enumerate(self.releases) if mask >> bit & 1]

    def library_of(self, name: str, version: str) -> str | None:
        """Return the library of a release that exports ``name``, or None."""
        number = self._class_of(name)
        bit = self.versions().index(version)
        return next(self._libraries(number, bit), None) if number >= 0 else None

    def _libraries(self, number: int, bit: int) -> Iterator[str]:
        return (self.libraries[library] for library, mask in self._classes[number] if mask >> bit & 1)

    def exports(self, version: str) -> list[str]:
        """Return all names a release exports, sorted. Errors: as `names`."""
        bit = self.versions().index(version)
        wanted = [mask >> bit & 1 for mask in self._masks]
        return [name for name, number in self._lines() if wanted[number]]

    def exports_by_library(self, version: str) -> dict[str, list[str]]:
        """Return library -> the names of a release that it exports, as `add` takes them. Errors: as `names`."""
        bit = self.versions().index(version)
        libraries = [list(self._libraries(number, bit)) for number in range(len(self._classes))]
        exports: dict[str, list[str]] = {file: [] for files in libraries for file in files}
        for name, number in self._lines():
            for file in libraries[number]:
                exports[file].append(name)
        return exports

    def names(self) -> Iterator[str]:
        """Yield all names of the index, sorted. Errors: IndexFormatError for a line without a class."""
        return (name for name, _ in self._lines())

    def names_with(self, token: str) -> list[str]:
        """Return the names that hold ``token``."""
        text, wanted = self._text, token.encode("ascii", "replace")
        found = []
        at = text.find(wanted, self._start)
        while at >= 0:
            first, end = text.rindex(b"\n", self._start, at + 1) + 1, text.index(b"\n", at)
            found.append(text[first:end].partition(b"\t")[0].decode("ascii", "replace"))
            at = text.find(wanted, end)
        return found

    def _lines(self) -> Iterator[tuple[str, int]]:
        numbers = {f"{number:x}": number for number in range(len(self._classes))}
        try:
            for line in self._text[self._start + 1 : -1].decode("ascii").split("\n"):
                if line:
                    name, _, number = line.partition("\t")
                    yield name, numbers[number]
        except (UnicodeDecodeError, KeyError) as error:
            raise IndexFormatError(f"a line of the index is damaged: {error}") from error

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

        Errors: as `names`.
        """
        keep = [r for r in self.releases if r.version != release.version]
        order = sorted([*keep, release], key=lambda r: version_key(r.version))
        moved = {old: order.index(r) for old, r in enumerate(self.releases) if r.version != release.version}
        carried = [_moved(pairs, moved) for pairs in self._classes]
        held = {name: carried[number] for name, number in self._lines()}
        bit = 1 << order.index(release)
        for file, symbols in sorted(exports.items()):
            if file not in self.libraries:
                self.libraries = [*self.libraries, file]  # a copy: an index made from this one may share the list
            at = self.libraries.index(file)
            grown: dict[Pairs, Pairs] = {}
            for name in filter(_is_plain, symbols):
                pairs = held.get(name, ())
                if pairs not in grown:
                    masks = dict(pairs)
                    grown[pairs] = tuple(sorted({**masks, at: masks.get(at, 0) | bit}.items()))
                held[name] = grown[pairs]
        counted = Counter(held.values())
        del counted[()]
        classes = sorted(counted, key=lambda pairs: (-counted[pairs], pairs))
        number = {pairs: f"\t{n:x}\n" for n, pairs in enumerate(classes)}
        lines = (name + number[pairs] for name, pairs in sorted(held.items()) if pairs)
        self._set_names(("\n" + "".join(lines)).encode("ascii"), 0, classes)
        self.releases = order


def _is_plain(name: str) -> bool:
    return name.isascii() and name.isprintable()


def _moved(pairs: Pairs, moved: dict[int, int]) -> Pairs:
    """Return a class with the bits of its releases at their new places; those that have none are gone."""
    masks = ((library, sum(1 << to for old, to in moved.items() if mask >> old & 1)) for library, mask in pairs)
    return tuple((library, mask) for library, mask in masks if mask)


def version_key(version: str) -> tuple[int, ...]:
    """Return the sort key of a release version: its leading numbers."""
    parts = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        parts.append(int(digits) if digits else 0)
    return tuple(parts)


def _union(pairs: Pairs) -> int:
    mask = 0
    for _, part in pairs:
        mask |= part
    return mask
