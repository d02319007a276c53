"""Reading wheels in parts: from good servers, from bad ones, and from files that are no wheels."""

from __future__ import annotations

import io
import re
import struct
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from abi_libraries import build, needs_compiler

from bedplate.controller import needs as needs_module
from bedplate.controller.elf_prefix import NeedMore, NotInFront, read_prefix
from bedplate.controller.errors import BedplateError
from bedplate.controller.needs import WheelNeeds, cached_needs, keep_needs, read_needs
from bedplate.controller.range_reader import LocalSource, RangeError, RemoteSource, RemoteWheel
from bedplate.node.abi.elf import ElfFile

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve bytes at a URL in one of several ways: serve(data, how)."""
    servers = []

    def start(data: bytes, how: str = "good") -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                return

            def do_GET(self) -> None:
                wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
                assert wanted
                if how == "404":
                    self.send_error(404)
                    return
                if how == "whole":
                    self.answer(200, data, None)
                    return
                first, last = wanted.groups()
                start = int(first) if first else max(0, len(data) - int(last))
                end = min(int(last) + 1 if first and last else len(data), len(data))
                body = data[start:end]
                described = f"bytes {start}-{end - 1}/{len(data)}"
                if how == "shifted":
                    described = f"bytes {start + 1}-{end}/{len(data)}"
                if how == "no header":
                    described = ""
                self.answer(206, body, described)

            def answer(self, status: int, body: bytes, described: str | None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if described:
                    self.send_header("Content-Range", described)
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if how == "cut" else body)
                if how == "cut":
                    self.close_connection = True

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/x.whl"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def wheel_bytes(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


class Memory:
    """Bytes as a source."""

    def __init__(self, data: bytes) -> None:
        self.data, self.name, self.size, self.bytes_read = data, "memory.whl", len(data), 0

    def read_at(self, offset: int, size: int) -> bytes:
        self.bytes_read += size
        return self.data[offset : offset + size]


def test_parts_of_a_remote_file(serve: Serve) -> None:
    data = bytes(range(256)) * 1000
    for size in (len(data), None):
        source = RemoteSource(serve(data), size)
        assert source.size == len(data)
        assert source.read_at(1000, 50) == data[1000:1050]
        assert source.read_at(len(data) - 10, 50) == data[-10:]
        assert source.read_at(len(data), 5) == b""
        assert 60 <= source.bytes_read <= 70_000


@pytest.mark.parametrize(
    ("how", "message", "unsupported"),
    [
        ("404", "404", False),
        ("whole", "whole files only", True),
        ("shifted", "asked for bytes", True),
        ("no header", "Content-Range", True),
        ("cut", "failed 3 times", False),
    ],
)
def test_bad_servers_are_named(serve: Serve, how: str, message: str, unsupported: bool) -> None:
    with pytest.raises(RangeError, match=message) as caught:
        RemoteSource(serve(b"x" * 5000, how), 5000).read_at(10, 1000)
    assert caught.value.unsupported is unsupported


def test_a_size_that_is_wrong_is_noticed(serve: Serve) -> None:
    with pytest.raises(RangeError, match="asked for bytes"):
        RemoteSource(serve(b"x" * 5000), 6000).read_at(10, 100)


def test_nobody_there() -> None:
    with pytest.raises(RangeError, match="Try again later"):
        RemoteSource("http://127.0.0.1:9/x.whl", 100).read_at(0, 10)


@pytest.mark.parametrize("data", [b"", b"no zip", b"PK\3\4" + b"\0" * 100, b"PK\5\6" + b"\xff" * 18])
def test_what_is_no_zip(data: bytes) -> None:
    with pytest.raises(BedplateError, match="not a wheel"):
        RemoteWheel(Memory(data))


def test_members_are_inflated_in_pieces() -> None:
    content = b"abc" * 500_000
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        wheel = RemoteWheel(Memory(wheel_bytes({"a.so": content, "b": b"b"}, method)))
        assert b"".join(wheel.inflate("a.so", chunk=1000)) == content
        assert wheel.read("b", 10) == b"b"
        with pytest.raises(BedplateError, match="1500000 bytes"):
            wheel.read("a.so", 10)


def test_a_bomb_is_cut_at_the_size_the_directory_promises() -> None:
    data = bytearray(wheel_bytes({"a.so": b"\0" * 10_000_000}))
    at = data.rindex(b"PK\1\2")
    data[at + 24 : at + 28] = (100).to_bytes(4, "little")
    with pytest.raises(BedplateError, match="larger than its directory entry says"):
        list(RemoteWheel(Memory(bytes(data))).inflate("a.so"))


def test_damaged_members_are_named() -> None:
    good = wheel_bytes({"a.so": bytes(range(256)) * 100})
    at = good.rindex(b"PK\1\2")
    for change, message in (
        (lambda d: d.__setitem__(slice(0, 4), b"XXXX"), "not where the directory says"),
        (lambda d: d.__setitem__(slice(at + 10, at + 12), b"\x63\0"), "compressed by method 99"),
        (lambda d: d.__setitem__(slice(40, 60), b"\xff" * 20), "damaged|early|larger"),
        (lambda d: d.__setitem__(slice(at + 24, at + 28), b"\xff\xff\0\0"), "ends early"),
    ):
        data = bytearray(good)
        change(data)
        with pytest.raises(BedplateError, match=message):
            list(RemoteWheel(Memory(bytes(data))).inflate("a.so"))


def test_odd_member_names_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = wheel_bytes({"../../evil.so": b"x", "/abs.so": b"y"})
    result = read_needs(RemoteWheel(Memory(data)), "x.whl", "")
    assert len(result.files) == 2
    assert all("not an ELF file" in file.error for file in result.files)
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_not_utf8_are_refused() -> None:
    data = wheel_bytes({"nam\u00e9.so": b"z"}).replace("\u00e9".encode(), b"\xff\xfe")
    with pytest.raises(BedplateError, match="not a wheel"):
        RemoteWheel(Memory(data))


def test_what_is_inside_instead_of_shared_objects() -> None:
    members = {
        "script.so": b"INPUT(-lfoo)",
        "archive.so": b"!<arch>\n",
        "small.so": b"",
        "thirtytwo.so": b"\x7fELF\1\1" + b"\0" * 80,
    }
    result = read_needs(RemoteWheel(Memory(wheel_bytes(members))), "x.whl", "")
    errors = {file.file: file.error for file in result.files}
    assert "linker script" in errors["script.so"]
    assert "archive" in errors["archive.so"]
    assert errors["small.so"]
    assert "32-bit" in errors["thirtytwo.so"]


@needs_compiler
@pytest.mark.parametrize("style", ["gnu", "both", "sysv"])
def test_the_beginning_of_a_file_tells_the_same_as_the_whole(tmp_path: Path, style: str) -> None:
    exports = [f"_Z{len(str(n)) + 1}f{n}v" for n in range(40)]
    needs = ["puts", "memcpy", "nowhere", "also_nowhere"]
    path = build(tmp_path / "libx.so", exports, needs, f"-Wl,--hash-style={style}", "-Wl,-soname,libx.so.1", weak=["w"])
    content = path.read_bytes() + b"\0" * 300_000
    result = read_needs(RemoteWheel(Memory(wheel_bytes({"libx.so": content}))), "x.whl", "")
    file, whole = result.files[0], ElfFile(content)
    assert file.how == ("whole" if style == "sysv" else "prefix")
    assert {name for name, _, _, _ in file.undefined} == {s.name.decode() for s in whole.undefined()}
    assert file.needed == whole.needed
    assert file.soname == "libx.so.1"
    assert sorted(file.versions) == sorted((v.name.decode(), v.file.decode()) for v in whole.needed_versions())


@needs_compiler
def test_the_beginning_with_definitions_of_versions(tmp_path: Path) -> None:
    script = tmp_path / "v.map"
    script.write_text("V1 { global: a; }; V2 { global: b; } V1;")
    data = (
        build(tmp_path / "v.so", ["a", "b"], ["puts"], f"-Wl,--version-script={script}").read_bytes() + b"\0" * 200_000
    )
    elf, libraries = read_prefix(data)
    assert {(s.name, s.version) for s in elf.undefined()} == {(s.name, s.version) for s in ElfFile(data).undefined()}
    assert elf.lookup(b"b", b"V2")
    assert not elf.lookup(b"a", b"V2")
    assert "libc.so.6" in libraries


def test_too_little_and_something_else() -> None:
    with pytest.raises(NeedMore):
        read_prefix(b"\x7fELF")
    header = ElfFile.__module__ and b"\x7fELF\x02\x01\x01" + b"\0" * 9 + b"\x03\0\x3e\0" + b"\0" * 12 + (64).to_bytes(
        8, "little"
    )
    header += b"\0" * 14 + (56).to_bytes(2, "little") + (1).to_bytes(2, "little") + b"\0" * 6
    with pytest.raises((NotInFront, NeedMore)):
        read_prefix(header + b"\0" * 70_000)


def test_a_file_full_of_beginnings_is_given_up_soon() -> None:
    """Every eighth byte looks like a hash table of 65536 buckets, and each of them ends in nothing."""
    header = b"\x7fELF\x02\x01\x01" + b"\0" * 9 + b"\x03\0\x3e\0" + b"\0" * 12 + (64).to_bytes(8, "little")
    header += b"\0" * 14 + (56).to_bytes(2, "little") + (1).to_bytes(2, "little") + b"\0" * 6
    data = header + b"\0" * 56 + struct.pack("<IIII", 1 << 16, 1, 1 << 16, 5) * 80_000
    began = time.monotonic()
    with pytest.raises(NotInFront):
        read_prefix(data)
    assert time.monotonic() - began < 3


def test_the_cache_keeps_and_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_CACHE", str(tmp_path))
    kept = WheelNeeds(
        "x.whl", "a" * 64, 5, ["torch==1"], [needs_module.FileNeeds("f.so", undefined=[("n", "", "", False)])], 9
    )
    assert cached_needs("a" * 64) is None
    keep_needs(kept)
    again = cached_needs("a" * 64)
    assert again is not None
    assert again.files == kept.files
    assert again.bytes_read == 0
    (tmp_path / "abi" / f"{'a' * 64}.json").write_text("{cut")
    assert cached_needs("a" * 64) is None
    assert cached_needs("../../etc/passwd") is None
    monkeypatch.setenv("BEDPLATE_CACHE", "/proc/nowhere")
    keep_needs(kept)  # no cache is no failure


def test_a_local_source(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    source = LocalSource(path)
    assert source.read_at(8, 10) == b"89"
    assert source.bytes_read == 2
    source.close()
