"""The node's memory: state.json, and the local fact made from it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from . import layers
from .durable import StateError, is_real_dir, read_text, write_atomic

__all__ = [
    "Paths",
    "empty_state",
    "load",
    "now",
    "public",
    "publish",
    "save",
]

SCHEMA = 1
STATUSES = ("building", "built", "verified", "failed")
RESULTS = ("active", "failed", "rolled_back", "settled")
MAX_RUNS = 20
# A profile id: name, dash, 12 hex digits. It becomes a directory name, so nothing else may pass.
ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}-[0-9a-f]{12}")


def now() -> str:
    """Return the time as UTC, ISO 8601 with milliseconds and a Z."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Paths:
    """Where things are on a node. Make one with `Paths.of`, which checks them."""

    root: str = "/opt/bedplate"
    state_dir: str = "/var/lib/bedplate"
    facts_dir: str = "/etc/ansible/facts.d"

    @classmethod
    def of(cls, root: str, state_dir: str, facts_dir: str) -> Paths:
        """Return the paths with links in their own parents resolved once.

        Raises:
            StateError: ``invalid`` for a path that is not absolute or climbs with ``..``.
        """
        for name, path in (("root", root), ("state_dir", state_dir), ("facts_dir", facts_dir)):
            if not path.startswith("/") or ".." in path.split("/") or "\0" in path or path.strip("/") == "":
                raise StateError("invalid", f"{name}: {path!r} is not an absolute path below /; give one without '..'.")
        return cls(os.path.realpath(root), os.path.realpath(state_dir), os.path.realpath(facts_dir))

    @property
    def generations(self) -> str:
        """The directory that holds every generation."""
        return os.path.join(self.root, "generations")

    @property
    def current(self) -> str:
        """The link that names the live generation."""
        return os.path.join(self.root, "current")

    @property
    def state(self) -> str:
        """The journal."""
        return os.path.join(self.state_dir, "state.json")

    @property
    def lock(self) -> str:
        """The file that every change locks with flock(2)."""
        return os.path.join(self.state_dir, "lock")

    @property
    def fact(self) -> str:
        """The local fact ``bedplate``."""
        return os.path.join(self.facts_dir, "bedplate.fact")

    def generation(self, identifier: str) -> str:
        """Return the directory of one generation.

        Raises:
            StateError: ``invalid`` for anything that is not a profile id.
        """
        if not ID.fullmatch(identifier):
            raise StateError(
                "invalid",
                f"{identifier[:100]!r} is not a generation id: it must look like NAME-0123456789ab, NAME up "
                "to 64 characters of a-z 0-9 . _ - and first a letter or digit.",
            )
        return os.path.join(self.generations, identifier)

    def has(self, identifier: str) -> bool:
        """Tell whether the generation's directory is on disk (a link does not count)."""
        return is_real_dir(self.generation(identifier))

    def read_current(self) -> tuple[str | None, str | None]:
        """Return (id that ``current`` names or None, what is wrong with it or None)."""
        try:
            target = os.readlink(self.current)
        except FileNotFoundError:
            return None, None
        except OSError:
            return None, f"{self.current} is not a symbolic link"
        prefix = self.generations + "/" if target.startswith("/") else "generations/"
        name = target[len(prefix) :].rstrip("/")
        if not target.startswith(prefix) or not ID.fullmatch(name):
            return None, f"{self.current} names {target}, which is not a generation"
        if not self.has(name):
            return name, f"{self.current} names {name}, which is not on disk"
        return name, None


def empty_state() -> dict[str, Any]:
    """Return the state of a node that Bedplate has never changed."""
    return {
        "schema": SCHEMA,
        "active": None,
        "previous": None,
        "generations": {},
        "layers": {},
        "intent": None,
        "runs": [],
    }


def _text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _known_or_none(name: object, generations: dict[str, Any]) -> bool:
    return name is None or (isinstance(name, str) and name in generations)


