"""A small installed environment, and the invariants that hold on a node whatever happened to it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bedplate.node.state.drift import inspect
from bedplate.node.state.generations import Generations
from bedplate.node.state.journal import Paths

A, B, C = (f"{name}-{digit * 12}" for name, digit in (("stack-a", "a"), ("stack-b", "b"), ("stack-c", "c")))
# Where fsync costs nothing, for tests with hundreds of runs.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
HOLDER = {"user": "ops", "controller": "deploy1", "pid": 4711}


def paths_in(directory: Path | str) -> Paths:
    base = str(directory)
    return Paths.of(f"{base}/opt", f"{base}/var", f"{base}/facts")


def install(generation: str, dists: int = 2, files: int = 3) -> str:
    """Put an environment into directory ``generation`` as an installer would; return its site-packages."""
    site = os.path.join(generation, "venv", "lib", "python3.11", "site-packages")
    os.makedirs(os.path.join(generation, "venv", "bin"), exist_ok=True)
    for number in range(dists):
        name = f"dist{number}"
        info = os.path.join(site, f"{name}-1.0.dist-info")
        os.makedirs(os.path.join(site, name), exist_ok=True)
        os.makedirs(info, exist_ok=True)
        record = []
        for index in range(files):
            Path(site, name, f"m{index}.py").write_text("#" * index)
            record.append(f"{name}/m{index}.py,sha256=x,{index}")
        script = Path(generation, "venv", "bin", name)
        script.write_text("#!")
        record += [f"../../../bin/{name},sha256=x,2", f"{name}-1.0.dist-info/RECORD,,"]
        Path(info, "RECORD").write_text("\n".join(record) + "\n")
    return site


def provision(node: Generations, run_id: str, identifier: str) -> dict[str, Any]:
    """A whole successful run."""
    begun = node.begin(run_id, identifier, holder=HOLDER)
    if not begun["reused"]:
        install(begun["directory"])
    node.built(run_id)
    return node.commit(run_id, identifier)


def check_live(paths: Paths) -> None:
    """What must hold at every instant: ``current`` names a verified generation that is there, or nothing."""
    state = json.loads(Path(paths.state).read_text()) if os.path.exists(paths.state) else {"generations": {}}
    if os.path.lexists(paths.current):
        name = os.readlink(paths.current).removeprefix("generations/")
        assert state["generations"][name]["status"] == "verified"
        assert os.path.isfile(f"{paths.current}/venv/lib/python3.11/site-packages/dist0/m0.py")
    else:
        intent = state.get("intent") or {}
        undoing_the_first = intent.get("step") == "undo" and intent["to"] is None
        assert state.get("active") is None or undoing_the_first


def check_settled(paths: Paths, damaged: str = "") -> dict[str, Any]:
    """What must hold when nothing is under way; returns the state. ``damaged`` names what the test damaged."""
    check_live(paths)
    seen = Generations(paths).read()
    state: dict[str, Any] = seen["state"]
    assert state["intent"] is None
    assert seen["current"] == state["active"]
    assert state["previous"] is None or state["generations"][state["previous"]]["status"] == "verified"
    assert state["previous"] is None or state["previous"] != state["active"]
    if state["active"]:
        assert seen["clean"], seen
    assert all(entry["status"] != "building" for entry in state["generations"].values())
    on_disk = set(os.listdir(paths.generations)) if os.path.isdir(paths.generations) else set()
    assert on_disk <= set(state["generations"]), "nothing half-removed and nothing unknown"
    kept = {name for name, entry in state["generations"].items() if entry["status"] in ("built", "verified")}
    assert kept <= on_disk
    for name in kept - {damaged}:
        assert not inspect(paths.generation(name)), f"{name} is whole"
    if os.path.exists(paths.state):
        fact = json.loads(Path(paths.fact).read_text())
        assert (fact["active"], fact["intent"]) == (state["active"], None)
    return state
