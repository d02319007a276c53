"""Files that are replaced whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bedplate.controller.files import replace_file, sha256_of


def test_a_file_is_replaced_and_readable_for_all(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        replace_file(tmp_path / "new" / "file", "ä")
    finally:
        os.umask(before)
    replace_file(tmp_path / "new" / "file", b"bytes")
    assert (tmp_path / "new" / "file").read_bytes() == b"bytes"
    assert (tmp_path / "new" / "file").stat().st_mode & 0o777 == 0o644
    assert sha256_of(tmp_path / "new" / "file").startswith("277089d91c0bdf4f")


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "file", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
