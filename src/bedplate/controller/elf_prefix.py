"""The symbol tables of a shared object from its first bytes alone.

The loader finds the tables through the dynamic section, which linkers put near the end of a file. In a compressed wheel
the end costs the whole member. But GNU ld lays the tables out in a fixed order right behind the program headers::

    notes | [.hash] | .gnu.hash | .dynsym | .dynstr | .gnu.version | .gnu.version_r | ...

so they can be found from the front, and each step is checked: the names of exported symbols must hash to the values of
the hash table, the version table must have one entry per symbol, the version needs must name libraries. A file that
fails a check (another linker, or tables moved by patchelf) has to be read whole.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from bedplate.node.abi.elf import ElfFile, Tables, gnu_hash

_SYMBOL = 24
_SEARCH = 1 << 16  # how far behind the headers .gnu.hash may begin: notes are short
_MAX_WORK = 64 << 20  # bytes of tables looked at in one search: what looks like a table may stand everywhere in a file
_LIBRARY_NAME = re.compile(rb"[\w.+-]+\.so(?:\.\d+)*|ld-linux[\w.-]*")


class NeedMore(Exception):  # noqa: N818 - a request, not an error
    """The tables go on behind the data at hand; `size` is how many bytes of the file would tell more."""

    def __init__(self, size: int) -> None:
        """Keep the wanted size in bytes."""
        super().__init__(f"{size} bytes needed")
        self.size = size


class NotInFront(Exception):  # noqa: N818 - a finding, not an error
    """The tables are not where GNU ld puts them: read the whole file."""


class _Work:
    """How many bytes a search may still look at."""

    def __init__(self) -> None:
        """Begin a search."""
        self._left = _MAX_WORK

    def spend(self, size: int) -> None:
        """Count bytes that are about to be looked at; NotInFront when the search has taken too long."""
        self._left -= size
        if self._left < 0:
            raise NotInFront


def read_prefix(data: bytes) -> tuple[ElfFile, list[str]]:
    """Return an ElfFile with its tables in place, and the library names of its string table.

    The names are DT_NEEDED and SONAME: those strings that no symbol and no version uses.

    Errors: NeedMore, NotInFront, ElfError for bad headers.
    """
    if len(data) < 4096:
        raise NeedMore(65536)
    front = ElfFile(data, tables=Tables())
    work = _Work()
    headers = 64 + 56 * len(front.segments)
    for start in range(headers + -headers % 8, min(headers + _SEARCH, len(data) - 64), 8):
        tables = _tables_at(data, start, work)
        if tables is not None:
            elf = ElfFile(data, tables=tables)
            count = elf.symbol_count
            _locate_versions(data, tables, count, work)
            return ElfFile(data, tables=tables), _library_names(data, tables, count)
    raise NotInFront


def _tables_at(data: bytes, start: int, work: _Work) -> Tables | None:
    """Return symbol, string and hash tables if a GNU hash table begins at `start`."""
    buckets, first, words, shift = struct.unpack_from("<IIII", data, start)
    if not (0 < buckets < 1 << 22 and 0 < first < 1 << 24 and 0 < words < 1 << 22 and shift < 32):
        return None
    if words & (words - 1):
        return None
    bucket_at = start + 16 + 8 * words
    chain_at = bucket_at + 4 * buckets
    if chain_at > len(data):
        raise NeedMore(2 * chain_at) if start < 8192 and buckets < 1 << 18 else NotInFront
    work.spend(4 * buckets)
    highest = max(struct.unpack_from(f"<{buckets}I", data, bucket_at))
    if highest < first or highest - first > 1 << 22:
        return None
    at = chain_at + 4 * (highest - first)
    while True:
        if at + 4 > len(data):
            raise NeedMore(2 * at)
        work.spend(32)  # a step here takes as long as eight words of a table
        highest += 1
        if data[at] & 1:
            break
        at += 4
    symtab = at + 4 + -(at + 4) % 8
    strtab = symtab + _SYMBOL * highest
    if data[symtab : symtab + _SYMBOL].strip(b"\0"):
        return None
    if strtab + 65536 > len(data):
        raise NeedMore(2 * strtab + 65536)
    tables = Tables(symtab=symtab, strtab=strtab, strsz=len(data) - strtab, gnu_hash=start)
    checked = range(first, min(first + 16, highest))
    for index in checked:
        name_at = strtab + struct.unpack_from("<I", data, symtab + _SYMBOL * index)[0]
        end = data.find(b"\0", name_at)
        if name_at >= len(data) or end < 0:
            raise NeedMore(2 * len(data))
        stored = struct.unpack_from("<I", data, chain_at + 4 * (index - first))[0]
        if gnu_hash(data[name_at:end]) | 1 != stored | 1:
            return None
    return tables


def _locate_versions(data: bytes, tables: Tables, count: int, work: _Work) -> None:
    """Find where the strings end and the version tables begin, and write it into `tables`.

    Every end of a string is tried. The right one is followed by a version table whose entries are all known to the
    version definitions and needs behind it, with an own version for every exported symbol. Padding makes a few
    neighbours look right as well; the last one is, because behind it an export would get the padding's zero.
    """
    names = struct.unpack_from(f"<{count * 6}I", data, tables.symtab)[0::6]
    first = struct.unpack_from("<I", data, tables.gnu_hash + 4)[0]
    end = data.find(b"\0", tables.strtab + max(names))
    best = 0
    for _ in range(65536):
        if end < 0:
            raise NeedMore(2 * len(data))
        end += 1
        if best and end > best + 8:
            return
        versym = end + end % 2
        if versym + 2 * count + 65536 > len(data):
            raise NeedMore(versym + 2 * count + (1 << 17))
        found = _version_tables(data, versym + 2 * count, tables.strtab, end, work)
        if found is not None:
            work.spend(8 * count)
            entries = struct.unpack_from(f"<{count}H", data, versym)
            own = found.defined.issuperset(entry & 0x7FFF for entry in entries[first:])
            if own and entries[0] == 0 and found.known.issuperset(entry & 0x7FFF for entry in entries):
                best = end
                tables.verdef, tables.verdefnum = found.verdef, found.verdefnum
                tables.verneed, tables.verneednum = found.verneed, found.verneednum
                tables.versym = versym
                tables.strsz = end - tables.strtab
        end = data.find(b"\0", end)
    if not best:
        raise NotInFront


class _Versions(NamedTuple):
    """Where version definitions and needs lie, which indexes exports may have, and which any symbol may."""

    verdef: int
    verdefnum: int
    verneed: int
    verneednum: int
    defined: set[int]
    known: set[int]


def _version_tables(data: bytes, at: int, strtab: int, strings_end: int, work: _Work) -> _Versions | None:
    """Return the version definitions (if any) and needs that begin at `at`; None when there are none."""
    defined = {1}
    known = {0, 1}
    at += -at % 8
    verdef, definitions = at, 0
    following = 1
    while following and struct.unpack_from("<H", data, at)[0] == 1 and definitions < 4096:
        _, _, index, count, _, aux, following = struct.unpack_from("<HHHHIII", data, at)
        if aux != 20 or not 0 < count < 64 or (definitions == 0 and index != 1):
            break
        work.spend(32)
        defined.add(index & 0x7FFF)
        definitions += 1
        at += following or aux + 8 * count
        _room(data, at)
    if definitions == 0:
        verdef = 0
    at += -at % 8
    verneed, needs = at, 0
    following = 1
    while following:
        version, count, file, aux, following = struct.unpack_from("<HHIII", data, at)
        if version != 1 or not 0 < count < 1024 or aux != 16 or strtab + file >= strings_end:
            return None
        if not _LIBRARY_NAME.fullmatch(data[strtab + file : data.find(b"\0", strtab + file)]):
            return None
        _room(data, at + 16 * (count + 1))
        work.spend(32 * count)
        known.update(struct.unpack_from("<H", data, at + 16 * (n + 1) + 6)[0] & 0x7FFF for n in range(count))
        needs += 1
        at += following
        _room(data, at)
        if needs > 4096:
            return None
    return _Versions(verdef, definitions, verneed, needs, defined, known | defined)


def _room(data: bytes, at: int) -> None:
    if at + 64 > len(data):
        raise NeedMore(2 * at + 65536) if at < 1 << 28 else NotInFront


def _library_names(data: bytes, tables: Tables, count: int) -> list[str]:
    """Return the strings that look like library names and that no symbol uses.

    Versioned libraries come too, because a library that brings versions is always needed.
    """
    used = set(struct.unpack_from(f"<{count * 6}I", data, tables.symtab)[0::6])
    found = []
    at = tables.strtab + 1
    end = tables.strtab + tables.strsz
    while at < end:
        stop = data.index(b"\0", at)
        name = data[at:stop]
        if at - tables.strtab not in used and _LIBRARY_NAME.fullmatch(name):
            found.append(name.decode("ascii", "replace"))
        at = stop + 1
    return found
