"""Who holds a change: one answer per ansible-playbook process, and no wrong claim about life or death."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.controller.holder import current_run, is_alive


class Proc:
    """A /proc with processes of our choice; this process is the child of the last one added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "sys/kernel/random").mkdir(parents=True)
        (path / "sys/kernel/random/boot_id").write_text("0123456789abcdef\n")
        (path / "self/ns").mkdir(parents=True)
        (path / "self/ns/pid").symlink_to("pid:[1]")

    def add(self, pid: int, parent: int, command: str, state: str = "S", start: int = 0) -> None:
        (self.path / str(pid)).mkdir()
        (self.path / str(pid) / "cmdline").write_bytes(b"\0".join(command.encode().split()) + b"\0")
        # 22 fields; the name holds what makes a careless reader fail
        fields = [state, str(parent), *["0"] * 17, str(start or pid * 10), "0"]
        (self.path / str(pid) / "stat").write_text(f"{pid} (a) S 1 (b c) {' '.join(fields)}")

    def me(self, parent: int, command: str = "/v/bin/python /v/bin/ansible-playbook site.yml") -> int:
        self.add(os.getpid(), parent, command)
        return os.getpid()


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


PLAYBOOK = "/v/bin/python /v/bin/ansible-playbook site.yml"


def test_workers_share_the_answer_of_their_playbook(proc: Proc) -> None:
    proc.add(2, 1, "-bash")
    proc.add(3, 2, PLAYBOOK)
    proc.me(3)
    run = current_run(proc.path)
    assert run["run_id"] == "01234567-30-3"
    assert run["holder"] == {
        "controller": platform.node(),
        "boot_id": "0123456789abcdef",
        "pid_namespace": "pid:[1]",
        "pid": 3,
        "pid_start": 30,
        "user": run["holder"]["user"],
    }


@pytest.mark.parametrize(
    "between", ["/bin/sh -c x", "python AnsiballZ_command.py", "molecule converge", "vim ansible-playbook.txt -c x"]
)
def test_a_playbook_inside_a_playbook_is_its_own_run(proc: Proc, between: str) -> None:
    proc.add(3, 1, PLAYBOOK)
    proc.add(4, 3, between)
    proc.add(5, 4, PLAYBOOK)
    proc.me(5)
    assert current_run(proc.path)["holder"]["pid"] == 5


@pytest.mark.parametrize(
    "command", ["/v/bin/ansible-playbook x", "python -m ansible playbook x", "python3 /u/ansible x"]
)
def test_ways_to_start_ansible(proc: Proc, command: str) -> None:
    proc.add(3, 1, command)
    proc.me(3, command)
    assert current_run(proc.path)["holder"]["pid"] == 3


def test_without_ansible_it_is_this_process(proc: Proc) -> None:
    proc.add(3, 1, "-bash")
    pid = proc.me(3, "python -m pytest")
    assert current_run(proc.path)["holder"]["pid"] == pid


def test_hidden_parents_end_the_row(proc: Proc) -> None:
    pid = proc.me(77)  # no such directory, as with hidepid=2
    assert current_run(proc.path)["holder"]["pid"] == pid


def test_life_and_death(proc: Proc) -> None:
    proc.me(3)
    holder = current_run(proc.path)["holder"]
    proc.add(30, 1, PLAYBOOK)
    proc.add(31, 1, PLAYBOOK, state="Z")
    assert is_alive({**holder, "pid": 30, "pid_start": 300}, proc.path) is True
    assert is_alive({**holder, "pid": 30, "pid_start": 299}, proc.path) is False, "the number was used again"
    assert is_alive({**holder, "pid": 31, "pid_start": 310}, proc.path) is False, "a zombie changes nothing"
    assert is_alive({**holder, "pid": 2**22 + 1}, proc.path) is False, "more than any kernel gives out"


@pytest.mark.parametrize("key", ["controller", "boot_id", "pid_namespace"])
def test_elsewhere_is_not_known(proc: Proc, key: str) -> None:
    proc.me(3)
    assert is_alive({**current_run(proc.path)["holder"], key: "another"}, proc.path) is None


@given(st.dictionaries(st.sampled_from(["controller", "boot_id", "pid_namespace", "pid", "pid_start"]), st.none()))
def test_what_is_no_holder_is_not_known(holder: dict[str, object]) -> None:
    assert is_alive(holder) is None


@pytest.mark.parametrize("error", [PermissionError, None])
def test_a_process_hidden_from_this_user_is_not_known(
    proc: Proc, monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None
) -> None:
    """As under hidepid=2, where what another user runs is absent from /proc."""

    def kill(pid: int, signal: int) -> None:
        assert (pid, signal) == (99, 0)
        if error:
            raise error

    proc.me(1)
    monkeypatch.setattr("os.kill", kill)
    assert is_alive({**current_run(proc.path)["holder"], "pid": 99}, proc.path) is None


@pytest.mark.parametrize("pid", [0, -1, 2**70])
def test_a_number_that_no_process_has_is_no_holder(proc: Proc, pid: int) -> None:
    proc.me(1)
    assert is_alive({**current_run(proc.path)["holder"], "pid": pid}, proc.path) is None


def test_the_real_proc() -> None:
    code = "import json; from bedplate.controller.holder import current_run; print(json.dumps(current_run()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    holder = json.loads(done.stdout)["holder"]
    assert is_alive(holder) is False
    assert is_alive(current_run()["holder"]) is True
