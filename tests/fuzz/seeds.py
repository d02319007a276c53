"""The smallest shared objects that have every table the reader knows: the seeds of the fuzzer."""

from __future__ import annotations

import struct

from bedplate.node.abi import elf as e


def minimal_elf(*, gnu: bool = True, sysv: bool = True) -> bytes:
    """Return a well-formed shared object of about 900 bytes: one import, one export, versions, relocations."""
    strings = b"\0"
    offsets = {}
    for name in (b"puts", b"f", b"libc.so.6", b"GLIBC_2.2.5", b"x.so.1", b"$ORIGIN", b"V1", b"w"):
        offsets[name] = len(strings)
        strings += name + b"\0"
    strings += b"\0" * (-len(strings) % 8)
    at = 64 + 4 * 56
    blocks: dict[str, tuple[int, bytes]] = {}

    def place(name: str, data: bytes) -> None:
        nonlocal at
        blocks[name] = (at, data)
        at += len(data) + -len(data) % 8

    value = e.gnu_hash(b"f")
    bloom = 1 << (value & 63) | 1 << (value >> 6 & 63)
    place("gnu", struct.pack("<IIIIQII", 1, 3, 1, 6, bloom, 3, value | 1))
    place("sysv", struct.pack("<IIIIIII", 1, 4, 3, 0, 0, 0, 0))
    symbols = b"\0" * 24
    symbols += struct.pack("<IBBHQQ", offsets[b"puts"], 0x12, 0, 0, 0, 0)
    symbols += struct.pack("<IBBHQQ", offsets[b"w"], 0x22, 0, 0, 0, 0)
    symbols += struct.pack("<IBBHQQ", offsets[b"f"], 0x12, 0, 5, 0x100, 4)
    place("symtab", symbols)
    place("strtab", strings)
    place("versym", struct.pack("<HHHH", 0, 3, 1, 2))
    place("verdef", struct.pack("<HHHHIII", 1, 1, 1, 1, 0, 20, 28) + struct.pack("<II", offsets[b"x.so.1"], 0)
          + struct.pack("<HHHHIII", 1, 0, 2, 1, 0, 20, 0) + struct.pack("<II", offsets[b"V1"], 0))  # fmt: skip
    place("verneed", struct.pack("<HHIII", 1, 1, offsets[b"libc.so.6"], 16, 0)
          + struct.pack("<IHHII", 0, 0, 3, offsets[b"GLIBC_2.2.5"], 0))  # fmt: skip
    place("rela", struct.pack("<QIIq", 0x10, 6, 1, 0) + struct.pack("<QIIq", 0x18, 6, 2, 0))
    dynamic = [
        (e.DT_NEEDED, offsets[b"libc.so.6"]),
        (e.DT_SONAME, offsets[b"x.so.1"]),
        (e.DT_RUNPATH, offsets[b"$ORIGIN"]),
        (e.DT_RPATH, offsets[b"$ORIGIN"]),
        (e.DT_STRTAB, blocks["strtab"][0]),
        (e.DT_STRSZ, len(strings)),
        (e.DT_SYMTAB, blocks["symtab"][0]),
        (e.DT_SYMENT, 24),
        (e.DT_VERSYM, blocks["versym"][0]),
        (e.DT_VERNEED, blocks["verneed"][0]),
        (e.DT_VERNEEDNUM, 1),
        (e.DT_VERDEF, blocks["verdef"][0]),
        (e.DT_VERDEFNUM, 2),
        (e.DT_RELA, blocks["rela"][0]),
        (e.DT_RELASZ, 48),
        (e.DT_FLAGS_1, e.DF_1_NOW),
    ]
    if gnu:
        dynamic.append((e.DT_GNU_HASH, blocks["gnu"][0]))
    if sysv:
        dynamic.append((e.DT_HASH, blocks["sysv"][0]))
    place("dynamic", b"".join(struct.pack("<qQ", tag, value) for tag, value in [*dynamic, (0, 0)]))
    place("interp", b"/lib64/ld.so\0")
    body = bytearray(at)
    for start, data in blocks.values():
        body[start : start + len(data)] = data
    ident = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    body[:64] = ident + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 4, 0, 0, 0)
    headers = [
        (e.PT_LOAD, 5, 0, 0, 0, at, at, 4096),
        (e.PT_DYNAMIC, 6, blocks["dynamic"][0], blocks["dynamic"][0], 0, len(blocks["dynamic"][1]), 0, 8),
        (e.PT_INTERP, 4, blocks["interp"][0], blocks["interp"][0], 0, 13, 13, 1),
        (e.PT_GNU_STACK, 6, 0, 0, 0, 0, 0, 16),
    ]
    for number, header in enumerate(headers):
        struct.pack_into("<IIQQQQQQ", body, 64 + 56 * number, *header)
    return bytes(body)


SEEDS = {
    "both": minimal_elf(),
    "gnu": minimal_elf(sysv=False),
    "sysv": minimal_elf(gnu=False),
    "none": minimal_elf(gnu=False, sysv=False),
    "linker-script": b"INPUT(-lfoo)\n",
    "archive": b"!<arch>\n",
}
