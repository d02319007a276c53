"""`bedplate abi` as a user sees it, over small wheels and a small index."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from abi_libraries import CHECK_INT, CHECK_UNSIGNED, build, environment, needs_compiler
from typer.testing import CliRunner

from bedplate.controller.abi_check import check_lock, check_wheels
from bedplate.controller.abi_cli import app
from bedplate.controller.abi_index import load_index, read_torch_wheel, save_index
from bedplate.controller.abi_sources import from_requirement
from bedplate.controller.errors import BedplateError
from bedplate.controller.range_reader import LocalSource, RemoteWheel
from bedplate.node.abi.exports import Release, TorchIndex

pytestmark = needs_compiler
NAME = "ext-1.0-cp310-abi3-manylinux2014_x86_64.whl"


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small index of three releases, and a cache of its own."""
    monkeypatch.setenv("BEDPLATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BEDPLATE_ABI_INDEX", str(tmp_path / "torch.idx"))
    content = TorchIndex()
    foo = "_ZN3c106SymInt3fooEv"
    common = {"provides": ["libc10.so", "libc10_cuda.so"]}
    layouts = {"c10::KernelFunction": [40, 8]}
    for version, cuda, names, size in (
        ("2.8.0", "12.8", [CHECK_INT], 32),
        ("2.9.1", "12.8", [CHECK_INT, foo], 40),
        ("2.10.0", "13.0", [CHECK_UNSIGNED, foo], 40),
    ):
        layout = {"c10::KernelFunction": [size, 8]} if size != 40 else layouts
        content.add(Release(version, cuda=cuda, layout=layout, **common), {"libc10_cuda.so": names})
    save_index(content, tmp_path / "torch.idx")
    return tmp_path / "torch.idx"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path, [CHECK_INT, "_ZN3c106SymInt3fooEv"])


def make_wheel(place: Path, needs: list[str]) -> Path:
    lib = place / "lib"
    build(lib / "libc10_cuda.so", needs, [], "-Wl,-soname,libc10_cuda.so")
    file = build(place / "k.abi3.so", ["PyInit_k"], needs, f"-L{lib}", "-lc10_cuda")
    path = place / NAME
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, "ext/k.abi3.so")
        archive.writestr("ext-1.0.dist-info/METADATA", "Name: ext\nRequires-Dist: torch==2.9.1\n\nLong text")
    return path


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_solve_a_wheel(wheel: Path) -> None:
    out = run("solve", str(wheel))
    assert out.startswith("ext 1.0: torch 2.9.1\n")
    assert "2.10.0" in out
    assert "parameter 4 is unsigned int instead of int" in out
    data = json.loads(run("solve", str(wheel), "--json"))
    assert data["satisfied_by"] == ["2.9.1"]
    assert set(data["reasons"]) == {"2.8.0", "2.10.0"}
    assert data["reasons"]["2.10.0"][0]["code"] == "abi.undefined_symbol"
    assert data["files"][0]["requires"] == ["torch==2.9.1"]
    assert data["bytes_read"] == data["files"][0]["bytes_read"] > 0


def test_solve_without_an_answer(wheel: Path) -> None:
    out = run("solve", str(wheel), "--cuda", "13.0", code=1)
    assert "no release of torch in the index" in out


@pytest.mark.parametrize(
    "argument", ["not a requirement", "ext @ https://example.com/x.whl", "absent-1.0-py3-none-any.whl"]
)
def test_solve_of_nonsense(argument: str) -> None:
    run("solve", argument, code=1)


def test_check_wheels_and_environments(wheel: Path, tmp_path: Path) -> None:
    assert "pass" in run("check", str(wheel), "--torch", "2.9.1")
    failed = run("check", str(wheel), "--torch", "2.10.0", code=1)
    assert "abi.undefined_symbol" in failed
    assert "Use torch 2.9.1, or a ext built for torch 2.10.0." in failed
    run("check", str(wheel), "--torch", "7.7", code=1)
    site = environment(tmp_path / "env", CHECK_UNSIGNED, "2.10.0")
    data = json.loads(run("check", str(site), "--json", code=1))
    codes = [v["code"] for v in data[0]["verdicts"]]
    assert "abi.undefined_symbol" in codes
    run("check", "no-such-profile", code=1)


def torch_wheel(place: Path, exports: list[str], version: str = "2.9.1") -> Path:
    """Return a wheel of a torch of one's own, without a local version in its name."""
    library = build(place / "libc10_cuda.so", exports, [], "-Wl,-soname,libc10_cuda.so")
    path = place / f"torch-{version}-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(library, "torch/lib/libc10_cuda.so")
        archive.writestr("torch/version.py", f"__version__ = '{version}'\ncuda: Optional[str] = '12.8'\n")
    return path


