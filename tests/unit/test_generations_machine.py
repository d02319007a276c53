"""Any sequence of actions, kills and meddling: what is live works, and what is protected stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from generation_tools import MEMORY, A, B, C, check_live, check_settled, install, paths_in, provision
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bedplate.node.state.generations import Generations, StateError

IDS = st.sampled_from([A, B, C])
RUNS = st.sampled_from(["r1", "r2", "r3"])
STACK_FAILS = [{"status": "fail", "layer": "stack"}]
CALLS = ("open", "write", "fsync", "rename", "symlink", "unlink", "mkdir", "rmdir", "fchmod")


class Killed(BaseException):
    """The process ended here."""


@contextlib.contextmanager
def dying_at(number: int) -> Iterator[None]:
    """Let the ``number``-th call that changes the disk, and all after it, not happen."""
    count = itertools.count(1)

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if next(count) >= number:
                raise Killed
            return real(*args, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, wrapped(getattr(os, name))))
        yield


class Node(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(dir=MEMORY)
        self.paths = paths_in(self.directory)
        self.node = Generations(self.paths, lock_timeout_s=1)

    def teardown(self) -> None:
        self.node.settle(take_over=True)
        check_settled(self.paths)
        shutil.rmtree(self.directory)

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.node.read()["state"]
        return state

    def act(self, action: Callable[[], dict[str, Any]], kill: int) -> None:
        """Run one action; it may be refused, and may be killed at its ``kill``-th call (0: not)."""
        with contextlib.suppress(StateError, Killed), dying_at(kill or 10**9):
            action()

    kills = st.one_of(st.just(0), st.integers(1, 30))

    @initialize(live=st.integers(0, 3))
    def some_are_there(self, live: int) -> None:
        for number, name in enumerate((A, B, C)[:live]):
            provision(self.node, f"r{number}", name)

    @rule(run=RUNS, name=IDS, kill=kills)
    def run_to_its_commit(self, run: str, name: str, kill: int) -> None:
        with contextlib.suppress(StateError):
            begun = self.node.begin(run, name, take_over=True)
            if not begun["reused"]:
                install(begun["directory"])
            self.node.built(run)
        self.act(lambda: self.node.commit(run), kill)

    @rule(run=RUNS, name=IDS, take_over=st.booleans(), kill=kills)
    def begin(self, run: str, name: str, take_over: bool, kill: int) -> None:
        self.act(lambda: self.node.begin(run, name, take_over=take_over), kill)

    @rule(run=RUNS, name=st.sampled_from(["", A, B, C]), kill=kills)
    def begin_back(self, run: str, name: str, kill: int) -> None:
        self.act(lambda: self.node.begin(run, name, kind="rollback"), kill)

    @precondition(lambda self: self.state["intent"] and self.state["intent"]["kind"] == "provision")
    @rule(whole=st.booleans(), kill=kills)
    def build(self, whole: bool, kill: int) -> None:
        intent = self.state["intent"]
        if self.state["generations"][intent["to"]]["status"] == "building":
            install(self.paths.generation(intent["to"]), dists=2 if whole else 1)
            self.act(lambda: self.node.built(intent["run_id"]), kill)

    @rule(run=RUNS)
    def step(self, run: str) -> None:
        self.act(lambda: self.node.step(run, "verify"), 0)

    @rule(run=RUNS, kill=kills)
    def commit(self, run: str, kill: int) -> None:
        self.act(lambda: self.node.commit(run), kill)

    @precondition(lambda self: self.state["intent"])
    @rule(kill=kills)
    def commit_own(self, kill: int) -> None:
        run = self.state["intent"]["run_id"]
        self.act(lambda: self.node.commit(run), kill)

    @rule(run=RUNS, kill=kills, verdicts=st.sampled_from([[], STACK_FAILS]))
    def fail(self, run: str, kill: int, verdicts: list[dict[str, Any]]) -> None:
        self.act(lambda: self.node.fail(run, "bad", verdicts), kill)

    @rule(run=RUNS, kill=kills, kind=st.sampled_from(["provision", "rollback"]), name=st.sampled_from(["", A, B]))
    def rollback(self, run: str, kill: int, kind: str, name: str) -> None:
        self.act(lambda: self.node.rollback(run, name, kind=kind, reason="bad"), kill)

    @rule(take_over=st.booleans(), kill=kills)
    def settle(self, take_over: bool, kill: int) -> None:
        self.act(lambda: self.node.settle(take_over=take_over), kill)

    @rule(keep=st.integers(1, 3), kill=kills)
    def prune(self, keep: int, kill: int) -> None:
        state = self.state
        intent = state["intent"] or {}
        safe = {state["active"], state["previous"], intent.get("from"), intent.get("to")}
        verified = [(e["verified"], n) for n, e in state["generations"].items() if e["status"] == "verified"]
        safe |= {max(verified, default=("", None))[1]}
        self.act(lambda: self.node.prune(keep), kill)
        after = self.state["generations"]
        assert {name for name in safe if name} <= set(after)
        assert state["active"] is None or os.path.isdir(self.paths.generation(state["active"]))

    @rule()
    def settled_is_settled(self) -> None:
        self.node.settle(take_over=True)
        check_settled(self.paths)
        assert not self.node.settle(take_over=True)["changed"]

    @rule(action=st.sampled_from(["begin", "settle", "prune", "rollback"]), name=IDS)
    def check_mode_is_right(self, action: str, name: str) -> None:
        """What check mode says is what then happens, but for times."""

        def perform(node: Generations) -> dict[str, Any] | str:
            try:
                return {
                    "begin": lambda: node.begin("r1", name),
                    "settle": lambda: node.settle(take_over=True),
                    "prune": lambda: node.prune(1),
                    "rollback": lambda: node.rollback("r1", name, kind="rollback"),
                }[action]()
            except StateError as exc:
                return str(exc)

        planned, done = perform(Generations(self.paths, check=True)), perform(self.node)
        if isinstance(done, str) or isinstance(planned, str):
            assert planned == done
        else:
            same = ("changed", "current", "removed", "message", "settled")
            assert {key: planned[key] for key in same} == {key: done[key] for key in same}
            assert planned["state"]["active"] == done["state"]["active"]
            assert planned["state"]["previous"] == done["state"]["previous"]

    @precondition(lambda self: self.state["intent"] is None)
    @rule(name=IDS)
    def operator_points_current(self, name: str) -> None:
        entry = self.state["generations"].get(name)
        if entry and entry["status"] == "verified" and os.path.isdir(self.paths.generation(name)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.paths.current)
            os.symlink(f"generations/{name}", self.paths.current)
            self.node.settle()
            assert self.state["active"] == name

    @precondition(lambda self: self.state["intent"] is None)
    @rule(name=IDS)
    def operator_removes_one(self, name: str) -> None:
        if name != self.state["active"] and os.path.isdir(self.paths.generation(name)):
            shutil.rmtree(self.paths.generation(name))
            self.node.settle()

    @invariant()
    def what_is_live_works(self) -> None:
        check_live(self.paths)
        state = self.state
        if state["intent"] is None:
            assert state["active"] == self.node.read()["current"]
            assert state["previous"] is None or state["generations"][state["previous"]]["status"] == "verified"


Node.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNode = Node.TestCase
