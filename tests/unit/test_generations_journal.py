"""The journal's file: damaged, hostile, full disk; and the lock with its holder named."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from generation_tools import MEMORY, A, B, C, check_settled, install, paths_in, provision
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.node.state import durable, journal
from bedplate.node.state.generations import Generations, StateError
from bedplate.node.state.lock import locked

ID = "x-000000000000"
ENTRY = {"status": "verified", "profile": "x", "target": "t", "created": "", "verified": "", "reason": None}
# The intent of a run that goes back to a node without a generation.
NOWHERE = {
    "run_id": "r", "kind": "rollback", "step": "undo", "started": "", "from": ID, "previous": None, "to": None,
    "holder": {},
}  # fmt: skip


def state_with(**changes: Any) -> str:
    return json.dumps({**journal.empty_state(), "generations": {ID: ENTRY}, **changes})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[" * 100000, "it is not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "schema is None"),
        (state_with(schema=2), "schema is 2 and this Bedplate knows 1"),
        (state_with(active="y-000000000000"), "active names no known generation"),
        (state_with(active=["x"]), "active names no known generation"),
        (state_with(generations={"../../etc": ENTRY}), "no generation id"),
        (state_with(generations={ID: {**ENTRY, "status": "great"}}), "has no known status"),
        (state_with(generations={ID: {**ENTRY, "reason": 1}}), "not text"),
        (state_with(generations=None), "generations or runs are missing"),
        (state_with(intent={"run_id": "r"}), "the intent is incomplete"),
        (state_with(intent={"run_id": "r", "kind": "k", "step": "s", "started": "", "to": "/etc", "holder": {}}),
         "names no known generation"),
        (state_with(intent={"run_id": "r", "kind": "k", "step": "s", "started": "", "to": ID}),
         "names no known generation"),
        (state_with(intent={"run_id": "r", "kind": "k", "step": "s", "started": "", "to": ID, "from": None,
                            "previous": None}), "has no holder"),
        (state_with(intent={**NOWHERE, "kind": "provision"}), "goes nowhere"),
        (state_with(intent={**NOWHERE, "step": "switch"}), "goes nowhere"),
        (state_with(runs=[{"run_id": "r", "result": "?"}]), "a run is incomplete"),
    ],
)  # fmt: skip
def test_a_damaged_journal_is_named_and_left_alone(tmp_path: Path, content: str, problem: str) -> None:
    paths = paths_in(tmp_path)
    file = Path(paths.state)
    file.parent.mkdir()
    file.write_text(content)
    node = Generations(paths)
    for action in (node.read, lambda: node.begin("r", A), node.settle, node.prune):
        with pytest.raises(StateError) as caught:
            action()
        assert caught.value.code == "corrupt"
        assert problem in str(caught.value)
        assert paths.state in str(caught.value)
        assert "docs/rollback.md" in str(caught.value)
    assert file.read_text() == content
    assert not os.path.exists(paths.root)


def test_a_run_that_goes_back_to_nothing_commits_nothing(tmp_path: Path) -> None:
    paths = paths_in(tmp_path)
    install(paths.generation(ID), dists=1, files=1)
    Path(paths.state).parent.mkdir()
    Path(paths.state).write_text(state_with(intent=NOWHERE))
    with pytest.raises(StateError, match="Nothing is where this run goes back to") as caught:
        Generations(paths).commit("r")
    assert caught.value.code == "refused"


@pytest.mark.parametrize("kind", ["link", "directory", "fifo", "binary"])
def test_what_is_no_file_of_text_is_not_read(tmp_path: Path, kind: str) -> None:
    paths = paths_in(tmp_path)
    os.mkdir(paths.state_dir)
    if kind == "link":
        os.symlink("/etc/passwd", paths.state)
    elif kind == "directory":
        os.mkdir(paths.state)
    elif kind == "fifo":
        os.mkfifo(paths.state)
    else:
        Path(paths.state).write_bytes(b"\xff\xfe")
    with pytest.raises(StateError) as caught:
        Generations(paths).read()
    assert caught.value.code == "corrupt"
    assert paths.state in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from([ID, A]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["schema", "active", "previous", "generations", "intent", "runs"])


names = st.none() | st.sampled_from([ID, A, B])
steps = st.sampled_from(["begin", "build", "commit", "switch", "undo"])
entries = st.fixed_dictionaries(
    {"status": st.sampled_from(journal.STATUSES)}, optional={"verified": st.none() | st.text(max_size=3)}
)
intents = st.fixed_dictionaries(
    {"run_id": st.just("r"), "kind": st.sampled_from(["provision", "rollback", "layers", "?"]), "step": steps,
     "started": st.just(""), "from": names, "to": names, "holder": st.just({})},
    optional={"previous": names, "reason": st.none() | st.just("x"), "verdicts": st.just([])},
)  # fmt: skip
runs = st.fixed_dictionaries(
    {"run_id": st.just("r"), "result": st.sampled_from(journal.RESULTS), "verdicts": st.just([]), "from": names,
     "to": names, "previous": names, "started": st.just(""), "kind": st.just("provision")},
)  # fmt: skip
layer_records = st.none() | st.just({"version": "1"})
layers = st.fixed_dictionaries(
    {"is": layer_records, "was": layer_records, "to": layer_records, "run_id": st.sampled_from(["r", "other"])}
)
likely = {
    "layers": st.dictionaries(st.sampled_from(["driver", "toolkit"]), layers),
    "active": names,
    "previous": names,
    "generations": st.dictionaries(st.sampled_from([ID, A, B]), entries),
    "intent": st.none() | intents,
    "runs": st.lists(runs, max_size=2),
}
ACTIONS = {
    "read": lambda node: node.read(),
    "settle": lambda node: node.settle(take_over=True),
    "begin": lambda node: node.begin("r", A),
    "take over": lambda node: node.begin("r2", A, take_over=True),
    "begin back": lambda node: node.begin("r", kind="rollback"),
    "step": lambda node: node.step("r", "x"),
    "built": lambda node: node.built("r"),
    "commit": lambda node: node.commit("r"),
    "fail": lambda node: node.fail("r", "x"),
    "rollback": lambda node: node.rollback("r", reason="x"),
    "go back": lambda node: node.rollback("r2", kind="rollback", take_over=True),
    "back to it": lambda node: node.begin("r2", A, kind="rollback", take_over=True),
    "undo and hold": lambda node: node.rollback("r", reason="x", hold=True),
    "layer": lambda node: node.layer("r", "driver", "done"),
    "end": lambda node: node.end("r"),
    "prune": lambda node: node.prune(1),
}


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries({}, optional=likely) | st.dictionaries(keys, json_values),
    st.sampled_from(sorted(ACTIONS)),
    st.sets(st.sampled_from([ID, A, B])),
    names,
)
def test_any_journal_gives_an_answer_or_a_refusal(
    odd: dict[str, Any], action: str, there: set[str], link: str | None
) -> None:
    """Never a traceback, whatever the file says and whatever the disk has."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        paths = paths_in(directory)
        os.mkdir(paths.state_dir)
        Path(paths.state).write_text(json.dumps({**journal.empty_state(), **odd}))
        for name in there:
            install(paths.generation(name), dists=1, files=1)
        if link:
            os.makedirs(paths.root, exist_ok=True)
            os.symlink(f"generations/{link}", paths.current)
        for check in (True, False):
            with contextlib.suppress(StateError):
                ACTIONS[action](Generations(paths, check=check))
        with contextlib.suppress(StateError):
            Generations(paths).read()
        if link is None and os.path.lexists(paths.current):
            assert os.path.isdir(paths.current), "a link that was made leads somewhere"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", mount], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"mounting a small tmpfs is not allowed here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def fill(directory: Path) -> Path:
    path = directory / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    return path