def test_a_torch_wheel_is_read_unless_the_index_has_that_very_file(wheel: Path, tmp_path: Path, index: Path) -> None:
    absent = tmp_path / "torch-2.9.1-cp311-cp311-nonexistent.whl"
    assert "cannot be read" in run("check", str(absent), str(wheel), code=1)
    own = torch_wheel(tmp_path / "own", [CHECK_UNSIGNED])
    assert "abi.undefined_symbol" in run("check", str(own), str(wheel), code=1)
    content = TorchIndex.load(str(index))
    release = content.release("2.9.1")
    assert release
    record = {"file": own.name, "sha256": hashlib.sha256(own.read_bytes()).hexdigest(), "size": own.stat().st_size}
    release.wheels.append(record)
    save_index(content, index)
    assert "pass" in run("check", str(own), str(wheel))


def test_explain(wheel: Path, tmp_path: Path) -> None:
    out = run("explain", str(wheel))
    assert "torch: libc10_cuda.so: 2 symbols" in out
    assert "c10::SymInt::foo()  [_ZN3c106SymInt3fooEv]: since 2.9.1" in out
    assert "until 2.9.1" in out
    data = json.loads(run("explain", str(tmp_path / "k.abi3.so"), "--json"))
    assert data[0]["providers"]["torch: libc10_cuda.so"]
    run("explain", str(wheel), "--member", "nothing", code=1)
    run("explain", str(tmp_path / "absent.so"), code=1)


def test_diff() -> None:
    out = run("diff", "2.9.1", "2.10.0")
    assert out.startswith("torch 2.9.1 to 2.10.0: 1 changed, 0 gone, 0 new")
    assert "~ c10::cuda::c10_cuda_check_implementation(int, char const*, char const*, int, bool)  ->" in out
    assert "c10::KernelFunction: 32 -> 40 bytes" in run("diff", "2.8.0", "2.9.1")
    assert json.loads(run("diff", "2.9.1", "2.10.0", "--scope", "at::", "--json"))["changed"] == []
    run("diff", "2.9.1", "0.0", code=1)


def test_index_list_and_add(tmp_path: Path, index: Path) -> None:
    assert "2.10.0" in run("index", "list")
    assert len(json.loads(run("index", "list", "--json"))["releases"]) == 3
    run("index", "add", code=1)
    library = build(tmp_path / "libc10.so", ["mine"], [], "-Wl,-soname,libc10.so")
    own = tmp_path / "torch-2.12.0.dev20260101+cu130-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(own, "w") as archive:
        archive.write(library, "torch/lib/libc10.so")
        archive.writestr("torch/version.py", "cuda = '13.0'\n")
    before = index.read_bytes()
    run("index", "add", "--private", str(own))
    assert index.read_bytes() == before
    assert "2.12.0.dev20260101+cu130" in run("index", "list")


# -- a package index


