"""Killed at every system call of every action: what is live works, and settle puts the rest right.

The child calls os._exit just before its k-th call that changes the disk (for write(2): after half of it), for
k = 1, 2, ... until it gets through. os._exit runs no handler and no finally, like SIGKILL.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from generation_tools import MEMORY, A, B, C, check_live, check_settled, install, paths_in, provision

from bedplate.node.state.generations import Generations, StateError
from bedplate.node.state.journal import Paths

KILLED = 77
CALLS = ("open", "write", "fsync", "rename", "symlink", "unlink", "mkdir", "rmdir", "chmod", "fchmod")
Act = Callable[[Generations], object]


def nothing(node: Generations) -> None:
    pass


def live(node: Generations) -> None:
    provision(node, "r1", A)


def upgraded(node: Generations) -> None:
    live(node)
    provision(node, "r2", B)


def begun(node: Generations) -> None:
    upgraded(node)
    install(node.begin("r3", C)["directory"])


def built(node: Generations) -> None:
    begun(node)
    node.built("r3")


def committed(node: Generations) -> None:
    built(node)
    node.commit("r3")


def failed(node: Generations) -> None:
    built(node)
    node.fail("r3", "bad", [{"status": "fail", "layer": "stack"}])


def first_committed(node: Generations) -> None:
    provision(node, "r3", C)


def by_hand(node: Generations) -> None:
    upgraded(node)
    os.unlink(node.paths.current)
    os.symlink(f"generations/{A}", node.paths.current)


CASES: list[tuple[str, Act, Act]] = [
    ("begin on a bare node", nothing, lambda node: node.begin("r3", C)),
    ("begin beside a live one", upgraded, lambda node: node.begin("r3", C)),
    ("begin over a failed one", failed, lambda node: node.begin("r4", C)),
    ("begin by taking over", begun, lambda node: node.begin("r4", C, take_over=True)),
    ("begin a rollback", upgraded, lambda node: node.begin("r3", kind="rollback")),
    ("step", begun, lambda node: node.step("r3", "verify")),
    ("built", begun, lambda node: node.built("r3")),
    ("first commit", lambda node: (install(node.begin("r3", C)["directory"]), node.built("r3")),
     lambda node: node.commit("r3")),
    ("commit", built, lambda node: node.commit("r3")),
    ("fail half-built", begun, lambda node: node.fail("r3", "bad")),
    ("fail built", built, lambda node: node.fail("r3", "bad")),
    ("rollback before commit", built, lambda node: node.rollback("r3", reason="bad")),
    ("rollback after commit", committed, lambda node: node.rollback("r3", reason="bad")),
    ("rollback of the first commit", first_committed, lambda node: node.rollback("r3", reason="bad")),
    ("rollback on demand", upgraded, lambda node: node.rollback("r3", kind="rollback")),
    ("settle half-built", begun, lambda node: node.settle(take_over=True)),
    ("settle a strange link", by_hand, lambda node: node.settle()),
    ("prune a failed one", failed, lambda node: node.prune(keep=1)),
    ("prune a verified one", committed, lambda node: node.prune(keep=1)),
]  # fmt: skip


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        yield Path(directory)


def killed_at(number: int, act: Act, node: Generations) -> bool:
    """Run ``act`` in a child that dies at its ``number``-th call; tell whether it did."""
    child = os.fork()
    if child == 0:
        count = itertools.count(1)

        def wrap(name: str) -> None:
            real = getattr(os, name)

            def call(*args: object, **options: object) -> object:
                if next(count) == number:
                    if name == "write":
                        real(args[0], args[1][: len(args[1]) // 2])  # type: ignore[index,arg-type]
                    os._exit(KILLED)
                return real(*args, **options)

            setattr(os, name, call)

        for name in CALLS:
            wrap(name)
        try:
            act(node)
        except BaseException as exc:  # noqa: BLE001  # the child must never return into pytest
            os.write(2, repr(exc).encode())
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


@pytest.mark.parametrize(("prepare", "act"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_killed_at_every_call(memory: Path, prepare: Act, act: Act) -> None:
    prepare(Generations(paths_in(memory / "start")))
    (memory / "start").mkdir(exist_ok=True)
    outcomes = set()
    for number in itertools.count(1):
        here = memory / str(number)
        shutil.copytree(memory / "start", here, symlinks=True)
        paths = paths_in(here)
        node = Generations(paths)
        was_live = node.read()["state"]["active"]
        killed = killed_at(number, act, node)
        check_live(paths)
        node.settle(take_over=True)
        state = check_settled(paths)
        assert not node.settle(take_over=True)["changed"], "settled once is settled"
        outcomes.add(state["active"])
        allowed = {was_live, C} | ({A} if prepare in (upgraded, by_hand) else set())
        allowed |= {B} if prepare is committed else {None} if prepare is first_committed else set()
        assert state["active"] in allowed
        provision(node, "afterwards", C)
        assert check_settled(paths)["active"] == C
        shutil.rmtree(here)
        if not killed:
            break
    assert number > 5, "the calls were counted"
    assert outcomes


LOOP = """
import sys
sys.path[:0] = sys.argv[2:]
from generation_tools import *
node = Generations(paths_in(sys.argv[1]), lock_timeout_s=5)
number = 0
while True:
    number += 1
    name = (A, B, C)[number % 3]
    node.settle(take_over=True)
    run = f"r{number}"
    begun = node.begin(run, name)
    if not begun["reused"]:
        install(begun["directory"])
    node.built(run)
    if number % 5 == 1 and number > 5:
        node.fail(run, "bad", [{"status": "fail", "layer": "stack"}])
        continue
    node.commit(run)
    if number % 4 == 2:
        node.rollback(run, reason="bad")
    if number % 7 == 3:
        node.prune(keep=1)
    print(number, flush=True)
