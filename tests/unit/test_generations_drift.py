"""What counts as a change to a sealed environment, and that looking for it is quick."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from generation_tools import install

from bedplate.node.state.drift import inspect, write_manifest
from bedplate.node.state.durable import StateError


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    install(str(tmp_path))
    (tmp_path / "venv" / "bin" / "python").symlink_to("/proc/self/exe")
    write_manifest(str(tmp_path))
    return tmp_path


def site(generation: Path) -> Path:
    return generation / "venv" / "lib" / "python3.11" / "site-packages"


def test_untouched(sealed: Path) -> None:
    assert not inspect(str(sealed))
    (site(sealed) / "dist0" / "__pycache__").mkdir()
    (site(sealed) / "dist0" / "__pycache__" / "m0.cpython-311.pyc").write_bytes(b"x")
    (site(sealed) / "__pycache__").mkdir()
    (sealed / "cache").mkdir()
    assert not inspect(str(sealed)), "bytecode and caches are no change"


def edit(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.parametrize(
    ("change", "counts", "item"),
    [
        (lambda s: edit(site(s) / "dist1" / "m2.py", "longer"), {"file_changed": 1}, "dist1/m2.py: 6 bytes, RECORD"),
        (lambda s: (time.sleep(0.02), edit(site(s) / "dist1" / "m2.py", "!!")), {"file_changed": 1}, "after the build"),
        (lambda s: (site(s) / "dist0" / "m1.py").unlink(), {"file_missing": 1}, "dist0/m1.py: missing"),
        (lambda s: (s / "venv/bin/dist1").unlink(), {"file_missing": 1}, "bin/dist1: missing"),
        (lambda s: (s / "venv/bin/python").unlink(), {"file_missing": 1}, "interpreter"),
        (lambda s: os.rename(site(s) / "dist0-1.0.dist-info", site(s) / "dist0-2.0.dist-info"),
         {"dist_missing": 1, "dist_extra": 1, "file_missing": 1}, "dist0-1.0.dist-info: was installed and is gone"),
        (lambda s: (site(s) / "new-1.0.dist-info").mkdir(), {"dist_extra": 1}, "not installed by Bedplate"),
        (lambda s: (site(s) / "evil.pth").write_text("import os"), {"entry_extra": 1}, "evil.pth: was added"),
        (lambda s: os.rename(site(s) / "dist0", s / "away"), {"entry_missing": 1, "file_missing": 3}, "dist0: is gone"),
        (lambda s: (s / "manifest.json").unlink(), {"manifest": 1}, "missing or damaged"),
        (lambda s: (s / "manifest.json").write_text('{"dists": 3}'), {"manifest": 1}, "missing or damaged"),
        (lambda s: (s / "manifest.json").write_bytes(b"\xff{"), {"manifest": 1}, "missing or damaged"),
    ],
)  # fmt: skip
def test_changes(sealed: Path, change: object, counts: dict[str, int], item: str) -> None:
    change(sealed)  # type: ignore[operator]
    drift = inspect(str(sealed))
    assert drift.counts == counts
    assert item in drift.items[0]
    assert drift.items[0] in drift.sentence()


def test_a_file_replaced_by_a_link_is_a_change(sealed: Path) -> None:
    path = site(sealed) / "dist0" / "m2.py"
    path.rename(sealed / "aside")
    path.symlink_to(sealed / "aside")
    assert inspect(str(sealed)).items == ["lib/python3.11/site-packages/dist0/m2.py: not a regular file"]


def test_an_edited_record_is_a_change(sealed: Path) -> None:
    with (site(sealed) / "dist0-1.0.dist-info" / "RECORD").open("a") as file:
        file.write("dist0/extra.py,,\n")
    assert inspect(str(sealed)).counts["dist_changed"] == 1


@pytest.mark.parametrize(
    ("content", "item"),
    [
        (
            b"\0" * (200 << 10),
            "RECORD: cannot be read as a list of files",
        ),  # power was lost before the data were written
        (b'"' + b"x" * (200 << 10), "RECORD: cannot be read as a list of files"),
        (b"dist0/m\0.py,sha256=x,1\n", "m\0.py: missing"),
    ],
)
def test_a_damaged_record_is_a_change_and_no_crash(sealed: Path, content: bytes, item: str) -> None:
    (site(sealed) / "dist0-1.0.dist-info" / "RECORD").write_bytes(content)
    drift = inspect(str(sealed))
    assert drift.counts["dist_changed"] == 1
    assert any(item in text for text in drift.items), drift.items


def test_an_environment_can_be_sealed_whatever_a_record_holds(sealed: Path) -> None:
    (site(sealed) / "dist0-1.0.dist-info" / "RECORD").write_bytes(b"\0" * (200 << 10))
    write_manifest(str(sealed))
    assert not inspect(str(sealed))


def test_two_wheels_that_own_one_file_are_no_change(tmp_path: Path) -> None:
    base = Path(install(str(tmp_path)))
    with (base / "dist1-1.0.dist-info" / "RECORD").open("a") as file:
        file.write("dist0/m1.py,sha256=x,999\n")
    assert len(write_manifest(str(tmp_path))["known"]) == 1
    assert not inspect(str(tmp_path))


def test_records_that_point_outside_are_not_followed(tmp_path: Path) -> None:
    base = Path(install(str(tmp_path)))
    with (base / "dist1-1.0.dist-info" / "RECORD").open("a") as file:
        file.write('/etc/passwd,sha256=x,1\n../../../../../../../etc/passwd,sha256=x,1\n"odd\n,,\nonly-one\n')
    manifest = write_manifest(str(tmp_path))
    assert manifest["known"] == {}
    assert manifest["files"] == 10


def test_only_the_first_twenty_are_named(sealed: Path) -> None:
    install(str(sealed), dists=40)
    drift = inspect(str(sealed))
    assert len(drift.items) == 20
    assert drift.counts["dist_extra"] == 38


def test_nothing_installed_cannot_be_sealed(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="holds no installed distribution"):
        write_manifest(str(tmp_path))


def test_25000_files_are_quick(tmp_path: Path) -> None:
    install(str(tmp_path), dists=50, files=500)
    assert write_manifest(str(tmp_path))["files"] == 25100
    best = min(seconds_of_work(str(tmp_path)) for _ in range(3))
    assert best < 0.3


def seconds_of_work(generation: str) -> float:
    """CPU time, so that a busy machine does not fail the test."""
    start = time.process_time()
    assert not inspect(generation)
    return time.process_time() - start
