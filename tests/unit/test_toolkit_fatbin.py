"""The reader of GPU code in ELF files: made ones, any bytes, and what nvcc and cuobjdump say where installed."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.abi.elf import ElfFile, Tables
from bedplate.node.toolkit.fatbin import MAGIC, Entry, FatbinError, cubins, entries

PTX, ELF = 1, 2


def entry(kind: int, arch: int, payload: bytes, header: int = 64) -> bytes:
    """Return an entry as nvcc writes it: 16 bytes, more fields, the payload."""
    return struct.pack("<HHIQIIHHI", kind, 0x101, header, len(payload), 0, 0, 8, 1, arch).ljust(header, b"\0") + payload


def fatbin(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body


def elf(data: bytes) -> ElfFile:
    """Return an ELF file of one loadable segment that holds the data from byte 120 on."""
    size = 120 + len(data)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    header += struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 4096)
    return ElfFile(header + data, tables=Tables())


def test_entries_of_two_fat_binaries() -> None:
    data = fatbin(entry(ELF, 120, b"kernel-a"), entry(PTX, 90, b"text....")) + b"\0" * 8
    data += fatbin(entry(ELF, 90, b"kernel-b", header=112))
    file = elf(data)
    assert [(found.kind, found.arch) for found in entries(file)] == [("elf", 120), ("ptx", 90), ("elf", 90)]
    assert cubins(file) == {120, 90}
    assert cubins(file, b"kernel-a") == {120}
    assert cubins(file, b"kernel-c") == set()


def test_no_gpu_code() -> None:
    assert entries(elf(b"nothing here")) == []


@pytest.mark.parametrize(
    "before", [b"\0" * 4, struct.pack("<I", MAGIC) + b"\0" * 12, struct.pack("<IHHQ", MAGIC, 7, 16, 9)]
)
def test_the_magic_number_elsewhere_is_no_fat_binary(before: bytes) -> None:
    data = before.ljust(-(-len(before) // 8) * 8, b"\0") + fatbin(entry(ELF, 120, b"kernel"))
    assert [found.arch for found in entries(elf(data))] == [120]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (fatbin(entry(ELF, 120, b"kernel"))[:-1], "passes the end of its segment"),
        (fatbin(entry(ELF, 120, b"kernel"), b"rest"), "is cut off"),
        (fatbin(entry(ELF, 120, b"kernel").replace(struct.pack("<Q", 6), struct.pack("<Q", 7))), "passes the end"),
        (fatbin(struct.pack("<HHIQIIHHI", ELF, 0x101, 8, 0, 0, 0, 8, 1, 120)), "passes the end"),
        (struct.pack("<IHHQ", MAGIC, 1, 16, 2**64 - 1), "passes the end of its segment"),
    ],
    ids=["cut", "rest", "payload", "header", "huge"],
)
def test_headers_that_contradict_the_file(data: bytes, says: str) -> None:
    with pytest.raises(FatbinError, match=says):
        entries(elf(data))


@given(st.binary(max_size=400), st.integers(0, 400))
def test_any_bytes_give_entries_inside_the_file_or_an_error(noise: bytes, place: int) -> None:
    data = bytearray(fatbin(entry(ELF, 120, b"kernel"), entry(PTX, 90, b"text")))
    data[place % len(data) : place % len(data) + len(noise)] = noise
    file = elf(bytes(data))
    try:
        found: list[Entry] = entries(file)
    except FatbinError:
        return
    assert all(0 <= item.offset <= item.offset + item.size <= file.size for item in found)


NVCC = shutil.which("nvcc")


@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
def test_what_nvcc_makes(tmp_path: Path) -> None:
    """Two architectures with machine code, one with PTX besides; cuobjdump says the same where it is installed."""
    source, program = tmp_path / "k.cu", tmp_path / "k"
    source.write_text('extern "C" __global__ void marked(int *p) { *p = 1; }\nint main() { return 0; }\n')
    flags = [
        "-gencode=arch=compute_90,code=[sm_90,compute_90]",
        "-gencode=arch=compute_120,code=sm_120",
        "-no-compress",
    ]
    subprocess.run([str(NVCC), *flags, "-o", program, source], check=True, timeout=120)
    file = ElfFile.open(str(program))
    assert cubins(file, b"marked") == {90, 120}
    assert {item.arch for item in entries(file) if item.kind == "ptx"} == {90}
    cuobjdump = shutil.which("cuobjdump")
    if cuobjdump:
        listed = subprocess.run([cuobjdump, "--list-elf", program], check=True, capture_output=True, text=True).stdout
        assert {int(arch) for arch in re.findall(r"sm_(\d+)", listed)} == cubins(file)
