"""The module bedplate_repository_key: what comes to be where apt's source, or yum's repository, names its key."""

from __future__ import annotations

import base64
import os
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_openpgp import KEY, OTHER, OTHER_PRIMARY, PRIMARY, SMUGGLED

from bedplate.controller.report import failure
from conftest import RunModule

MODULE = "bedplate_repository_key"


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "keyrings" / "mirror.asc"


@pytest.fixture
def offered(tmp_path: Path) -> Path:
    """The file in the repository: as an older gpg writes it."""
    path = tmp_path / "mirror.pub"
    path.write_bytes(KEY.replace(b"-\n\n", b"-\nVersion: GnuPG v2\n\n", 1).replace(b"\n", b"\r\n"))
    return path


def test_check_then_put_then_nothing(run_module: RunModule, dest: Path, offered: Path) -> None:
    options = {"key": offered.as_uri(), "fingerprint": PRIMARY.lower(), "dest": str(dest)}
    seen = run_module(MODULE, check=True, diff=True, **options)
    assert not dest.parent.exists()
    old_mask = os.umask(0o077)
    done = run_module(MODULE, diff=True, **options)
    os.umask(old_mask)
    assert seen["changed"] is done["changed"] is True
    assert seen["diff"] == done["diff"]
    assert (done["diff"]["before"], done["diff"]["after"]) == ("", KEY.decode())
    assert dest.read_bytes() == KEY
    assert stat.S_IMODE(dest.stat().st_mode) == 0o644
    assert stat.S_IMODE(dest.parent.stat().st_mode) == 0o755
    assert [path.name for path in dest.parent.iterdir()] == [dest.name]
    # The repository need not be there any more.
    offered.unlink()
    for check in (True, False):
        again = run_module(MODULE, check=check, diff=True, **options)
        assert (again["changed"], again["diff"]["before"]) == (False, again["diff"]["after"])


@pytest.mark.parametrize("found", [KEY.replace(b"\n", b"\r\n"), OTHER, SMUGGLED, b"", b"no key\n"])
def test_what_is_in_place_becomes_the_pinned_key_alone(
    run_module: RunModule, dest: Path, offered: Path, found: bytes
) -> None:
    dest.parent.mkdir()
    dest.write_bytes(found)
    result = run_module(MODULE, key=str(offered), fingerprint=PRIMARY, dest=str(dest))
    assert result["changed"] is True
    assert dest.read_bytes() == KEY


def test_a_key_that_apt_could_not_read(run_module: RunModule, dest: Path, offered: Path) -> None:
    dest.parent.mkdir()
    dest.write_bytes(KEY)
    dest.chmod(0o600)
    options = {"key": str(offered), "fingerprint": PRIMARY, "dest": str(dest)}
    assert [run_module(MODULE, **options)["changed"] for _ in range(2)] == [True, False]
    assert stat.S_IMODE(dest.stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (OTHER.decode(), f"the file holds {OTHER_PRIMARY}."),
        (SMUGGLED.decode(), "not one armored block"),
        ("/nowhere/key.pub", "The key cannot be read"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_another_key_is_refused_and_nothing_is_there(
    run_module: RunModule, dest: Path, key: str, words: str, check: bool
) -> None:
    result = run_module(MODULE, check=check, key=key, fingerprint=PRIMARY, dest=str(dest), layer="toolkit")
    assert result["failed"] is True
    assert result["error"] == "packages.mirror"
    (verdict,) = failure(result, "Put the key into place", MODULE)["verdicts"]
    assert (verdict["code"], verdict["status"], verdict["layer"]) == ("packages.mirror", "fail", "toolkit")
    assert verdict["action"]
    assert words in result["msg"]
    assert not dest.parent.exists()


def test_a_place_that_cannot_be_written(run_module: RunModule, dest: Path) -> None:
    dest.parent.write_text("a file")
    result = run_module(MODULE, key=KEY.decode(), fingerprint=PRIMARY, dest=str(dest))
    assert (result["failed"], result["error"]) == (True, "io")


class Mirror(BaseHTTPRequestHandler):
    """A mirror that wants a password, sends others away, and a server that does not speak HTTP."""

    def do_GET(self) -> None:
        asked.append((self.path, self.headers.get("Authorization", "")))
        if self.path == "/torn.pub":
            self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        elif self.path == "/moved.pub":
            self.send_response(302)
            self.send_header("Location", "/elsewhere.pub")
            self.end_headers()
        elif self.path == "/closed.pub" and asked[-1][1] != "Basic " + base64.b64encode(b"user:p@w").decode():
            self.send_error(401)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(KEY)

    def log_message(self, *arguments: object) -> None:
        pass


asked: list[tuple[str, str]] = []


@pytest.fixture
def mirror() -> Iterator[str]:
    asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("path", ["torn.pub", "closed.pub", "a key.pub"])
def test_a_server_that_gives_no_key_is_refused_in_words(
    run_module: RunModule, dest: Path, mirror: str, path: str
) -> None:
    result = run_module(MODULE, key=f"http://{mirror}/{path}", fingerprint=PRIMARY, dest=str(dest))
    assert result["error"] == "packages.mirror"
    assert result["msg"].startswith(f"http://{mirror}/{path}: The key cannot be read: ")


def test_an_address_that_makes_no_sense(run_module: RunModule, dest: Path) -> None:
    for address in ("http://host:port/key.pub", "http://[::1/key.pub", "http://host:1\u00b2/key.pub"):
        result = run_module(MODULE, key=address, fingerprint=PRIMARY, dest=str(dest))
        assert (result["error"], result["msg"].split(": The key")[0]) == ("packages.mirror", address)


def test_a_password_in_the_address_is_used_and_not_shown(run_module: RunModule, dest: Path, mirror: str) -> None:
    """Within the address apt takes it, and so does this."""
    options = {"fingerprint": PRIMARY, "dest": str(dest)}
    refused = run_module(MODULE, key=f"http://user:secret@{mirror}/closed.pub", **options)
    assert refused["msg"].startswith(f"http://{mirror}/closed.pub: The key cannot be read: ")
    assert "secret" not in refused["msg"]
    assert run_module(MODULE, key=f"http://user:p%40w@{mirror}/closed.pub", **options)["changed"] is True
    assert dest.read_bytes() == KEY


def test_a_password_with_an_at_sign_is_not_shown_either(run_module: RunModule, dest: Path, mirror: str) -> None:
    refused = run_module(MODULE, key=f"http://user:s3cr@t@{mirror}/closed.pub", fingerprint=PRIMARY, dest=str(dest))
    assert refused["msg"].startswith(f"http://{mirror}/closed.pub: The key cannot be read: ")


def test_a_password_is_not_told_to_whom_the_mirror_names(run_module: RunModule, dest: Path, mirror: str) -> None:
    run_module(MODULE, key=f"http://user:secret@{mirror}/moved.pub", fingerprint=PRIMARY, dest=str(dest))
    assert [(path, bool(header)) for path, header in asked] == [("/moved.pub", True), ("/elsewhere.pub", False)]


@pytest.mark.parametrize("text", ["Key of the mirror:\n" + KEY.decode(), OTHER.decode() + KEY.decode(), "no\nkey\n"])
def test_a_text_that_is_no_key_is_not_taken_for_a_place(run_module: RunModule, dest: Path, text: str) -> None:
    result = run_module(MODULE, key=text, fingerprint=PRIMARY, dest=str(dest))
    assert result["msg"].startswith(f"the key: The key must be {PRIMARY} and no other; ")
    assert "not one armored block" in result["msg"]