@pytest.fixture
def server(wheel: Path) -> Iterator[dict[str, Any]]:
    """A package index with one project; `ranges` turns range support off, `files` is what it serves."""
    state: dict[str, Any] = {"ranges": True, "files": {NAME: wheel.read_bytes()}}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            return

        def do_GET(self) -> None:
            if self.path == "/simple/ext/":
                entries = [
                    {
                        "filename": n,
                        "url": f"/files/{n}",
                        "hashes": {"sha256": hashlib.sha256(d).hexdigest()},
                        "size": len(d),
                    }
                    for n, d in state["files"].items()
                ]
                if "page" in state:
                    self.reply(200, state["page"][0], [("Content-Type", state["page"][1])])
                    return
                body = json.dumps({"meta": {"api-version": "1.1"}, "name": "ext", "files": entries}).encode()
                self.reply(200, body, [("Content-Type", "application/vnd.pypi.simple.v1+json")])
            elif self.path.startswith("/files/") and self.path[7:] in state["files"]:
                data = state.get("swap") or state["files"][self.path[7:]]
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if wanted and state["ranges"]:
                    first, last = int(wanted.group(1)), min(int(wanted.group(2)), len(data) - 1)
                    described = f"bytes {first}-{last}/{len(data)}"
                    self.reply(206, data[first : last + 1], [("Content-Range", described)])
                else:
                    self.reply(200, data, [])
            else:
                self.reply(404, b"", [])

        def reply(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
            self.send_response(status)
            for name, value in [*headers, ("Content-Length", str(len(body)))]:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    state["url"] = f"http://127.0.0.1:{http.server_address[1]}/simple/"
    yield state
    http.shutdown()
    http.server_close()


def solve(server: dict[str, Any], *arguments: str, code: int = 0) -> dict[str, Any]:
    out = run("solve", *arguments, "--index-url", server["url"], "--python", "3.11", "--json", code=code)
    return json.loads(out) if code == 0 else {}


def test_a_requirement_is_read_by_range_and_then_from_the_cache(server: dict[str, Any]) -> None:
    first = solve(server, "ext==1.0")
    assert first["satisfied_by"] == ["2.9.1"]
    assert first["files"][0]["how"] == "range"
    assert first["files"][0]["sha256"] == hashlib.sha256(server["files"][NAME]).hexdigest()
    again = solve(server, "ext")
    assert again["files"][0]["how"] == "cache"
    assert again["bytes_read"] == 0


def test_a_server_without_ranges_is_downloaded_once(server: dict[str, Any]) -> None:
    server["ranges"] = False
    result = solve(server, "ext==1.0")
    assert result["files"][0]["how"] == "download"
    assert result["bytes_read"] == len(server["files"][NAME])
    assert result["satisfied_by"] == ["2.9.1"]


def test_several_files_of_one_version_are_judged_one_by_one(server: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = make_wheel(tmp_path / "other", [CHECK_UNSIGNED]).read_bytes()
    server["files"]["ext-1.0-2-cp310-abi3-manylinux2014_x86_64.whl"] = other
    result = solve(server, "ext==1.0")
    assert result["satisfied_by"] == ["2.10.0"]  # the build tag wins, as with installers
    by_digest = {f["sha256"]: f["satisfied_by"] for f in result["files"]}
    assert by_digest[hashlib.sha256(other).hexdigest()] == ["2.10.0"]
    assert by_digest[hashlib.sha256(server["files"][NAME]).hexdigest()] == ["2.9.1"]


def test_what_the_index_does_not_have(server: dict[str, Any]) -> None:
    for requirement in ("ext==9.9", "nothing==1.0"):
        solve(server, requirement, code=1)
    server["files"] = {NAME: b"not a zip"}
    solve(server, "ext==1.0", code=1)


def test_a_lock_is_checked_from_directories_and_then_from_the_cache(tmp_path: Path, server: dict[str, Any]) -> None:
    from bedplate.controller.abi_sources import from_lock
    from bedplate.controller.schema import LockedFile

    data = server["files"][NAME]
    locked = [
        LockedFile(name="ext", version="1.0", file=NAME, size=len(data), sha256=hashlib.sha256(data).hexdigest()),
        LockedFile(name="pure", version="1", file="pure-1-py3-none-any.whl", size=1, sha256="0" * 64),
    ]
    extensions, looked = from_lock(locked, find_links=[tmp_path])
    assert [e.label for e in extensions] == ["ext 1.0"]
    assert looked[0].how == "file"
    assert from_lock(locked)[1][0].how == "cache"


def lock_of(wheels: list[Path], torch: str, target: str = "cp311-x86_64") -> Any:
    """Return what the check asks of a profile: the locked wheels, and a torch of this version that is not at hand."""
    from bedplate.controller.schema import LockedFile

    files = [
        LockedFile(name=p.name.split("-")[0], version="1.0", file=p.name, size=p.stat().st_size, sha256=digest(p))
        for p in wheels
    ]
    name = f"torch-{torch}-{target.split('-')[0]}-none-linux_{target.split('-')[1]}.whl"
    files.append(LockedFile(name="torch", version=torch, file=name, size=1, sha256="1" * 64))
    stack = SimpleNamespace(indexes=[], glibc="")
    data = SimpleNamespace(stack=stack, expect=SimpleNamespace(arch=""))
    return SimpleNamespace(name="p", data=data, target_lock=lambda _: SimpleNamespace(files=files))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.9.1", "pass"), ("2.9.1+cu128", "pass"), ("2.9.1+cpu", "inconclusive"), ("2.9.1+rocm6.4", "inconclusive")],
)
def test_the_public_build_stands_for_builds_with_cuda_only(wheel: Path, version: str, status: str) -> None:
    verdicts = check_lock(lock_of([wheel], version), "cp311-x86_64", find_links=[wheel.parent])
    assert [v.status for v in verdicts] == [status], verdicts


def test_an_index_says_nothing_of_another_machine(wheel: Path) -> None:
    (verdict,) = check_lock(lock_of([wheel], "2.9.1", "cp311-aarch64"), "cp311-aarch64", find_links=[wheel.parent])
    assert verdict.status == "inconclusive"
    assert "aarch64" in verdict.message


def test_an_extension_for_another_machine_fails(wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / NAME
    other.parent.mkdir()
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(other, "w") as target:
        for member in source.namelist():
            data = bytearray(source.read(member))
            if member.endswith(".so"):
                data[18:20] = (183).to_bytes(2, "little")  # e_machine: EM_AARCH64
            target.writestr(member, bytes(data))
    assert "an ELF file for aarch64" in run("check", str(other), "--torch", "2.9.1", code=1)


def test_a_member_for_32_bits_is_listed_apart(wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("ext/helper32.so", b"\x7fELF\x01\x01" + b"\0" * 90)
    report, _ = check_wheels([wheel], "2.9.1")
    assert [v.status for v in report.verdicts] == ["pass"]
    assert [a["file"] for a in report.apart] == ["ext/helper32.so"]


def test_a_file_is_not_believed_by_its_name(tmp_path: Path, server: dict[str, Any]) -> None:
    from bedplate.controller.abi_sources import from_lock
    from bedplate.controller.needs import cached_needs
    from bedplate.controller.schema import LockedFile

    (tmp_path / "other").mkdir()
    other = make_wheel(tmp_path / "other", [CHECK_UNSIGNED])
    data = server["files"][NAME]
    digest = hashlib.sha256(data).hexdigest()
    locked = LockedFile(name="ext", version="1.0", file=NAME, size=len(data), sha256=digest)
    _, looked = from_lock([locked], find_links=[other.parent], indexes={"ext": server["url"]})
    assert looked[0].how == "range"
    needs = cached_needs(digest)
    assert needs
    assert [n for n, *_ in needs.files[0].undefined if n == CHECK_UNSIGNED] == []
    (tmp_path / "cache" / "abi" / f"{digest}.json").unlink()
    assert from_lock([locked], find_links=[other.parent, tmp_path])[1][0].how == "file"


def test_the_index_of_the_environment(server: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"mine={server['url']}")  # uv's form of a named index
    assert json.loads(run("solve", "ext", "--python", "3.11", "--json"))["satisfied_by"] == ["2.9.1"]


SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"no JSON", SIMPLE_JSON),
        (b"{}", SIMPLE_JSON),
        (b'{"meta": {"api-version": "9.0"}, "name": "ext", "files": []}', SIMPLE_JSON),
        (b"x", "image/png"),
    ],
)
def test_an_index_that_is_none(server: dict[str, Any], body: bytes, kind: str) -> None:
    server["page"] = (body, kind)
    result = CliRunner().invoke(app, ["solve", "ext", "--index-url", server["url"], "--python", "3.11"])
    assert result.exit_code == 1
    assert f"error: cannot read the index {server['url']}" in result.output


