"""What the dynamic loader reads from an ELF file, read strictly and without dependencies.

The reader covers 64-bit little-endian shared objects and executables for x86_64 and aarch64: program headers,
the dynamic section, symbol tables through DT_HASH and DT_GNU_HASH, symbol versions, RPATH/RUNPATH/SONAME.
Section headers are ignored, as the loader ignores them. Files are mapped, never read whole; symbols are
looked up by probing the file's own hash table, so a library with 100,000 exports costs a few page reads per
question.

Every malformed input ends in one ``ElfError`` with a reason and a file offset. All loops are bounded by the
size of a table that was checked to lie inside the file, and the bytes of all names handed out are bounded as
well.

Formats: the System V ABI (gABI chapters 4 and 5), the GNU hash section as in glibc's ``elf/dl-lookup.c``,
symbol versions as in the LSB core specification, chapter "Symbol Versioning".
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Union

Buffer = Union[bytes, mmap.mmap]

EM_X86_64 = 62
EM_AARCH64 = 183
MACHINES = {EM_X86_64: "x86_64", EM_AARCH64: "aarch64"}

PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_NOTE, PT_TLS, PT_GNU_STACK = 1, 2, 3, 4, 7, 0x6474E551

DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ = 1, 4, 5, 6, 7, 8
DT_STRSZ, DT_SYMENT, DT_SONAME, DT_RPATH, DT_JMPREL, DT_PLTRELSZ = 10, 11, 14, 15, 23, 2
DT_BIND_NOW, DT_RUNPATH, DT_FLAGS, DT_FLAGS_1 = 24, 29, 30, 0x6FFFFFFB
DT_GNU_HASH, DT_VERSYM, DT_VERDEF, DT_VERDEFNUM = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD
DT_VERNEED, DT_VERNEEDNUM = 0x6FFFFFFE, 0x6FFFFFFF
DF_BIND_NOW, DF_STATIC_TLS, DF_1_NOW, DF_1_NODEFLIB = 0x8, 0x10, 0x1, 0x800

STB_GLOBAL, STB_WEAK, STB_GNU_UNIQUE = 1, 2, 10
STT_TLS = 6
SHN_UNDEF, SHN_ABS = 0, 0xFFF1
VERSYM_HIDDEN, VERSYM_INDEX = 0x8000, 0x7FFF
VER_FLG_WEAK = 2

# Bit mask of the symbol types the loader accepts as a definition: NOTYPE OBJECT FUNC COMMON TLS GNU_IFUNC.
_DEFINABLE = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 5 | 1 << 6 | 1 << 10

MAX_SEGMENTS = 4096
MAX_DYNAMIC = 65536
MAX_VERSIONS = 65536
MAX_NAME = 1 << 20
MAX_NAME_TOTAL = 64 << 20
MAX_UNDEFINED = 1 << 18
# Linkers make chains of a few symbols. What a lookup walks beyond CHAIN is counted, for all lookups in a file together:
# a name is asked of every file, and 100,000 questions are nothing unusual.
CHAIN = 32
MAX_CHAINED = 1 << 20
_CHUNK = 1 << 16  # entries looked at together: keeps the memory of a scan small whatever the table's size

_EHDR = struct.Struct("<HHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_DYN = struct.Struct("<qQ")
_SYM = struct.Struct("<IBBHQQ")
_VERNEED = struct.Struct("<HHIII")
_VERNAUX = struct.Struct("<IHHII")
_VERDEF = struct.Struct("<HHHHIII")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class ElfError(ValueError):
    """The file is not an ELF file this reader accepts.

    Attributes: ``reason`` (plain text), ``offset`` (bytes from the start of the file, or None), and
    ``foreign``: True when the file is well formed but for another machine, word size or byte order, which the
    loader skips when it searches a library.
    """

    def __init__(self, reason: str, offset: int | None = None, *, foreign: bool = False) -> None:
        """Keep reason and place."""
        super().__init__(reason if offset is None else f"{reason} (at offset {offset:#x})")
        self.reason = reason
        self.offset = offset
        self.foreign = foreign


class Segment(NamedTuple):
    """One program header: type, flags, and offset, address and sizes in bytes."""

    type: int
    flags: int
    offset: int
    vaddr: int
    filesz: int
    memsz: int


class Version(NamedTuple):
    """A symbol version.

    Its name, and for a needed one the library that must define it ("" for a defined one).
    """

    name: bytes
    file: bytes
    weak: bool


class Symbol(NamedTuple):
    """One dynamic symbol. ``version`` is the needed or defined version, None where the symbol has none."""

    name: bytes
    bind: int
    type: int
    defined: bool
    version: Version | None
    hidden: bool
    number: int


@dataclass
class Tables:
    """Where the dynamic symbol tables lie: offsets and sizes in bytes, counts in entries; 0 means absent."""

    symtab: int = 0
    strtab: int = 0
    strsz: int = 0
    gnu_hash: int = 0
    sysv_hash: int = 0
    versym: int = 0
    verneed: int = 0
    verneednum: int = 0
    verdef: int = 0
    verdefnum: int = 0


def gnu_hash(name: bytes) -> int:
    """Return the 32-bit hash of the DT_GNU_HASH table (Bernstein's, h * 33 + c)."""
    value = 5381
    for char in name:
        value = (value * 33 + char) & 0xFFFFFFFF
    return value


def sysv_hash(name: bytes) -> int:
    """Return the 32-bit hash of the DT_HASH table (gABI chapter 5)."""
    value = 0
    for char in name:
        value = (value << 4) + char
        high = value & 0xF0000000
        value = (value ^ high >> 24) & 0x0FFFFFFF
    return value


class ElfFile:
    """One ELF file, mapped. Use ``ElfFile.open(path)`` for a file and ``ElfFile(data)`` for bytes.

    With ``tables`` the data may be the beginning of a file: the tables are used as given, and the dynamic section,
    which lies elsewhere, is not read (so ``needed``, ``soname`` and the like are empty).

    Raises ``ElfError`` from the constructor for bad headers, and from the methods for bad tables.
    """

    def __init__(self, data: Buffer, name: str = "", tables: Tables | None = None) -> None:
        """Read the headers and, unless ``tables`` are given, the dynamic section."""
        self.data = data
        self.name = name
        self.size = len(data)
        self.machine = ""
        self.segments: list[Segment] = []
        self._partial = tables is not None
        self._read_headers()
        self._loads = [s for s in self.segments if s.type == PT_LOAD and s.filesz]
        self.dynamic: dict[int, int] = {}
        self._needed: list[int] = []
        if tables is None:
            self._read_dynamic()
        self.tables = self._locate_tables() if tables is None else tables
        self._name_budget = MAX_NAME_TOTAL
        self._chain_budget = MAX_CHAINED
        self._gnu: tuple[int, int, int, int, int, int] | None = None
        self._sysv: tuple[int, int, int] | None = None
        self._count: int | None = None
        self._versions: dict[int, Version] | None = None
        self._defined_versions: list[bytes] | None = None

    @classmethod
    def open(cls, path: str) -> ElfFile:
        """Map a file read-only and read its headers.

        Errors: OSError when it cannot be opened, ElfError when it is empty, not a regular file or malformed.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            info = os.fstat(descriptor)
            if info.st_mode & 0o170000 != 0o100000:
                raise ElfError("not a regular file")
            if info.st_size == 0:
                raise ElfError("empty file", 0)
            return cls(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), path)
        finally:
            os.close(descriptor)

    # -- headers

    def _need(self, offset: int, size: int, what: str) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ElfError(f"{what} lies outside the file of {self.size} bytes", offset)

    def _read_headers(self) -> None:
        magic = bytes(self.data[:8])
        if magic[:4] != b"\x7fELF":
            kind = "an ar archive" if magic == b"!<arch>\n" else "not an ELF file"
            if magic[:1] == b"/" or magic[:6] in (b"INPUT(", b"GROUP "):
                kind = "a linker script, not an ELF file"
            raise ElfError(kind, 0)
        self._need(0, 64, "the ELF header")
        if self.data[4] != 2:
            raise ElfError(
                "a 32-bit ELF file" if self.data[4] == 1 else "unknown ELF class",
                4,
                foreign=self.data[4] == 1,
            )
        if self.data[5] != 1:
            raise ElfError(
                "a big-endian ELF file" if self.data[5] == 2 else "unknown byte order",
                5,
                foreign=self.data[5] == 2,
            )
        (etype, machine, _, _, phoff, _, _, _, phentsize, phnum, _, _, _) = _EHDR.unpack_from(self.data, 16)
        if machine not in MACHINES:
            raise ElfError(f"an ELF file for machine number {machine}", 18, foreign=True)
        if etype not in (2, 3):
            raise ElfError(f"ELF type {etype} is neither an executable nor a shared object", 16)
        self.machine = MACHINES[machine]
        if phentsize != _PHDR.size or not 0 < phnum <= MAX_SEGMENTS:
            raise ElfError(f"{phnum} program headers of {phentsize} bytes", 54)
        self._need(phoff, phnum * phentsize, "the program header table")
        for ptype, flags, offset, vaddr, _, filesz, memsz, _ in _PHDR.iter_unpack(
            self.data[phoff : phoff + phnum * phentsize]
        ):
            if ptype in (PT_LOAD, PT_DYNAMIC) and not self._partial:
                self._need(offset, filesz, "the dynamic section" if ptype == PT_DYNAMIC else "a loaded segment")
            self.segments.append(Segment(ptype, flags, offset, vaddr, filesz, memsz))

    def _offset(self, vaddr: int, what: str) -> tuple[int, int]:
        """Translate an address to (file offset, bytes available in its segment)."""
        for segment in self._loads:
            inside = vaddr - segment.vaddr
            if 0 <= inside < segment.filesz:
                return segment.offset + inside, segment.filesz - inside
        raise ElfError(f"{what} at address {vaddr:#x} is in no loaded segment")

    def _read_dynamic(self) -> None:
        sections = [s for s in self.segments if s.type == PT_DYNAMIC]
        if not sections:
            return
        # The loader reads the dynamic section through its address, so p_vaddr rules; p_offset agrees in sane
        # files.
        start, available = self._offset(sections[-1].vaddr, "the dynamic section")
        count = min(available, sections[-1].filesz) // _DYN.size
        if count > MAX_DYNAMIC:
            raise ElfError(f"a dynamic section of {count} entries", start)
        for tag, value in _DYN.iter_unpack(self.data[start : start + count * _DYN.size]):
            if tag == 0:
                return
            if tag == DT_NEEDED:
                self._needed.append(value)
            else:
                self.dynamic[tag] = value
        raise ElfError("the dynamic section has no end mark", start)

    def _locate_tables(self) -> Tables:
        tables = Tables()
        dynamic = self.dynamic
        if DT_STRTAB in dynamic:
            tables.strtab, available = self._offset(dynamic[DT_STRTAB], "the string table")
            tables.strsz = dynamic.get(DT_STRSZ, 0)
            if tables.strsz > available:
                raise ElfError(f"a string table of {tables.strsz} bytes leaves its segment", tables.strtab)
        if DT_SYMTAB in dynamic:
            if dynamic.get(DT_SYMENT, _SYM.size) != _SYM.size:
                raise ElfError(f"symbol entries of {dynamic[DT_SYMENT]} bytes")
            tables.symtab = self._offset(dynamic[DT_SYMTAB], "the symbol table")[0]
        for tag, field, what in (
            (DT_GNU_HASH, "gnu_hash", "the GNU hash table"),
            (DT_HASH, "sysv_hash", "the hash table"),
            (DT_VERSYM, "versym", "the version table"),
            (DT_VERNEED, "verneed", "the version needs"),
            (DT_VERDEF, "verdef", "the version definitions"),
        ):
            if tag in dynamic:
                setattr(tables, field, self._offset(dynamic[tag], what)[0])
        tables.verneednum = dynamic.get(DT_VERNEEDNUM, 0)
        tables.verdefnum = dynamic.get(DT_VERDEFNUM, 0)
        return tables

    # -- strings and the simple answers

    def string(self, index: int, what: str = "a name") -> bytes:
        """Return the string at byte ``index`` of the string table.

        Raises ElfError when it leaves the table.
        """
        tables = self.tables
        if not 0 <= index < tables.strsz:
            raise ElfError(f"{what} starts at {index}, outside the string table of {tables.strsz} bytes", tables.strtab)
        start = tables.strtab + index
        limit = min(tables.strtab + tables.strsz, start + MAX_NAME)
        end = self.data.find(b"\0", start, limit)
        if end < 0:
            raise ElfError(f"{what} does not end inside the string table or is longer than {MAX_NAME} bytes", start)
        self._name_budget -= end - start
        if self._name_budget < 0:
            raise ElfError(f"the names of the file are longer than {MAX_NAME_TOTAL} bytes together", start)
        return self.data[start:end]

    def _text(self, index: int, what: str) -> str:
        return os.fsdecode(self.string(index, what))

    @property
    def needed(self) -> list[str]:
        """DT_NEEDED names, in the order of the file."""
        return [self._text(index, "a needed library's name") for index in self._needed]

    @property
    def soname(self) -> str | None:
        """DT_SONAME, or None."""
        return self._text(self.dynamic[DT_SONAME], "the SONAME") if DT_SONAME in self.dynamic else None

    @property
    def rpath(self) -> list[str]:
        """DT_RPATH split at colons.

        Empty when the file has a RUNPATH, which makes the loader ignore RPATH.
        """
        if DT_RUNPATH in self.dynamic or DT_RPATH not in self.dynamic:
            return []
        return [p for p in self._text(self.dynamic[DT_RPATH], "the RPATH").split(":") if p]

    @property
    def runpath(self) -> list[str]:
        """DT_RUNPATH split at colons."""
        if DT_RUNPATH not in self.dynamic:
            return []
        return [p for p in self._text(self.dynamic[DT_RUNPATH], "the RUNPATH").split(":") if p]

    @property
    def interpreter(self) -> str | None:
        """The program interpreter of an executable (the loader's path), or None."""
        for segment in self.segments:
            if segment.type == PT_INTERP:
                self._need(segment.offset, segment.filesz, "the interpreter's name")
                return os.fsdecode(self.data[segment.offset : segment.offset + min(segment.filesz, 4096)].rstrip(b"\0"))
        return None

    @property
    def bind_now(self) -> bool:
        """True when the file asks for all symbols to be bound at load."""
        return bool(
            DT_BIND_NOW in self.dynamic
            or self.dynamic.get(DT_FLAGS, 0) & DF_BIND_NOW
            or self.dynamic.get(DT_FLAGS_1, 0) & DF_1_NOW
        )

    @property
    def nodeflib(self) -> bool:
        """True when the default library directories must not be searched for this file's needs."""
        return bool(self.dynamic.get(DT_FLAGS_1, 0) & DF_1_NODEFLIB)

    @property
    def tls_bytes(self) -> int:
        """Size of the thread-local segment in bytes, 0 when there is none."""
        return sum(s.memsz for s in self.segments if s.type == PT_TLS)

    @property
    def executable_stack(self) -> bool:
        """True when PT_GNU_STACK asks for an executable stack."""
        return any(s.type == PT_GNU_STACK and s.flags & 1 for s in self.segments)

    # -- versions

    def versions(self) -> dict[int, Version]:
        """Return the version of each version index.

        Needed ones with their library, defined ones with file b"".
        """
        if self._versions is None:
            found = {index: version for version, index in self._walk_needs()}
            # VER_FLG_BASE (1) names the file itself, not a version of a symbol.
            found.update({i: Version(n, b"", False) for n, i, flags in self._walk_definitions() if not flags & 1})
            self._versions = found
        return self._versions

    def needed_versions(self) -> list[Version]:
        """Return the needed versions with their libraries, in the order of the file."""
        return [version for version, _ in self._walk_needs()]

    def defined_versions(self) -> list[bytes]:
        """Return the names of the versions this library defines; empty for a library without versions."""
        if self._defined_versions is None:
            self._defined_versions = [name for name, _, flags in self._walk_definitions() if not flags & 1]
        return self._defined_versions

    def _walk_needs(self) -> Iterator[tuple[Version, int]]:
        offset, left = self.tables.verneed, MAX_VERSIONS
        remaining = self.tables.verneednum if offset else 0
        while remaining > 0:
            self._need(offset, _VERNEED.size, "a version need")
            _, count, file_index, aux, following = _VERNEED.unpack_from(self.data, offset)
            file = self.string(file_index, "the library of a version need")
            at = offset + aux
            for _ in range(count):
                left -= 1
                if left < 0:
                    raise ElfError(f"more than {MAX_VERSIONS} version needs", at)
                self._need(at, _VERNAUX.size, "a needed version")
                _, flags, other, name_index, step = _VERNAUX.unpack_from(self.data, at)
                name = self.string(name_index, "a needed version's name")
                yield Version(name, file, bool(flags & VER_FLG_WEAK)), other & VERSYM_INDEX
                if not step:
                    break
                at += step
            remaining -= 1
            left -= 1
            if not following or left < 0:
                return
            offset += following

    def _walk_definitions(self) -> Iterator[tuple[bytes, int, int]]:
        offset = self.tables.verdef
        remaining = min(self.tables.verdefnum, MAX_VERSIONS) if offset else 0
        while remaining > 0:
            self._need(offset, _VERDEF.size, "a version definition")
            _, flags, index, count, _, aux, following = _VERDEF.unpack_from(self.data, offset)
            if count:
                self._need(offset + aux, 8, "a version definition's name")
                name_index = _U32.unpack_from(self.data, offset + aux)[0]
                yield self.string(name_index, "a defined version's name"), index & VERSYM_INDEX, flags
            remaining -= 1
            if not following:
                return
            offset += following

    def _version_of(self, index: int) -> tuple[Version | None, bool]:
        """Return (version, hidden) of symbol ``index``; indexes 0 (local) and 1 (global) carry no version."""
        versym = self.tables.versym
        if not versym:
            return None, False
        at = versym + 2 * index
        self._need(at, 2, "a symbol's version")
        raw = self.data[at] | self.data[at + 1] << 8
        number = raw & VERSYM_INDEX
        if number < 2:
            return None, bool(raw & VERSYM_HIDDEN)
        version = self.versions().get(number)
        if version is None:
            # A defined BASE index is legal; anything else would be a dangling index, which the loader treats
            # as "no version" too (its table entry has hash 0).
            return None, bool(raw & VERSYM_HIDDEN)
        return version, bool(raw & VERSYM_HIDDEN)

    # -- symbols

    def _gnu_table(self) -> tuple[int, int, int, int, int, int]:
        """Return (buckets, first hashed symbol, bloom words, shift, bloom offset, bucket offset), all
        checked.
        """
        if self._gnu is None:
            at = self.tables.gnu_hash
            self._need(at, 16, "the GNU hash table")
            buckets, first, words, shift = struct.unpack_from("<IIII", self.data, at)
            if buckets == 0 or words == 0 or words & (words - 1):
                raise ElfError(f"a GNU hash table of {buckets} buckets and {words} filter words", at)
            self._need(at + 16, words * 8 + buckets * 4, "the GNU hash table")
            self._gnu = (buckets, first, words, shift & 31, at + 16, at + 16 + words * 8)
        return self._gnu

    def _sysv_table(self) -> tuple[int, int, int]:
        """Return (buckets, symbols, bucket offset), checked."""
        if self._sysv is None:
            at = self.tables.sysv_hash
            self._need(at, 8, "the hash table")
            buckets, chains = struct.unpack_from("<II", self.data, at)
            if buckets == 0:
                raise ElfError("a hash table without buckets", at)
            self._need(at + 8, (buckets + chains) * 4, "the hash table")
            self._sysv = (buckets, chains, at + 8)
        return self._sysv

    @property
    def symbol_count(self) -> int:
        """Number of dynamic symbols, including the empty one at index 0; what the hash tables imply."""
        if self._count is None:
            self._count = self._count_symbols()
            if self._count:
                self._need(self.tables.symtab, self._count * _SYM.size, "the symbol table")
        return self._count

    def _count_symbols(self) -> int:
        tables = self.tables
        if not tables.symtab:
            return 0
        if tables.sysv_hash:
            return self._sysv_table()[1]
        count = 0
        if tables.gnu_hash:
            buckets, first, _, _, _, bucket_at = self._gnu_table()
            highest = max(memoryview(self.data)[bucket_at : bucket_at + 4 * buckets].cast("I"))
            if highest:
                if highest < first:
                    raise ElfError(f"a hash bucket names symbol {highest}, below the first hashed one", bucket_at)
                at = bucket_at + 4 * buckets + 4 * (highest - first)
                while True:
                    self._need(at, 4, "a GNU hash chain")
                    highest += 1
                    if self.data[at] & 1:
                        return highest
                    at += 4
            # Without exports there are no chains to tell the size by. LLVM's linker and mold write the number of all
            # symbols as that of the first hashed one, GNU ld writes 1.
            if self._holds(first):
                count = first
        # What relocations refer to is all that the loader resolves.
        return max(count, 1 + max((max(chunk) for chunk in self._relocations()), default=0))

    def _holds(self, count: int) -> bool:
        """Tell whether the symbol table has room for so many symbols: in the file, and before the strings behind it."""
        start, strings = self.tables.symtab, self.tables.strtab
        end = start + count * _SYM.size
        return end <= self.size and not start < strings < end

    def _symbol(self, index: int) -> tuple[int, int, int, int, int, int]:
        at = self.tables.symtab + index * _SYM.size
        self._need(at, _SYM.size, "a symbol")
        return _SYM.unpack_from(self.data, at)

    def undefined(self) -> list[Symbol]:
        """Return the undefined symbols, weak ones included, with the version and library they ask for."""
        count = self.symbol_count
        start = self.tables.symtab
        # Strided views of st_shndx find the candidates without unpacking 24 bytes per symbol. Native order is
        # little-endian on both machines this runs on.
        table = memoryview(self.data)[start : start + count * _SYM.size].cast("H")
        found: list[Symbol] = []
        for base in range(0, count, _CHUNK):
            sections = table[12 * base + 3 : 12 * (base + _CHUNK) : 12].tolist()
            for index, section in enumerate(sections, base):
                if section or not index:
                    continue
                name_index, info = _SYM.unpack_from(self.data, start + index * _SYM.size)[:2]
                if not name_index or info >> 4 == 0:
                    continue
                if len(found) == MAX_UNDEFINED:
                    raise ElfError(f"more than {MAX_UNDEFINED} undefined symbols", start + index * _SYM.size)
                version, hidden = self._version_of(index)
                name = self.string(name_index, "a symbol's name")
                found.append(Symbol(name, info >> 4, info & 15, False, version, hidden, index))
        return found

    def exports(self) -> Iterator[Symbol]:
        """Yield the symbols other files can bind to, in table order (for listings; use ``lookup`` to ask)."""
        if not self.symbol_count:
            return
        start = self.tables.symtab
        table = memoryview(self.data)[start : start + self.symbol_count * _SYM.size]
        for index, (name_index, info, _, section, value, _) in enumerate(_SYM.iter_unpack(table)):
            if name_index and _bindable(info, section, value):
                version, hidden = self._version_of(index)
                yield Symbol(
                    self.string(name_index, "a symbol's name"),
                    info >> 4,
                    info & 15,
                    True,
                    version,
                    hidden,
                    index,
                )

    def relocated(self, wanted: set[int]) -> set[int]:
        """Return those of the symbol indexes that a relocation refers to: what the loader really resolves."""
        found: set[int] = set()
        for chunk in self._relocations():
            found.update(wanted.intersection(chunk))
            if len(found) == len(wanted):
                break
        return found

    def _relocations(self) -> Iterator[list[int]]:
        """Yield the symbol indexes of the relocations, in chunks."""
        for tag, size_tag in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
            size = self.dynamic.get(size_tag, 0)
            if tag not in self.dynamic or size < 24:
                continue
            start, available = self._offset(self.dynamic[tag], "the relocations")
            if size > available:
                raise ElfError(f"{size} bytes of relocations leave their segment", start)
            words = memoryview(self.data)[start : start + size // 24 * 24].cast("I")
            for base in range(0, len(words), 6 * _CHUNK):
                yield words[base + 3 : base + 6 * _CHUNK : 6].tolist()

    def lookup(self, name: bytes, version: bytes | None = None, hashed: int | None = None) -> bool:
        """Tell whether the loader would bind ``name`` (with ``version``) to this file.

        Args: ``hashed`` is ``gnu_hash(name)`` when the caller has it already. The rules are those of
        ``check_match`` in glibc's ``elf/dl-lookup.c``: a library without versions satisfies any version; a
        reference without a version takes the base or the oldest definition, or the only one.
        """
        tables = self.tables
        if not tables.symtab:
            return False
        candidates = self._gnu_candidates(name, hashed) if tables.gnu_hash else self._sysv_candidates(name)
        unversioned = 0
        for index in candidates:
            name_index, info, _, section, value, _ = self._symbol(index)
            if not _bindable(info, section, value) or not self._same_name(name_index, name):
                continue
            if not tables.versym:
                return True
            at = tables.versym + 2 * index
            self._need(at, 2, "a symbol's version")
            raw = self.data[at] | self.data[at + 1] << 8
            if version is None:
                if raw & VERSYM_INDEX < 3:
                    return True
                unversioned += not raw & VERSYM_HIDDEN
                continue
            own = self.versions().get(raw & VERSYM_INDEX)
            if own.name == version if own is not None else not raw & VERSYM_HIDDEN:
                return True
        return unversioned == 1

    def _same_name(self, name_index: int, name: bytes) -> bool:
        at = self.tables.strtab + name_index
        end = at + len(name)
        if name_index + len(name) >= self.tables.strsz:
            return False
        return self.data[at:end] == name and self.data[end] == 0

    def _walk_on(self, name: bytes, at: int) -> None:
        """Count one step of a long chain, at which `name` is compared."""
        self._chain_budget -= 1 + len(name) // 256
        if self._chain_budget < 0:
            raise ElfError(f"hash chains of which lookups walked {MAX_CHAINED} symbols", at)

    def _gnu_candidates(self, name: bytes, hashed: int | None) -> Iterator[int]:
        buckets, first, words, shift, bloom_at, bucket_at = self._gnu or self._gnu_table()
        value = gnu_hash(name) if hashed is None else hashed
        data = self.data
        word = _U64.unpack_from(data, bloom_at + 8 * (value // 64 & words - 1))[0]
        if not word >> (value & 63) & 1 or not word >> (value >> shift & 63) & 1:
            return
        index = _U32.unpack_from(data, bucket_at + 4 * (value % buckets))[0]
        if index == 0:
            return
        if index < first:
            raise ElfError(f"a hash bucket names symbol {index}, below the first hashed one", bucket_at)
        at = bucket_at + 4 * buckets + 4 * (index - first)
        wanted = value | 1
        far = index + CHAIN
        while True:
            if index >= far:
                self._walk_on(name, at)
            self._need(at, 4, "a GNU hash chain")
            found = _U32.unpack_from(data, at)[0]
            if found | 1 == wanted:
                yield index
            if found & 1:
                return
            index += 1
            at += 4

    def _sysv_candidates(self, name: bytes) -> Iterator[int]:
        if not self.tables.sysv_hash:
            return
        buckets, chains, at = self._sysv_table()
        index = _U32.unpack_from(self.data, at + 4 * (sysv_hash(name) % buckets))[0]
        for step in range(chains):  # a chain longer than the table has a loop
            if step >= CHAIN:
                self._walk_on(name, at)
            if index == 0:
                return
            if index >= chains:
                raise ElfError(f"a hash chain names symbol {index} of {chains}", at)
            yield index
            index = _U32.unpack_from(self.data, at + 4 * (buckets + index))[0]
        raise ElfError("a hash chain without end", at)


def _bindable(info: int, section: int, value: int) -> bool:
    """Tell whether a symbol entry is a definition the loader binds to (``do_lookup_x`` in glibc)."""
    kind = info & 15
    if section == SHN_UNDEF or (value == 0 and section != SHN_ABS and kind != STT_TLS):
        return False
    return info >> 4 in (STB_GLOBAL, STB_WEAK, STB_GNU_UNIQUE) and bool(_DEFINABLE >> kind & 1)