def _problem(state: Any) -> str | None:
    """Say what is wrong with a parsed state.json, or None. Hostile input must not get past here."""
    if not isinstance(state, dict):
        return "it is not a JSON object"
    if state.get("schema") != SCHEMA:
        return f"its schema is {state.get('schema')!r} and this Bedplate knows {SCHEMA}"
    generations, intent, runs = state.get("generations"), state.get("intent"), state.get("runs")
    if not isinstance(generations, dict) or not isinstance(runs, list):
        return "generations or runs are missing"
    for name, entry in generations.items():
        if not ID.fullmatch(name):
            return f"{name[:100]!r} is no generation id"
        if not isinstance(entry, dict) or entry.get("status") not in STATUSES:
            return f"generation {name} has no known status"
        if not all(_text_or_none(entry.get(key)) for key in ("profile", "target", "created", "verified", "reason")):
            return f"generation {name} has a field that is not text"
        if not layers.known(entry.get("layers", {})):
            return f"generation {name} has layers that are no records"
    for key in ("active", "previous"):
        if key not in state or not _known_or_none(state[key], generations):
            return f"{key} names no known generation"
    if intent is not None:
        texts = ("run_id", "kind", "step", "started")
        if not isinstance(intent, dict) or not all(isinstance(intent.get(key), str) for key in texts):
            return "the intent is incomplete"
        if not all(key in intent and _known_or_none(intent[key], generations) for key in ("from", "previous", "to")):
            return "the intent names no known generation"
        back_to_nothing = (intent["kind"], intent["step"]) == ("rollback", "undo")
        if intent["to"] is None and intent["kind"] != "layers" and not back_to_nothing:
            return "the intent goes nowhere"
        if not isinstance(intent.get("holder"), dict):
            return "the intent has no holder"
        if not isinstance(intent.get("verdicts", []), list) or not _text_or_none(intent.get("reason")):
            return "the intent is incomplete"
    wrong = layers.problem(state.get("layers", {}))
    if wrong:
        return wrong
    for run in runs:
        if not isinstance(run, dict) or not isinstance(run.get("run_id"), str) or run.get("result") not in RESULTS:
            return "a run is incomplete"
        needed = ("kind", "from", "previous", "to", "started")
        if not all(key in run and _text_or_none(run[key]) for key in needed):
            return "a run is incomplete"
        if not isinstance(run.get("verdicts"), list):
            return "a run has no list of verdicts"
    return None


def load(path: str) -> dict[str, Any]:
    """Return the state in file ``path``, or an empty one when there is no file.

    Raises:
        StateError: ``corrupt``, naming the file and the next action; the file is left as it is.
    """
    text = read_text(path)
    if text is None:
        return empty_state()
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as exc:
        problem: str | None = f"it is not JSON ({exc})"
    else:
        problem = _problem(state)
    if problem is not None:
        raise StateError(
            "corrupt",
            f"{path} cannot be used: {problem}. Nothing was changed and what is live stays live. Restore "
            "that file from a backup, or use the Bedplate version that wrote it; docs/rollback.md says how "
            "to start again without it.",
        )
    return {**empty_state(), **state}


def save(path: str, state: dict[str, Any]) -> None:
    """Write the state to file ``path`` as one durable step. Raises StateError as write_atomic does."""
    state["runs"] = state["runs"][-MAX_RUNS:]
    write_atomic(path, json.dumps(state, indent=1) + "\n")


def public(state: dict[str, Any]) -> dict[str, Any]:
    """Return the small part of the state that every user of the node may read: the local fact."""
    intent, runs = state["intent"], state["runs"]
    return {
        "schema": SCHEMA,
        "active": state["active"],
        "previous": state["previous"],
        "generations": {
            name: {key: entry.get(key) for key in ("status", "profile", "target")}
            for name, entry in state["generations"].items()
        },
        "layers": {
            layer: {key: (entry[key] or {}).get("version") for key in ("is", "to")}
            for layer, entry in state["layers"].items()
        },
        "intent": intent and {key: intent.get(key) for key in ("run_id", "kind", "from", "to", "step", "started")},
        "last_run": (
            {key: runs[-1].get(key) for key in ("run_id", "kind", "from", "to", "result", "reason", "ended")}
            if runs
            else None
        ),
    }


def publish(path: str, state: dict[str, Any]) -> None:
    """Write the local fact to file ``path`` unless it says so already. Raises StateError as write_atomic does."""
    text = json.dumps(public(state), indent=1) + "\n"
    try:
        if read_text(path) == text:
            return
    except StateError:
        pass  # a damaged fact is only a copy: write it anew
    write_atomic(path, text)