"""


def test_sigkill_at_any_time(memory: Path) -> None:
    paths = paths_in(memory)
    here = Path(__file__).parent
    chance = random.Random()  # noqa: S311
    for _ in range(20):
        command = [sys.executable, "-c", LOOP, str(memory), str(here), str(here.parents[1] / "src")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(chance.uniform(0, 0.05))
            child.send_signal(signal.SIGKILL)
        check_live(paths)
        Generations(paths).settle(take_over=True)
        check_settled(paths)
    assert Generations(paths).read()["state"]["runs"]


def test_readers_never_miss_current(tmp_path: Path) -> None:
    """Who opens ``current`` while the node goes back and forth always finds a whole environment."""
    paths = paths_in(tmp_path)
    node = Generations(paths)
    upgraded(node)
    child = os.fork()
    if child == 0:
        end = time.monotonic() + 1.0
        looked = 0
        while time.monotonic() < end:
            try:
                os.close(os.open(f"{paths.current}/venv/bin/dist0", os.O_RDONLY))
            except OSError:
                os._exit(1)
            looked += 1
        os._exit(0 if looked > 1000 else 2)
    switches = 0
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        node.rollback(f"s{switches}", kind="rollback")
        switches += 1
    assert ended[1] == 0, "1: current was missing; 2: the reader hardly ran"
    assert switches > 10
    assert node.read()["clean"]


def test_paths_survive_copying(memory: Path) -> None:
    """The crash test copies a prepared node; that must be the same node."""
    upgraded(Generations(paths_in(memory / "a")))
    shutil.copytree(memory / "a", memory / "b", symlinks=True)
    copied: Paths = paths_in(memory / "b")
    assert check_settled(copied)["active"] == B


class StopHereError(Exception):
    pass


def stopped_after_the_switch(node: Generations, monkeypatch: pytest.MonkeyPatch, act: Act) -> None:
    """Run ``act`` until just after its rename of ``current``."""

    def end(self: Generations, *args: object) -> None:
        raise StopHereError

    with monkeypatch.context() as patch:
        patch.setattr(Generations, "_end_switch", end)
        with pytest.raises(StopHereError):
            act(node)


def test_a_finished_switch_is_recorded_as_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Generations(paths_in(tmp_path))
    built(node)
    stopped_after_the_switch(node, monkeypatch, lambda node: node.commit("r3", C, [{"code": "x"}]))
    assert "its commit was complete and is recorded now" in node.settle(take_over=True)["settled"]
    run = check_settled(node.paths)["runs"][-1]
    assert (run["run_id"], run["result"], run["verdicts"]) == ("r3", "active", [{"code": "x"}])
    stopped_after_the_switch(node, monkeypatch, lambda node: node.rollback("r4", kind="rollback"))
    assert "its switch was complete and is recorded now" in node.settle(take_over=True)["settled"]
    state = check_settled(node.paths)
    assert (state["active"], state["runs"][-1]["result"]) == (B, "rolled_back")


@pytest.mark.parametrize(
    "then",
    [
        lambda node: node.fail("r3", "x"),
        lambda node: node.begin("r3", C),
        lambda node: node.step("r3", "verify"),
        lambda node: node.built("r3"),
        lambda node: node.commit("r3"),
    ],
)
def test_the_same_run_goes_on_after_its_own_unrecorded_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Act
) -> None:
    node = Generations(paths_in(tmp_path))
    upgraded(node)
    stopped_after_the_switch(node, monkeypatch, lambda node: node.rollback("r3", kind="rollback"))
    with contextlib.suppress(StateError):
        then(node)
    node.fail("r3", "x")
    check_live(node.paths)
    seen = node.read()
    assert seen["current"] == seen["state"]["active"] == A


def test_an_unrecorded_switch_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(node: Generations) -> object:
        return node.rollback("r3", kind="rollback")

    node = Generations(paths_in(tmp_path))
    upgraded(node)
    stopped_after_the_switch(node, monkeypatch, act)
    act(node)
    assert check_settled(node.paths)["active"] == A