def test_disk_full_keeps_the_old_state(small_disk: Path) -> None:
    paths = paths_in(small_disk)
    node = Generations(paths)
    provision(node, "r1", A)
    before = Path(paths.state).read_bytes()
    filler = fill(small_disk)
    for action in (lambda: node.begin("r2", B), lambda: node.rollback("r1", reason="bad")):
        with pytest.raises(StateError) as caught:
            action()
        assert caught.value.code == "no_space"
        assert f"cannot write {paths.state}: the disk is full" in str(caught.value)
        assert "Free space" in str(caught.value)
        assert Path(paths.state).read_bytes() == before
        assert not os.path.exists(paths.state + ".tmp")
    check_settled(paths)
    filler.unlink()
    provision(node, "r2", B)
    check_settled(paths)


def test_a_failed_build_gives_the_full_disk_back(small_disk: Path) -> None:
    paths = paths_in(small_disk)
    node = Generations(paths)
    provision(node, "r1", A)
    directory = Path(node.begin("r2", B)["directory"])
    fill(directory)
    node.fail("r2", "no space left on device")
    state = check_settled(paths)
    assert (state["active"], state["generations"][B]["status"]) == (A, "failed")
    provision(node, "r3", B)


def test_disk_full_just_after_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename is done and cannot be recorded; the run's own rescue still goes back."""
    paths = paths_in(tmp_path)
    node = Generations(paths)
    provision(node, "r1", A)
    install(node.begin("r2", B)["directory"])
    node.built("r2")
    real, writes = durable.write_atomic, []

    def second_fails(path: str, text: str, mode: int = 0o644) -> None:
        writes.append(path)
        if len(writes) == 2:
            raise StateError("no_space", "full")
        real(path, text, mode)

    monkeypatch.setattr(journal, "write_atomic", second_fails)
    with pytest.raises(StateError):
        node.commit("r2")
    assert node.read()["current"] == B
    node.rollback("r2", reason="could not be recorded")
    state = check_settled(paths)
    assert (state["active"], state["generations"][B]["status"]) == (A, "failed")