def test_a_download_that_is_another_file(server: dict[str, Any]) -> None:
    server["ranges"] = False
    server["swap"] = b"another file"
    result = CliRunner().invoke(app, ["solve", "ext", "--index-url", server["url"], "--python", "3.11"])
    assert result.exit_code == 1
    assert "is not the one that it announces" in result.output


@pytest.mark.parametrize("python", ["3", "foo", "cp312", "2.7", "3.12.1"])
def test_a_python_that_is_no_version_is_named(python: str) -> None:
    with pytest.raises(BedplateError, match=rf"^{python} is not a version of Python .* such as 3\.12"):
        from_requirement("ext", python=python)


def test_a_full_disk_is_named(server: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    server["ranges"] = False
    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    with pytest.raises(BedplateError, match=rf"^{NAME}: .*: No space left on device\. Make room .* TMPDIR"):
        from_requirement("ext", index_url=server["url"])


def test_a_member_beyond_the_end_is_named(wheel: Path) -> None:
    opened = RemoteWheel(LocalSource(wheel))
    opened.members["ext/k.abi3.so"].header_offset = 2**64 - 1
    with pytest.raises(BedplateError, match=r"ext/k\.abi3\.so' is not where the directory says"):
        opened.read("ext/k.abi3.so", 1 << 30)


def test_a_damaged_torch_wheel_is_named(tmp_path: Path) -> None:
    path = tmp_path / "torch-2.9.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("torch/version.py", "x = 1\n" * 100)
    data = bytearray(path.read_bytes())
    data[46:50] = b"\xff" * 4  # past the header of 30 bytes and the name of 16
    path.write_bytes(data)
    with pytest.raises(BedplateError, match=r"cannot be read as a wheel of torch: .*\. Get it again"):
        read_torch_wheel(path)


def test_a_broken_private_index_is_the_one_named(index: Path) -> None:
    private = index.parent / "torch-x86_64.private.idx"
    private.write_bytes(b"nonsense")
    with pytest.raises(BedplateError, match=rf"^{private} is not usable: "):
        load_index()


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["check", "ext-1-py3-none-any.whl", "--arch", "90"], "--arch"),
        (["check", "some-profile", "--arch", "90"], "--arch"),
        (["check", "some-profile", "--torch", "2.9.1"], "--torch"),
        (["check", "./env", "--torch", "2.9.1"], "--torch"),
        (["index", "add", "2.9.1", "--since", "2.8.0"], "--since"),
    ],
)
def test_an_option_that_would_not_count_is_refused(arguments: list[str], option: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert f"{option} is only for " in result.output
