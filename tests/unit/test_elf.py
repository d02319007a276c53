"""The ELF reader: against other readers, against the rules of the loader, against hostile bytes."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from abi_libraries import CC, build, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import read_everything

from bedplate.node.abi import elf as module
from bedplate.node.abi.elf import ElfError, ElfFile, gnu_hash, sysv_hash


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if CC is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("elf") / "libx.so"
    exports = [f"_Z{len(str(n))}f{n}v" for n in range(20)]
    build(path, exports, ["puts", "nowhere"], "-Wl,-soname,libx.so.1", "-Wl,-rpath,$ORIGIN/lib", weak=["maybe"])
    return path.read_bytes()


def test_hashes_of_the_specifications() -> None:
    assert gnu_hash(b"printf") == 0x156B2BB8
    assert sysv_hash(b"printf") == 0x077905A6
    assert gnu_hash(b"") == 5381


def test_reads_what_the_linker_wrote(library: bytes) -> None:
    file = ElfFile(library)
    assert file.soname == "libx.so.1"
    assert file.needed == ["libc.so.6"]
    assert (file.rpath or file.runpath) == ["$ORIGIN/lib"]
    undefined = {s.name: s for s in file.undefined()}
    assert undefined[b"puts"].version is not None
    assert undefined[b"puts"].version.file == b"libc.so.6"
    assert undefined[b"nowhere"].version is None
    assert undefined[b"maybe"].bind == module.STB_WEAK
    assert {s.name for s in file.exports()} >= {b"_Z1f0v", b"_Z2f19v"}
    assert file.relocated({undefined[b"nowhere"].number}) == {undefined[b"nowhere"].number}


@needs_compiler
@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_lookup_by_every_hash_table(tmp_path: Path, style: str) -> None:
    names = [f"name_{n}" for n in range(300)]
    file = ElfFile.open(str(build(tmp_path / "l.so", names, ["absent_one"], f"-Wl,--hash-style={style}")))
    assert all(file.lookup(n.encode()) for n in names)
    assert not file.lookup(b"absent_one")
    assert not file.lookup(b"name_")
    assert not file.lookup(b"name_3000")
    assert {s.name.decode() for s in file.exports()} >= set(names)


@needs_compiler
def test_versions_are_matched_as_the_loader_does(tmp_path: Path) -> None:
    script = tmp_path / "v.map"
    script.write_text("V1 { global: old; }; V2 { global: new; } V1;")
    file = ElfFile.open(str(build(tmp_path / "v.so", ["old", "new"], [], f"-Wl,--version-script={script}")))
    assert file.defined_versions() == [b"V1", b"V2"]
    assert file.lookup(b"old", b"V1")
    assert not file.lookup(b"old", b"V2")
    assert file.lookup(b"new", b"V2")
    assert file.lookup(b"new")  # without a version: the only definition there is
    plain = ElfFile.open(str(build(tmp_path / "p.so", ["old"], [])))
    assert plain.lookup(b"old", b"V1")  # a library without versions satisfies every version


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
@pytest.mark.parametrize("name", ["libc.so.6", "libstdc++.so.6", "libm.so.6"])
def test_agrees_with_readelf_on_system_libraries(name: str) -> None:
    path = next((p for d in ("/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64") if (p := Path(d) / name).exists()), None)
    if path is None:
        pytest.skip(f"no {name}")
    text = subprocess.run(["readelf", "-W", "--dyn-syms", str(path)], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    rows = [r for r in rows if len(r) >= 8 and r[4] != "LOCAL"]
    undefined = {r[7].split("@")[0] for r in rows if r[6] == "UND"}
    exported = {r[7].split("@")[0] for r in rows if r[6] != "UND" and (int(r[1], 16) or r[3] == "TLS" or r[6] == "ABS")}
    file = ElfFile.open(str(path))
    assert {s.name.decode() for s in file.undefined()} == undefined
    assert {s.name.decode() for s in file.exports()} == exported
    assert all(file.lookup(s.name, s.version.name if s.version else None) for s in file.exports())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an ELF file"),
        (b"!<arch>\nfoo", "an ar archive"),
        (b"INPUT(-lfoo)\n", "a linker script"),
        (b"/* GNU ld script */ GROUP ( libc.so.6 )", "a linker script"),
        (b"\x7fELF", "the ELF header lies outside"),
        (b"\x7fELF\x01\x01" + b"\0" * 60, "a 32-bit ELF file"),
        (b"\x7fELF\x02\x02" + b"\0" * 60, "a big-endian ELF file"),
        (b"\x7fELF\x02\x01\x01" + b"\0" * 9 + struct.pack("<HH", 3, 243) + b"\0" * 44, "machine number 243"),
        (b"\x7fELF\x02\x01\x01" + b"\0" * 9 + struct.pack("<HH", 1, 62) + b"\0" * 44, "ELF type 1"),
    ],
)
def test_other_files_are_named(data: bytes, reason: str) -> None:
    with pytest.raises(ElfError, match=reason):
        ElfFile(data)


def test_foreign_files_are_told_from_broken_ones() -> None:
    with pytest.raises(ElfError) as caught:
        ElfFile(b"\x7fELF\x01\x01" + b"\0" * 60)
    assert caught.value.foreign
    assert caught.value.offset == 4


def test_no_file_and_no_regular_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty.so"
    empty.touch()
    with pytest.raises(ElfError, match="empty"):
        ElfFile.open(str(empty))
    with pytest.raises(ElfError, match="not a regular file"):
        ElfFile.open("/dev/null")
    with pytest.raises(OSError, match="No such file"):
        ElfFile.open(str(tmp_path / "absent"))


@needs_compiler
def test_a_chain_with_a_loop_ends(tmp_path: Path) -> None:
    data = bytearray(build(tmp_path / "l.so", ["a", "b", "c"], [], "-Wl,--hash-style=sysv").read_bytes())
    tables = ElfFile(bytes(data)).tables
    buckets, chains = struct.unpack_from("<II", data, tables.sysv_hash)
    for index in range(buckets):
        struct.pack_into("<I", data, tables.sysv_hash + 8 + 4 * index, 1)
    for index in range(chains):
        struct.pack_into("<I", data, tables.sysv_hash + 8 + 4 * (buckets + index), 1)
    with pytest.raises(ElfError, match="without end"):
        ElfFile(bytes(data)).lookup(b"nowhere")


@needs_compiler
def test_a_gnu_chain_without_end_stops_at_the_end_of_the_file(tmp_path: Path) -> None:
    data = bytearray(build(tmp_path / "l.so", ["a", "b", "c"], [], "-Wl,--hash-style=gnu").read_bytes())
    at = ElfFile(bytes(data)).tables.gnu_hash
    for index in range(at + 16, len(data), 4):
        data[index] &= 0xFE
    with pytest.raises(ElfError):
        read_everything(bytes(data[: len(data) // 4 * 4]))


@needs_compiler
def test_filler_between_moved_tables_is_no_symbol(tmp_path: Path) -> None:
    """patchelf moves the strings away and fills what is left with 0x5A; a file without exports counts no symbols."""
    script = tmp_path / "v.map"
    script.write_text("{ local: *; };")
    path = build(
        tmp_path / "l.so", ["a"], ["puts", "nowhere"], "-Wl,--hash-style=gnu", f"-Wl,--version-script={script}"
    )
    data = bytearray(path.read_bytes())
    tables = ElfFile(bytes(data)).tables
    first = next(s for s in ElfFile(bytes(data)).segments if s.type == module.PT_LOAD)
    assert first.offset == first.vaddr == 0
    assert not any(data[first.filesz : 4096])
    moved = 4096 - tables.strsz
    data[moved:4096] = data[tables.strtab : tables.strtab + tables.strsz]
    data[tables.strtab : tables.strtab + tables.strsz] = b"\x5a" * tables.strsz
    data[first.filesz : moved] = b"\x5a" * (moved - first.filesz)
    # What else patchelf leaves there may look like an undefined symbol with a name outside the strings.
    entry = tables.symtab + -(-(first.filesz - tables.symtab) // 24) * 24
    struct.pack_into("<IBBH", data, entry, 0x5A5A5A5A, 0x10, 0, 0)
    header = 64 + 56 * ElfFile(bytes(data)).segments.index(first)
    struct.pack_into("<QQ", data, header + 32, 4096, 4096)
    entry = data.index(struct.pack("<qQ", module.DT_STRTAB, tables.strtab))
    struct.pack_into("<Q", data, entry + 8, moved)
    file = ElfFile(bytes(data))
    assert {s.name for s in file.undefined()} >= {b"puts", b"nowhere"}
    assert file.symbol_count <= (tables.strtab - tables.symtab) // 24


@needs_compiler
@pytest.mark.parametrize("style", ["gnu", "sysv"])
def test_long_chains_are_walked_a_bounded_number_of_times(tmp_path: Path, style: str) -> None:
    """Every bucket leads to one chain through all symbols: each lookup is bounded, and so are all together."""
    names = [f"name_{n}" for n in range(3000)]
    data = bytearray(build(tmp_path / "l.so", names, [], f"-Wl,--hash-style={style}").read_bytes())
    tables = ElfFile(bytes(data)).tables
    if style == "gnu":
        buckets, first, words, _ = struct.unpack_from("<IIII", data, tables.gnu_hash)
        at = tables.gnu_hash + 16 + 8 * words
        data[tables.gnu_hash + 16 : at] = b"\xff" * 8 * words
        struct.pack_into(f"<{buckets}I", data, at, *[first] * buckets)
        chain = at + 4 * buckets
        hashes = struct.unpack_from("<3000I", data, chain)
        struct.pack_into("<3000I", data, chain, *[value & ~1 for value in hashes[:-1]], hashes[-1] | 1)
    else:
        buckets, chains = struct.unpack_from("<II", data, tables.sysv_hash)
        at = tables.sysv_hash + 8
        struct.pack_into(f"<{buckets}I", data, at, *[1] * buckets)
        struct.pack_into(f"<{chains}I", data, at + 4 * buckets, *range(1, chains), 0)
    file = ElfFile(bytes(data))
    assert not file.lookup(b"nowhere")
    with pytest.raises(ElfError, match="hash chains"):
        any(file.lookup(b"nowhere%d" % number) for number in range(1000))


def test_every_truncation_of_what_is_loaded_is_an_elf_error(library: bytes) -> None:
    end = max(s.offset + s.filesz for s in ElfFile(library).segments if s.type == module.PT_LOAD)
    for size in range(0, end, 61):
        with pytest.raises(ElfError):
            read_everything(library[:size])
    read_everything(library[:end])  # behind it are the section headers, which the loader does not read


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_flipped_bytes_never_do_more_than_raise_elf_error(library: bytes, data: st.DataObject) -> None:
    changed = bytearray(library)
    # Most of the file is padding and code; the headers and tables are in the first 4 KiB and around .dynamic.
    spots = st.integers(0, min(4096, len(changed) - 1)) | st.integers(0, len(changed) - 1)
    for place, value in data.draw(st.lists(st.tuples(spots, st.integers(0, 255)), max_size=12)):
        changed[place] = value
    try:
        read_everything(bytes(changed))
    except ElfError:
        return


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for prefix in (b"", b"\x7fELF\x02\x01\x01" + b"\0" * 9 + struct.pack("<HH", 3, 62)):
        try:
            read_everything(prefix + data)
        except ElfError:  # noqa: PERF203 - each input by itself
            continue


CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"


def test_the_kept_corpus_of_the_fuzzer() -> None:
    cases = sorted(CORPUS.glob("*.bin"))
    assert len(cases) > 20
    for case in cases:
        try:
            read_everything(case.read_bytes())
        except ElfError:  # noqa: PERF203 - each case by itself
            continue


def test_names_are_bounded(library: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAME_TOTAL", 10)
    with pytest.raises(ElfError, match="names of the file"):
        ElfFile(library).undefined()
    monkeypatch.setattr(module, "MAX_UNDEFINED", 1)
    monkeypatch.setattr(module, "MAX_NAME_TOTAL", 1 << 20)
    with pytest.raises(ElfError, match="more than 1 undefined"):
        ElfFile(library).undefined()
