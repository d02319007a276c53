"""Which GPU code is in a program: the fat binaries that nvcc puts into an ELF file, read without NVIDIA's tools.

The wheels of CUDA 13.0 bring no ``cuobjdump``, and a check of what a compiler made should not rest on another tool
of the same toolkit. Only headers are read; payloads are handed out as they lie in the file and may be compressed.

Format: the section name ``.nv_fatbin`` and its wrapper are in the toolkit's ``fatbinary_section.h``; the two headers
below are undocumented by NVIDIA and are as in the open source of ZLUDA (``FatbinHeader`` and ``FatbinFileHeader``):
a header of 16 bytes (magic 0xBA55ED50, version, size of this header, bytes that follow), then entries, each with its
kind (1 PTX, 2 ELF), size of its header, bytes of its payload and, at byte 28, the architecture as a number (120 for
sm_120). tests/unit/test_toolkit_fatbin.py holds this reader against files that nvcc made.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ..abi.elf import PT_LOAD, Buffer, ElfFile

MAGIC = 0xBA55ED50
KIND_PTX, KIND_ELF = 1, 2
MAX_ENTRIES = 65536  # of one file; a large library has a few thousand
MAX_CANDIDATES = 1 << 20  # places where the magic number occurs

_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHI")
_MAGIC_BYTES = struct.pack("<I", MAGIC)


class FatbinError(ValueError):
    """A fat binary whose headers contradict the file; the text says what and at which offset."""


class Entry(NamedTuple):
    """One piece of GPU code.

    kind: "ptx", "elf" (a cubin) or "other". arch: such as 120 for sm_120; sm_120a has the same number. offset, size:
    of its payload in the file, in bytes; with fill at the end.
    """

    kind: str
    arch: int
    offset: int
    size: int


def entries(elf: ElfFile) -> list[Entry]:
    """Return the GPU code of an ELF file, in the order of the file; none when it has none.

    The fat binaries are found by their magic number in what the loader maps, 8-byte aligned, so a file without
    section headers is read as well. Raises FatbinError where a header of version 1 contradicts the file.
    """
    found: list[Entry] = []
    for segment in elf.segments:
        if segment.type != PT_LOAD:
            continue
        end = min(segment.offset + segment.filesz, elf.size)
        for start in _places(elf.data, segment.offset, end):
            found.extend(_read(elf.data, start, end, MAX_ENTRIES - len(found)))
    return found


def cubins(elf: ElfFile, marker: bytes = b"") -> set[int]:
    """Return the architectures for which the file has a cubin, such as {120}.

    marker: only cubins that contain these bytes, such as the name of a kernel, count; a linked runtime library may
    bring cubins of its own. A compressed payload does not show its content, so compile with nvcc's -no-compress.
    """
    return {
        entry.arch
        for entry in entries(elf)
        if entry.kind == "elf" and (not marker or elf.data.find(marker, entry.offset, entry.offset + entry.size) >= 0)
    }


def _places(data: Buffer, start: int, end: int) -> Iterator[int]:
    """Yield the aligned offsets of the magic number that are followed by a header of the known version."""
    position = data.find(_MAGIC_BYTES, start, end)
    for _ in range(MAX_CANDIDATES):
        if position < 0:
            return
        step = 4
        if position % 8 == 0 and position + _HEADER.size <= end:
            _, version, header, size = _HEADER.unpack_from(data, position)
            # The number may also be data or code; a header that is none of ours is passed over.
            if version == 1 and header == _HEADER.size:
                yield position
                step = max(4, min(header + size, end - position))
        position = data.find(_MAGIC_BYTES, position + step, end)


def _read(data: Buffer, start: int, segment_end: int, limit: int) -> Iterator[Entry]:
    """Yield the entries of the fat binary at an offset."""
    _, _, header, size = _HEADER.unpack_from(data, start)
    position, end = start + header, start + header + size
    if end > segment_end:
        raise FatbinError(f"the fat binary at {start:#x} is {size} bytes long and passes the end of its segment")
    for _ in range(limit):
        if position == end:
            return
        if position + _ENTRY.size > end:
            raise FatbinError(f"the entry at {position:#x} is cut off")
        kind, _, entry_header, payload, _, _, _, _, arch = _ENTRY.unpack_from(data, position)
        if entry_header < _ENTRY.size or position + entry_header + payload > end:
            raise FatbinError(f"the entry at {position:#x} passes the end of its fat binary")
        yield Entry({KIND_PTX: "ptx", KIND_ELF: "elf"}.get(kind, "other"), arch, position + entry_header, payload)
        position += entry_header + payload
    raise FatbinError(f"the file has more than {MAX_ENTRIES} pieces of GPU code")
