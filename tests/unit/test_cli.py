"""The command line: what it prints, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import Result
from small_wheels import make_wheel, profile_data, sha256, write_profile
from typer.testing import CliRunner

from bedplate.controller import locking
from bedplate.controller.cli import app

TARGET = "cp312-x86_64"
BEDPLATE = Path(sys.executable).with_name("bedplate")


class Shell:
    def __init__(self, path: Path) -> None:
        self.profiles = path / "profiles"
        self.wheels = path / "wheels"
        self.wheels.mkdir()

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--profiles", str(self.profiles)])

    def lock(self, name: str, *arguments: str) -> Result:
        return self.run("lock", name, "--no-index", "--find-links", str(self.wheels), *arguments)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    shell = Shell(tmp_path)
    make_wheel(shell.wheels, "alpha", "1.0", requires="torch")
    make_wheel(shell.wheels, "alpha", "1.1", requires="torch")
    make_wheel(shell.wheels, "torch", "2.9.1+cu130")
    driver = {"driver": {"version": "580.82.07"}}
    pins = ["alpha==1.0", "torch==2.9.1+cu130"]
    write_profile(shell.profiles, "old", profile_data(*pins, targets=[TARGET]))
    write_profile(shell.profiles, "new", profile_data("alpha==1.1", targets=[TARGET]) | driver)
    write_profile(shell.profiles, "bad", profile_data(requirments=[]))
    return shell


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == "bedplate 0.1.0\n"
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert all(command in text for command in ("lock", "fetch", "profile"))
    assert CliRunner().invoke(app, ["lock"]).exit_code == 2
    assert CliRunner().invoke(app, ["lock", "x", "--frobnicate"]).exit_code == 2


def test_lock_then_check_then_change(shell: Shell) -> None:
    first = shell.lock("old")
    assert first.exit_code == 0, first.output
    assert f"{TARGET}: 2 packages, " in first.stdout
    assert "  + alpha 1.0\n  + torch 2.9.1+cu130\n" in first.stdout
    assert first.stdout.splitlines()[-1].startswith("old-")
    assert first.stdout.splitlines()[-1].endswith(" is locked")
    again = shell.lock("old", "--check")
    assert (again.exit_code, "would change" in again.stdout) == (0, False)
    assert shell.lock("old").stdout.splitlines()[-1].endswith(" was locked already")
    write_profile(shell.profiles, "old", profile_data("alpha==1.1", targets=[TARGET]))
    lock_file = shell.profiles / "old" / f"{TARGET}.lock"
    before = lock_file.read_text()
    changed = shell.lock("old", "--check")
    assert changed.exit_code == 1
    assert "  ~ alpha 1.0 -> 1.1\n" in changed.stdout
    assert f"would change: {lock_file}\n" in changed.stdout
    assert lock_file.read_text() == before


def test_mistakes_are_one_plain_text(shell: Shell) -> None:
    for arguments, message in (
        (("lock", "odl"), "did you mean `old`? Known: bad, new, old."),
        (("profile", "show", "../old"), "error: '../old' is not a profile name"),
        (("profile", "show", "bad"), "stack.requirments: unknown key; did you mean `requirements`?"),
        (("fetch", "old"), "error: profile old is not locked: run `bedplate lock old --profiles"),
        (("lock", "old", "--target", "cp313-x86_64"), "profile old has no target `cp313-x86_64`; did you mean"),
    ):
        result = shell.run(*arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert message in result.stderr
        assert result.stdout == ""


def test_list(shell: Shell) -> None:
    shell.lock("old")
    rows = {row["name"]: row for row in json.loads(shell.run("profile", "list", "--json").stdout)}
    assert rows["old"] == {
        "name": "old",
        "torch": "2.9.1+cu130",
        "kernels": None,
        "cuda": "13.0",
        "refused": False,
        "locked": True,
        "problem": None,
    }
    assert rows["new"]["locked"] is False
    assert "unknown key" in rows["bad"]["problem"], "a profile with a mistake is listed with it"
    table = shell.run("profile", "list").stdout.splitlines()
    assert table[0].split() == ["name", "torch", "kernels", "cuda", "locked", "refused"]
    assert table[-1].split() == ["old", "2.9.1+cu130", "-", "13.0", "yes", "no"]
    empty = CliRunner().invoke(app, ["profile", "list", "--profiles", str(shell.wheels)])
    assert empty.stdout == f"No profiles in {shell.wheels}.\n"


def test_show(shell: Shell) -> None:
    shell.lock("old")
    text = shell.run("profile", "show", "old").stdout
    assert "driver    (not managed)\n" in text
    assert f"target    {TARGET}: 2 packages, " in text
    shown = json.loads(shell.run("profile", "show", "old", "--json").stdout)
    assert shown["profile"]["schema"] == 1
    assert shown["locks"][TARGET]["packages"] == 2
    assert "(not locked)" in shell.run("profile", "show", "new").stdout


def test_check(shell: Shell) -> None:
    shell.lock("old")
    assert shell.run("profile", "check", "old").stdout == "ok    old\n"
    unlocked = shell.run("profile", "check", "new")
    assert (unlocked.exit_code, unlocked.stdout[:34]) == (0, "ok    new: profile new is not lock")
    assert shell.run("profile", "check", "new", "--locked").exit_code == 1
    everything = shell.run("profile", "check")
    assert everything.exit_code == 1
    assert [line.split()[0] for line in everything.stdout.splitlines()] == ["error", "ok", "ok"]
    (shell.profiles / "old" / f"{TARGET}.lock").write_text("")
    damaged = shell.run("profile", "check", "old")
    assert damaged.exit_code == 1
    assert "is not the file that was locked" in damaged.stdout


def test_diff(shell: Shell) -> None:
    assert "profile new is not locked" in shell.run("profile", "diff", "old", "new").stdout.replace("old", "new")
    shell.lock("old")
    shell.lock("new")
    text = shell.run("profile", "diff", "old", "new").stdout
    assert text == (
        f"driver    (not managed) -> 580.82.07 open\ntoolkit   (not managed)\n{TARGET}:\n  ~ alpha 1.0 -> 1.1\n"
    )
    result = json.loads(shell.run("profile", "diff", "old", "new", "--json").stdout)
    assert result["targets"] == {TARGET: ["~ alpha 1.0 -> 1.1"]}
    assert f"{TARGET}: no change\n" in shell.run("profile", "diff", "old", "old").stdout


def test_fetch_of_what_is_there(shell: Shell) -> None:
    shell.lock("old")
    result = shell.run("fetch", "old", "--to", str(shell.wheels))
    assert result.exit_code == 0, result.output
    assert f"; 2 are in {shell.wheels}, 0 are missing (0 B; " in result.stdout


def test_fetch_says_what_failed(shell: Shell, tmp_path: Path) -> None:
    shell.lock("old")
    result = shell.run("fetch", "old", "--to", str(tmp_path / "to"), "--index-url", "http://127.0.0.1:9/simple")
    assert result.exit_code == 1
    assert "2 are missing" in result.stdout
    assert "cannot read the index http://127.0.0.1:9/simple" in result.stderr
    assert sha256(next(shell.wheels.iterdir())) not in result.stderr


def test_interrupt_is_130_and_no_traceback(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(locking, "make_lock", interrupt)
    result = shell.lock("old")
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted: the same command goes on from here\n")


def test_real_interrupt(shell: Shell) -> None:
    """A fetch from an index that never answers ends on ctrl-C, at once, with the directory still usable."""
    shell.lock("old")
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/simple"
    command = [str(BEDPLATE), "fetch", "old", "--profiles", str(shell.profiles), "--to", str(shell.wheels / "to")]
    process = subprocess.Popen(
        [*command, "--index-url", url],
        env=os.environ | {"NO_COLOR": "1"},
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it sends to the background with SIGINT ignored, and these tests may be that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    listener.accept()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "interrupted: the same command goes on from here" in stderr
    assert "Traceback" not in stderr
