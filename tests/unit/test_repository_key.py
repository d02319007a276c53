"""The module bedplate_repository_key: what comes to be where apt's source, or yum's repository, names its key."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from test_openpgp import KEY, OTHER, OTHER_PRIMARY, PRIMARY, SMUGGLED

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
    result = run_module(MODULE, check=check, key=key, fingerprint=PRIMARY, dest=str(dest))
    assert result["failed"] is True
    assert result["error"] == "packages.mirror"
    assert words in result["msg"]
    assert not dest.parent.exists()


def test_a_place_that_cannot_be_written(run_module: RunModule, dest: Path) -> None:
    dest.parent.write_text("a file")
    result = run_module(MODULE, key=KEY.decode(), fingerprint=PRIMARY, dest=str(dest))
    assert (result["failed"], result["error"]) == (True, "io")
