"""Fetching: whatever the network does, a file in the directory is the locked one, and no byte comes twice."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from small_wheels import make_wheel, profile_data, sha256, write_profile

from bedplate.controller import fetch as fetching
from bedplate.controller.download import Download, Stopped
from bedplate.controller.errors import BedplateError
from bedplate.controller.fetch import VERIFIED_FILE, Plan, default_directory, make_plan
from bedplate.controller.locking import make_lock
from bedplate.controller.package_index import INDEX_VARIABLES, default_index
from bedplate.controller.profiles import Profile, load_profile
from bedplate.controller.resolver import Sources, Upgrade

TARGET = "cp312-x86_64"


class Index(ThreadingHTTPServer):
    """A package index with faults.

    content: {file name: bytes}; requested: [(path, Range header)]; ranges: whether ranges are served; cut: bytes
    after which the next answers break off; status: codes that the next answers have; pause: seconds in the middle of
    each answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.pages: dict[str, list[tuple[str, str]]] = {}
        self.requested: list[tuple[str, str]] = []
        self.ranges = True
        self.cut: list[int] = []
        self.status: list[int] = []
        self.pause = 0.0
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple/"

    def add(self, package: str, wheel: Path, digest: str | None = None) -> None:
        self.content[wheel.name] = wheel.read_bytes()
        self.pages.setdefault(package, []).append((wheel.name, sha256(wheel) if digest is None else digest))

    def files_requested(self) -> list[tuple[str, str]]:
        return [(path, header) for path, header in self.requested if path.startswith("files/")]


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        path = self.path.strip("/")
        self.server.requested.append((path, self.headers.get("Range", "")))
        kind, _, name = path.partition("/")
        if kind == "simple":
            links = self.server.pages.get(name)
            page = "".join(f'<a href="/files/{file}#sha256={sha}">{file}</a>' for file, sha in links or ())
            page = page.replace("#sha256=&quot;", "").replace('#sha256="', '"')
            self.answer(200 if links else 404, f"<!DOCTYPE html><html><body>{page}</body></html>".encode(), "text/html")
            return
        if self.server.status:
            self.answer(self.server.status.pop(0), b"", "text/plain")
            return
        body, status = self.server.content[name], 200
        start = int(self.headers.get("Range", "bytes=0-")[6:].rstrip("-"))
        if start and self.server.ranges:
            if start >= len(body):
                self.answer(416, b"", "text/plain")
                return
            body, status = body[start:], 206
        self.answer(status, body, "application/zip", self.server.cut.pop(0) if self.server.cut else None)

    def answer(self, status: int, body: bytes, kind: str, cut: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        body = body[:cut]
        self.wfile.write(body[: len(body) // 2])
        time.sleep(self.server.pause)
        self.wfile.write(body[len(body) // 2 :])
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[Index]:
    with Index() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Event, "wait", quick_wait)


original_wait: Callable[..., bool] = threading.Event.wait


def quick_wait(self: threading.Event, timeout: float | None = None) -> bool:
    # the pauses between tries take half a second and more; everything else that waits has no limit
    return original_wait(self, 0.001 if timeout in (1.0, 2.0, 4.0, 5.0) else timeout)


class Scene:
    """Two locked packages, their wheels, and a place to fetch to."""

    def __init__(self, tmp_path: Path, index: Index) -> None:
        self.wheels = [make_wheel(tmp_path / "wheels", name, "1.0") for name in ("alpha", "beta")]
        write_profile(tmp_path / "profiles", "small", profile_data("alpha==1.0", "beta==1.0", targets=[TARGET]))
        profile = load_profile("small", [tmp_path / "profiles"])
        make_lock(profile, [], Sources(no_index=True, find_links=[str(tmp_path / "wheels")]), Upgrade()).write()
        self.profile: Profile = load_profile("small", [tmp_path / "profiles"])
        self.to = tmp_path / "to"
        self.index = index
        for name, wheel in zip(("alpha", "beta"), self.wheels):
            index.add(name, wheel)

    def plan(self, *, recheck: bool = False) -> Plan:
        return make_plan(self.profile, [], self.to, recheck=recheck, checked=lambda _: None)

    def fetch(self) -> None:
        fetching.fetch(self.profile, self.plan(), self.index.url, lambda *_: None, lambda: None)

    def have(self) -> list[str]:
        return sorted(path.name for path in self.to.iterdir() if path.name != VERIFIED_FILE)

    @property
    def complete(self) -> list[str]:
        return [wheel.name for wheel in self.wheels]


@pytest.fixture
def scene(tmp_path: Path, index: Index) -> Scene:
    return Scene(tmp_path, index)


def test_files_arrive_once(scene: Scene) -> None:
    assert [file.file for file in scene.plan().missing] == sorted(
        scene.complete, key=lambda name: (-len(scene.index.content[name]), name)
    )
    scene.fetch()
    assert scene.have() == scene.complete
    assert [(scene.to / wheel.name).read_bytes() for wheel in scene.wheels] == [w.read_bytes() for w in scene.wheels]
    scene.index.requested.clear()
    scene.fetch()
    assert scene.index.requested == []


def test_interrupted_file_goes_on_where_it_stopped(scene: Scene) -> None:
    scene.to.mkdir()
    for wheel in scene.wheels:
        (scene.to / f"{wheel.name}.part").write_bytes(wheel.read_bytes()[:100])
    scene.fetch()
    assert scene.have() == scene.complete
    assert {header for _, header in scene.index.files_requested()} == {"bytes=100-"}


def test_connection_that_breaks_is_taken_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedplate.controller.download.CHUNK", 16)
    scene.index.cut = [50, 60, 70, 80]
    scene.fetch()
    assert scene.have() == scene.complete
    starts = [int(header[6:-1]) for _, header in scene.index.files_requested() if header]
    assert len(starts) == 4, "each of the four broken answers is followed by one for the rest"
    assert all(start >= 48 for start in starts)


def test_server_without_ranges_starts_over(scene: Scene) -> None:
    scene.index.ranges = False
    scene.to.mkdir()
    (scene.to / f"{scene.complete[0]}.part").write_bytes(b"x" * 10)
    scene.fetch()
    assert scene.have() == scene.complete


@pytest.mark.parametrize("part", [b"x" * 100, b"x" * 10**6])
def test_bad_part_is_replaced(scene: Scene, part: bytes) -> None:
    scene.to.mkdir()
    (scene.to / f"{scene.complete[0]}.part").write_bytes(part)
    scene.fetch()
    assert scene.have() == scene.complete


def test_busy_server_is_asked_again(scene: Scene) -> None:
    scene.index.status = [503, 429, 500]
    scene.fetch()
    assert scene.have() == scene.complete


def test_wrong_file_is_refused_and_the_other_one_kept(scene: Scene) -> None:
    name = scene.complete[0]
    scene.index.content[name] = b"y" * len(scene.index.content[name])
    with pytest.raises(BedplateError) as caught:
        scene.fetch()
    text = str(caught.value)
    assert f"{name}: http" in text
    assert "has another file than the lock: sha256 " in text
    assert f"locked {sha256(scene.wheels[0])}" in text
    assert text.endswith("What arrived is kept; run the same command to go on.")
    assert scene.have() == scene.complete[1:]


def test_truncated_for_good_keeps_the_part(scene: Scene) -> None:
    scene.index.cut = [0] * 100
    with pytest.raises(BedplateError, match="cannot get http"):
        scene.fetch()
    assert set(scene.have()) <= {f"{name}.part" for name in scene.complete}


def test_file_gone_from_the_index(scene: Scene) -> None:
    scene.index.status = [404, 404]
    with pytest.raises(BedplateError, match=r"alpha-1\.0-py3-none-any\.whl: cannot get .*404 Client Error"):
        scene.fetch()
    assert len(scene.index.files_requested()) == 2, "a 404 is not tried again"


def test_index_has_no_such_package_or_hash(scene: Scene) -> None:
    del scene.index.pages["alpha"]
    scene.index.pages["beta"] = [(scene.complete[1], "0" * 64)]
    with pytest.raises(BedplateError) as caught:
        scene.fetch()
    assert f"alpha-1.0-py3-none-any.whl: {scene.index.url} has no package alpha" in str(caught.value)
    assert f"beta-1.0-py3-none-any.whl: {scene.index.url} has no file with the locked sha256" in str(caught.value)


def test_index_without_hashes_is_found_by_name_and_checked(scene: Scene) -> None:
    scene.index.pages = {name: [(wheel.name, '"')] for name, wheel in zip(("alpha", "beta"), scene.wheels)}
    scene.fetch()
    assert scene.have() == scene.complete


def test_index_down(scene: Scene) -> None:
    with pytest.raises(BedplateError, match=r"cannot read the index http://127\.0\.0\.1:9/simple"):
        fetching.fetch(scene.profile, scene.plan(), "http://127.0.0.1:9/simple", lambda *_: None, lambda: None)


def test_credentials_of_the_index_are_used_and_not_shown(scene: Scene) -> None:
    scene.index.pages["beta"] = [(scene.complete[1], "0" * 64)]
    scene.index.status = [404]
    index = scene.index.url.replace("http://", "http://ci:s3cret@")
    with pytest.raises(BedplateError) as caught:
        fetching.fetch(scene.profile, scene.plan(), index, lambda *_: None, lambda: None)
    assert "cannot get http://127.0.0.1" in str(caught.value)
    assert f"{scene.index.url} has no file with the locked sha256" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_the_profiles_index_for_its_packages(scene: Scene) -> None:
    data = profile_data(
        "alpha==1.0", "Beta.X==1.0", indexes=[{"name": "x", "url": "https://x/simple", "packages": ["beta_x"]}]
    )
    profile = load_profile("two", [write_profile(scene.to, "two", data).parent])
    assert fetching.index_of(profile, "beta-x", "default") == "https://x/simple"
    assert fetching.index_of(profile, "alpha", "default") == "default"


def test_damaged_file_of_the_right_size_is_noticed(scene: Scene) -> None:
    scene.fetch()
    path = scene.to / scene.complete[0]
    good = path.read_bytes()
    path.write_bytes(b"z" * len(good))
    assert [file.file for file in scene.plan().missing] == [path.name]
    scene.fetch()
    assert path.read_bytes() == good


def test_known_files_are_not_read_again_unless_asked(scene: Scene) -> None:
    scene.fetch()
    path = scene.to / scene.complete[0]
    stamps = json.loads((scene.to / VERIFIED_FILE).read_text())
    path.write_bytes(b"z" * path.stat().st_size)
    stamps[path.name][1] = path.stat().st_mtime_ns
    (scene.to / VERIFIED_FILE).write_text(json.dumps(stamps))
    assert scene.plan().missing == []
    assert [file.file for file in scene.plan(recheck=True).missing] == [path.name]
    (scene.to / VERIFIED_FILE).write_text("[not json")
    assert [file.file for file in scene.plan().missing] == [path.name]


def test_disk_that_is_too_small(scene: Scene) -> None:
    plan = replace(scene.plan(), free=10)
    with pytest.raises(BedplateError, match=r"has 0\.0 GB free and .* GB are missing: make room"):
        plan.check_space()
    scene.plan().check_space()


def test_disk_that_fills_up(scene: Scene) -> None:
    scene.to.mkdir()
    # /dev/full takes no byte, as a disk without room does
    (scene.to / f"{scene.complete[0]}.part").symlink_to("/dev/full")
    with pytest.raises(BedplateError, match=r"cannot write .*alpha.*\.part: No space left on device"):
        scene.fetch()


def together(*downloads: Download) -> list[BaseException]:
    """Run downloads at the same time; return what they raised."""
    problems: list[BaseException] = []

    def run(download: Download) -> None:
        try:
            with requests.Session() as session:
                download.run(session, lambda _: None, threading.Event())
        except BaseException as error:  # noqa: BLE001  # looked at by the test
            problems.append(error)

    threads = [threading.Thread(target=run, args=(download,)) for download in downloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return problems


@pytest.mark.parametrize("part", [b"", b"first"])
def test_two_fetches_of_one_file_bring_it_once(index: Index, tmp_path: Path, part: bytes) -> None:
    content = b"first" + b"x" * 2_000_000
    index.content["one.whl"], index.pause = content, 0.05
    url, digest = index.url.replace("simple/", "files/one.whl"), hashlib.sha256(content).hexdigest()
    download = Download(url, tmp_path / "one.whl", digest, len(content))
    if part:
        download.part.write_bytes(part)
    assert together(*[download] * 4) == []
    assert download.path.read_bytes() == content
    assert len(index.files_requested()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["one.whl"]


def test_two_fetches_of_different_files_of_one_name_get_their_own(index: Index, tmp_path: Path) -> None:
    contents = {name: name[:1].encode() * 1_000_000 for name in ("a.whl", "b.whl")}
    index.content, index.pause = dict(contents), 0.05
    downloads = [
        Download(index.url.replace("simple/", f"files/{name}"), tmp_path / "one.whl", digest, len(body))
        for name, body in contents.items()
        for digest in [hashlib.sha256(body).hexdigest()]
    ]
    assert together(*downloads) == []
    assert (tmp_path / "one.whl").read_bytes() in contents.values()
    assert len(index.files_requested()) == 2


def test_stop_keeps_the_part(scene: Scene, tmp_path: Path) -> None:
    wheel = scene.wheels[0]
    stop = threading.Event()
    url = scene.index.url.replace("simple/", f"files/{wheel.name}")
    download = Download(url, tmp_path / "one.whl", sha256(wheel), wheel.stat().st_size)
    download.part.write_bytes(wheel.read_bytes()[:100])
    stop.set()
    with requests.Session() as session, pytest.raises(Stopped):
        download.run(session, lambda _: None, stop)
    assert download.part.stat().st_size == 100
    assert not download.path.exists()


@pytest.mark.parametrize(
    "file",
    [
        "../outside/alpha-1.0-py3-none-any.whl",
        "alpha-1.0-1/../../outside/x-py3-none-any.whl",
        "{tmp}/outside/alpha-1.0-py3-none-any.whl",
        "alpha-1.0-py3-none-any.whl\\0",
        ".bedplate-verified.json",
        "alpha-1.0.tar.gz",
    ],
)
def test_a_lock_cannot_name_a_place_outside_the_directory(scene: Scene, tmp_path: Path, file: str) -> None:
    lock = scene.profile.path / "lock.yml"
    lock.write_text(lock.read_text().replace(f"file: {scene.complete[0]}", f'file: "{file.format(tmp=tmp_path)}"'))
    (tmp_path / "outside").mkdir()
    scene.profile = load_profile("small", [tmp_path / "profiles"])
    with pytest.raises(BedplateError) as caught:
        scene.fetch()
    assert re.fullmatch(
        rf"{lock}:\d+: targets\.{TARGET}\.files\[0\]\.file: .* is not the file name of a wheel.*\n"
        r"Write it anew: `bedplate lock small --profiles \S+`",
        str(caught.value),
    )
    assert not list((tmp_path / "outside").iterdir())


def test_unlocked_profile_cannot_be_fetched(scene: Scene, tmp_path: Path) -> None:
    write_profile(tmp_path / "profiles", "new", profile_data())
    with pytest.raises(BedplateError, match="profile new is not locked: run `bedplate lock new"):
        fetching.wanted(load_profile("new", [tmp_path / "profiles"]), [])


def test_defaults_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in INDEX_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    public = default_index()
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.example.com/simple")
    assert default_index() == "https://pip.example.com/simple" != public
    monkeypatch.setenv("UV_DEFAULT_INDEX", "mine=https://uv.example.com/simple")
    assert default_index() == "https://uv.example.com/simple"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_directory() == Path("/somewhere/bedplate/wheels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == Path.home() / ".cache/bedplate/wheels"