def test_disk_full_in_the_middle_of_going_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = paths_in(tmp_path)
    node = Generations(paths)
    provision(node, "r1", A)
    provision(node, "r2", B)
    monkeypatch.setattr(
        "bedplate.node.state.change.switch_link", lambda *_: (_ for _ in ()).throw(StateError("io", "x"))
    )
    with pytest.raises(StateError):
        node.rollback("r2", reason="bad")
    monkeypatch.undo()
    assert node.read()["state"]["intent"]["step"] == "undo"
    again = node.rollback("r2", reason="bad")
    assert "which is done now" in (again["settled"] or "")
    assert check_settled(paths)["active"] == A


def test_the_lock_names_a_live_holder(tmp_path: Path) -> None:
    paths = paths_in(tmp_path)
    os.mkdir(paths.state_dir)
    with subprocess.Popen(["flock", paths.lock, "sleep", "47"]) as holder:
        wait_until_held(paths.lock)
        start = time.monotonic()
        with pytest.raises(StateError) as caught:
            Generations(paths, lock_timeout_s=0.3).begin("r", A)
        assert 0.3 <= time.monotonic() - start < 5
        assert caught.value.code == "locked"
        assert f"held by pid {holder.pid} (flock {paths.lock} sleep 47), pid " in str(caught.value)
        assert Generations(paths).read()["changed"] is False, "reading needs no lock"
        # An orphan: flock(1) is killed, what it started lives on and still holds the lock.
        holder.kill()
        holder.wait()
        with pytest.raises(StateError) as caught:
            Generations(paths, lock_timeout_s=0).begin("r", A)
        assert "(sleep 47)" in str(caught.value)
        os.kill(int(str(caught.value).split("held by pid ")[1].split()[0]), 15)
    Generations(paths, lock_timeout_s=5).begin("r", A)


def wait_until_held(path: str) -> None:
    for _ in range(200):
        time.sleep(0.02)
        try:
            with locked(path, 0):
                pass
        except StateError:
            return
    pytest.fail("flock did not start")


def test_the_lock_is_waited_for(tmp_path: Path) -> None:
    paths = paths_in(tmp_path)
    os.mkdir(paths.state_dir)
    with subprocess.Popen(["flock", paths.lock, "sleep", "0.5"]):
        wait_until_held(paths.lock)
        assert Generations(paths, lock_timeout_s=10).begin("r", A)["changed"]


def test_two_runs_at_once_one_is_refused(tmp_path: Path) -> None:
    code = "\n".join(
        [
            "import sys; sys.path[:0] = sys.argv[3:]",
            "from generation_tools import *",
            "from bedplate.node.state.generations import StateError",
            "try: Generations(paths_in(sys.argv[1])).begin(sys.argv[2], A)",
            "except StateError as exc: print(exc.code)",
            "else: print('won')",
        ]
    )
    here = Path(__file__).parent
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), f"r{number}", str(here), str(here.parents[1] / "src")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    assert sorted(racer.communicate()[0].strip() for racer in racers) == ["busy", "busy", "busy", "won"]


def test_a_damaged_fact_is_written_anew(tmp_path: Path) -> None:
    paths = paths_in(tmp_path)
    node = Generations(paths)
    provision(node, "r1", A)
    Path(paths.fact).write_bytes(b"\xff")
    node.settle()
    assert json.loads(Path(paths.fact).read_text())["active"] == A


def test_a_symlinked_root_is_resolved_once(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "opt").symlink_to(tmp_path / "big")
    paths = paths_in(tmp_path)
    provision(Generations(paths), "r1", C)
    assert (tmp_path / "big" / "current" / "manifest.json").is_file()
    check_settled(paths)
