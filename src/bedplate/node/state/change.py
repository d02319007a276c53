"""One change of a node's state in memory, and the only hands that carry it to the disk."""

from __future__ import annotations

import copy
import os
from typing import Any

from .durable import StateError, discard_tree, is_real_dir, make_dir, remove_link, switch_link
from .journal import Paths, load, now, public, save

__all__ = ["Change"]

Json = dict[str, Any]


class Change:
    """The state under change, and the only hands that touch the disk; in check mode they touch nothing."""

    def __init__(self, paths: Paths, check: bool) -> None:
        """Load the state.

        Raises:
            StateError: ``corrupt``; ``missing`` when the file system with the generations is not there.
        """
        self.paths = paths
        self.check = check
        self.state = load(paths.state)
        self.before = copy.deepcopy(self.state)
        self.current, self.current_problem = paths.read_current()
        self.current_before = self.current
        self.gone: set[str] = set()  # removed already, or would be in check mode
        self.removed: list[str] = []
        self.touched = False
        self.switch_ms: float | None = None
        self.settled: list[str] = []
        self.result: Json = {}
        known = [name for name, entry in self.generations.items() if entry["status"] in ("built", "verified")]
        if known and not is_real_dir(paths.generations):
            raise StateError(
                "missing",
                f"{paths.generations} is missing although {paths.state} names {len(known)} generation(s) in "
                "it. Is its file system mounted? Mount it; or, when it is lost for good, move "
                f"{paths.state} away and provision again.",
            )

    @property
    def generations(self) -> Json:
        """Every generation's entry by id."""
        entries: Json = self.state["generations"]
        return entries

    @property
    def intent(self) -> Json | None:
        """The change under way, or None."""
        intent: Json | None = self.state["intent"]
        return intent

    def usable(self, name: str | None) -> bool:
        """Verified, and on disk."""
        entry = self.generations.get(name) if name else None
        return bool(entry and entry["status"] == "verified" and self.on_disk(str(name)))

    def on_disk(self, name: str) -> bool:
        """Its directory is there, and was not removed in this change."""
        return name not in self.gone and self.paths.has(name)

    def newest_verified(self, *exclude: str | None) -> str | None:
        """The verified generation that was verified last, leaving out ``exclude``."""
        return max(self.verified(*exclude), key=lambda name: self.generations[name].get("verified") or "", default=None)

    def verified(self, *exclude: str | None) -> list[str]:
        """Every verified generation, leaving out ``exclude``."""
        return [name for name in self.generations if self.usable(name) and name not in exclude]

    def save(self) -> None:
        """Write the journal."""
        self.touched = True
        if not self.check:
            save(self.paths.state, self.state)

    def switch(self, name: str | None) -> None:
        """Point ``current`` at a generation, or remove it."""
        self.touched = True
        if not self.check:
            if name is None:
                self.switch_ms = remove_link(self.paths.current)
            else:
                self.switch_ms = switch_link(self.paths.current, f"generations/{name}")
        self.current, self.current_problem = name, None

    def discard(self, name: str) -> None:
        """Remove the files of a generation, which must not be live."""
        path = self.paths.generation(name)
        if name == self.current or not os.path.lexists(path):
            return
        self.touched = True
        self.gone.add(name)
        self.removed.append(name)
        if not self.check:
            discard_tree(path)

    def make(self, name: str) -> None:
        """Make the empty directory of a generation unless it is there."""
        if self.on_disk(name):
            return
        self.touched = True
        if not self.check:
            make_dir(self.paths.generation(name))
            self.gone.discard(name)

    def end_run(self, intent: Json, result: str, reason: str | None, verdicts: list[Json]) -> None:
        """Close the intent and write down how the run ended; a run has one record."""
        record = {key: intent.get(key) for key in ("run_id", "kind", "from", "previous", "to")}
        record.update(result=result, reason=reason, started=intent["started"], ended=now())
        record.update(switch_ms=self.switch_ms, verdicts=verdicts)
        self.state["intent"] = None
        self.state["runs"].append(record)

    def fix_previous(self, wanted: str | None) -> None:
        """Make ``previous`` the wanted generation when it can be gone back to, else the best other one."""
        active = self.state["active"]
        self.state["previous"] = wanted if wanted != active and self.usable(wanted) else self.newest_verified(active)

    def report(self, message: str) -> Json:
        """Return what every action returns."""
        changed = self.touched and (
            self.state != self.before or self.current != self.current_before or bool(self.removed)
        )
        result: Json = {
            "changed": changed,
            "state": self.state,
            "current": self.current,
            "settled": " ".join(self.settled) or None,
            "switch_ms": self.switch_ms,
            "removed": self.removed,
            "message": message,
            "diff": {
                "before": {**public(self.before), "current": self.current_before},
                "after": {**public(self.state), "current": self.current},
            },
        }
        result.update(self.result)
        return result

    def last_run(self, run_id: str) -> Json | None:
        """The record of this run when it is the last one on the node."""
        runs = self.state["runs"]
        return runs[-1] if runs and runs[-1]["run_id"] == run_id else None
