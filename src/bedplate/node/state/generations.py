"""Generations of a node's environment: how one becomes live, and how the node goes back.

The order of writes is the whole point. Every change is announced in the journal before it is done
(``intent``), done by one rename(2), and then recorded as ended. `Generations.settle` can therefore tell from
the journal and the link ``current`` alone what a killed run had reached. At any moment ``current`` names a
verified generation or, on a node that has none yet, does not exist.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ..packages.manage import installed
from . import drift as drift_of
from . import layers as layers_of
from .change import Change
from .durable import StateError, is_real_dir, make_dir, sweep, sync_filesystem
from .journal import Paths, now, publish
from .lock import locked

__all__ = ["Generations", "StateError", "perform"]

Json = dict[str, Any]

# Steps that only this file sets: they tell settle what had been decided.
COMMIT, SWITCH, UNDO = "commit", "switch", "undo"
RESERVED = (COMMIT, SWITCH, UNDO)
# A run of this kind changes driver or toolkit and no generation; so does the rest of a run that has gone back.
LAYERS = "layers"


def _who(intent: Json) -> str:
    """Name the holder of an intent: USER@CONTROLLER (pid P, run R)."""
    holder = intent["holder"]
    user, controller, pid = (str(holder.get(key) or "?")[:80] for key in ("user", "controller", "pid"))
    return f"{user}@{controller} (pid {pid}, run {intent['run_id']})"


def _list(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def _blames_stack(verdicts: list[Json]) -> bool:
    """Tell whether a failing verdict is about the stack, the only layer that a generation is."""
    return any(v.get("status") == "fail" and v.get("layer") == "stack" for v in verdicts)


class Generations:
    """Every action on the generations of one node.

    Each action returns a dict with ``changed``, ``state`` (after), ``current`` (id that the link names, or
    None), ``settled`` (what was found unfinished and how it was ended, or None), ``switch_ms`` (milliseconds
    or None), ``removed`` (ids whose files were removed), ``message`` (one sentence) and ``diff``; some add
    keys that their docstring names. Every action but `read` holds the node's lock while it works, and raises
    `StateError`, having changed nothing, when it is refused.
    """

    def __init__(self, paths: Paths, *, check: bool = False, lock_timeout_s: float = 30.0) -> None:
        """Work on ``paths``; with ``check`` decide and report everything and write nothing."""
        self.paths = paths
        self.check = check
        self.lock_timeout_s = lock_timeout_s
        self.node = os.uname().nodename

    # ---- looking -------------------------------------------------------------------------------------------

    def read(self, generation: str = "", layers: Json | None = None) -> Json:
        """Report the state; never changes anything and takes no lock.

        Args:
            generation: an id that is wanted as the active one, or empty.
            layers: the wanted record of driver and toolkit, as far as they matter.

        Returns:
            The common keys and ``clean`` (active = current, verified, no intent, no drift, and the wanted one
            when one is named; the same of the wanted layers), ``drift`` (first 20 items of what differs),
            ``drift_counts`` (number by kind).

        Raises:
            PackageError: the package manager cannot be asked about the packages of a layer.
        """
        if generation:
            self.paths.generation(generation)
        change = Change(self.paths, check=True)
        active = change.state["active"]
        problems: list[str] = [change.current_problem] if change.current_problem else []
        counts: dict[str, int] = {}
        if active and change.on_disk(active):
            found = drift_of.inspect(self.paths.generation(active))
            problems += found.items
            counts = found.counts
        elif active:
            problems.append(f"{active} is active and not on disk")
        if change.current != active and not change.current_problem:
            problems.append(f"{self.paths.current} names {change.current or 'nothing'}, the journal says {active}")
        unlike = layers_of.problems(change.state, layers or {}, installed)
        if unlike:
            counts = {**counts, LAYERS: len(unlike)}
            problems += unlike
        # Without a wanted stack, layers alone can be clean on a node that has no generation.
        settled = change.usable(active) or (active is None and not generation and bool(layers))
        clean = settled and change.intent is None and not problems and generation in ("", active)
        if change.intent:
            message = f"{_who(change.intent)} is changing this node, at step {change.intent['step']}."
        else:
            message = f"{active or 'No generation'} is active{'' if not problems else ', with ' + problems[0]}."
        change.result.update(clean=clean, drift=problems[: drift_of.SHOWN], drift_counts=counts)
        return change.report(message)

    # ---- a run forward -------------------------------------------------------------------------------------

    def begin(
        self,
        run_id: str,
        generation: str = "",
        *,
        kind: str = "provision",
        profile: str = "",
        target: str = "",
        holder: Json | None = None,
        step: str = "",
        take_over: bool = False,
    ) -> Json:
        """Announce a change, and make room for it. The same run may call it again.

        A generation that is built or verified already and undamaged is kept (``reused``); a failed,
        half-built or drifted one is removed and starts anew, unless it is the live one, which is never
        touched: that is refused. ``kind`` rollback needs a verified generation to go to; an empty
        ``generation`` means the previous one; the active one needs no change and gets no intent. ``kind`` layers
        leaves the generations alone.

        Returns:
            The common keys, ``generation`` (id), ``directory`` (its path), ``reused`` (no build is needed).

        Raises:
            StateError: ``busy`` when another run's intent is there and not ``take_over``; ``refused`` when
                there is nothing to go to or the live generation has drifted; ``locked``, ``corrupt``,
                ``no_space``, ``io``.
        """
        _need("run_id", run_id)
        if generation:
            self.paths.generation(generation)
        with self._changing() as change:
            self._refuse_others(change, run_id, take_over)
            self._finish_decided(change, run_id)
            intent = _mine(change, run_id)
            if intent:
                if generation and generation != intent["to"]:
                    raise StateError(
                        "refused",
                        f"run {run_id} is changing {self.node} to {intent['to']} already; end that before "
                        f"{generation}.",
                    )
            else:
                self._settle(change)
                if kind == "rollback" and generation and generation == change.state["active"]:
                    if not layers_of.differ(change.state, generation):
                        change.result.update(
                            generation=generation, directory=self.paths.generation(generation), reused=True
                        )
                        return change.report(f"{generation} is active already.")
                    kind = LAYERS  # it stays, and what differs below it goes back to what it pins
                intent = self._announce(change, run_id, generation, kind, profile, target, holder or {}, step)
            to = intent["to"]
            if intent["kind"] == LAYERS:
                change.result.update(generation=to, directory=None, reused=True)
                return change.report(f"Run {run_id} changes layers; {to or 'no generation'} stays live.")
            reused = change.generations[to]["status"] in ("built", "verified")
            if not reused:
                change.make(to)
            change.result.update(generation=to, directory=self.paths.generation(to), reused=reused)
            return change.report(
                f"Run {run_id} {'goes to' if reused else 'builds'} {to}; {intent['from'] or 'nothing'} is live."
            )

    def _announce(
        self,
        change: Change,
        run_id: str,
        generation: str,
        kind: str,
        profile: str,
        target: str,
        holder: Json,
        step: str,
    ) -> Json:
        """Write the intent; for a build also the generation's entry, after removing what cannot be reused."""
        active = change.state["active"]
        stamp = now()
        if kind == LAYERS:
            return self._announce_layers(change, run_id, holder)
        if kind == "rollback":
            to = self._destination(change, generation)
        else:
            _need("generation", generation)
            to = generation
            path = self.paths.generation(to)
        intent = {
            "run_id": run_id,
            "kind": kind,
            "from": active,
            "previous": change.state["previous"],
            "to": to,
        }
        intent.update(step=step or "begin", holder=holder, started=stamp, updated=stamp)
        entry = change.generations.get(to)
        whole = bool(entry and entry["status"] in ("built", "verified") and change.on_disk(to))
        if kind != "rollback" and whole:
            found = drift_of.inspect(path)
            if found and to == active:
                others = change.verified(active)
                raise StateError(
                    "refused",
                    f"{to} is live on {self.node} and was changed since it was built ({found.sentence()}). "
                    "A live generation is never repaired in place. "
                    + (
                        f"Go back first (verified: {_list(others)}), then provision it again."
                        if others
                        else "There is no other verified one; to be without a stack while it is built "
                        f"again, move {path} away and run again."
                    ),
                )
            whole = not found
        change.state["intent"] = intent
        if kind != "rollback" and not whole:
            change.generations.pop(to, None)  # to the end: the order is the order of builds
            change.generations[to] = {
                "profile": profile or to,
                "target": target,
                "status": "building",
                "created": stamp,
                "verified": None,
                "reason": None,
            }
            if change.state["previous"] == to:
                change.fix_previous(None)
        change.save()
        if kind != "rollback" and not whole:
            change.discard(to)
        return intent

    def _announce_layers(self, change: Change, run_id: str, holder: Json) -> Json:
        """Write the intent of a run that leaves the generations alone."""
        active, stamp = change.state["active"], now()
        intent = {
            "run_id": run_id,
            "kind": LAYERS,
            "from": active,
            "previous": change.state["previous"],
            "to": active,
            "step": LAYERS,
            "holder": holder,
            "started": stamp,
            "updated": stamp,
        }
        change.state["intent"] = intent
        change.save()
        return intent

    def layer(self, run_id: str, layer: str, phase: str, record: Json | None = None, found: Json | None = None) -> Json:
        """Announce (``phase`` begin) or conclude (``phase`` done) the change of driver or toolkit.

        Args:
            record: what the layer is changed to; needed to begin.
            found: what the node had, for a layer that Bedplate did not install; it can be gone back to.

        Raises:
            StateError: ``refused`` when this run has no change under way, or has not begun this layer.
        """
        with self._changing() as change:
            if self._only_planned(change, run_id):
                return change.report(f"Run {run_id} would change the {layer} to {(record or {}).get('version')}.")
            intent = self._own(change, run_id, "")
            if phase == "begin":
                if not (record or {}).get("version"):
                    raise StateError("invalid", "record needs the version that the layer is changed to.")
                layers_of.begin(change.state, layer, record or {}, found or {}, run_id)
            else:
                entry = change.state["layers"].get(layer)
                if not entry or entry["run_id"] != run_id:
                    raise StateError("refused", f"run {run_id} has not begun to change the {layer}; begin it first.")
                if entry["to"] is None:
                    return change.report(f"The {layer} is {(entry['is'] or {}).get('version')} already.")
                layers_of.done(change.state, layer)
            intent.update(updated=now())
            change.save()
            entry = change.state["layers"][layer]
            to = entry["to"] or entry["is"]
            return change.report(f"The {layer} {'changes to' if entry['to'] else 'is'} {to['version']}.")

    def end(self, run_id: str, verdicts: list[Json] | None = None) -> Json:
        """End a run of kind layers: one that changed no generation, or what a rollback has held open.

        Raises:
            StateError: ``refused`` when this run has no change under way, or one of a generation.
        """
        with self._changing() as change:
            if change.intent is None and change.last_run(run_id):
                return change.report(f"Run {run_id} has ended already.")
            if self._only_planned(change, run_id):
                return change.report(f"Run {run_id} would end.")
            intent = self._own(change, run_id, "", of="layers")
            run = change.last_run(run_id)
            if run:  # it has gone back; how it ended is written down already
                run["verdicts"] = run["verdicts"] + (verdicts or [])
                change.state["intent"] = None
            else:
                change.end_run(intent, "active", None, verdicts or [])
            change.save()
            return change.report(f"Run {run_id} has ended; {change.state['active'] or 'nothing'} is live.")

    def step(self, run_id: str, step: str) -> Json:
        """Note how far the run is; ``step`` is free text except for the words commit, switch and undo.

        Raises:
            StateError: ``refused`` when this run has no change under way (it ended, or another took over).
        """
        _need("step", step)
        if step in RESERVED:
            raise StateError("invalid", f"step {step!r} is set by Bedplate itself; use another word.")
        with self._changing() as change:
            if self._only_planned(change, run_id):
                return change.report(f"Run {run_id} would be at step {step}.")
            self._finish_decided(change, run_id)
            intent = self._own(change, run_id, "")
            if intent["step"] != step:
                intent.update(step=step, updated=now())
                change.save()
            return change.report(f"Run {run_id} is at step {step}.")

    def built(self, run_id: str, generation: str = "") -> Json:
        """Seal what the run has built: flush it to disk, write manifest.json, mark it built.

        Returns:
            The common keys and, when it was sealed now, ``manifest``: the numbers ``dists``, ``files``,
            ``bytes`` and ``unlike_record``.

        Raises:
            StateError: ``refused`` as step does; ``missing`` when there is no environment to seal.
        """
        with self._changing() as change:
            if self._only_planned(change, run_id):
                return change.report(f"Run {run_id} would seal {generation or 'what it builds'}.")
            self._finish_decided(change, run_id)
            intent = self._own(change, run_id, generation, of="a generation")
            entry = change.generations[intent["to"]]
            if entry["status"] != "building":
                return change.report(f"{intent['to']} is {entry['status']} already.")
            path = self.paths.generation(intent["to"])
            if not self.check:
                manifest = drift_of.write_manifest(path)
                sync_filesystem(path)
                change.result["manifest"] = {
                    "dists": len(manifest["dists"]),
                    "files": manifest["files"],
                    "bytes": manifest["bytes"],
                    "unlike_record": len(manifest["known"]),
                }
            entry["status"] = "built"
            intent.update(updated=now())
            change.save()
            return change.report(f"{intent['to']} is built.")

    def commit(self, run_id: str, generation: str = "", verdicts: list[Json] | None = None) -> Json:
        """Make the generation live: it is verified, and one rename puts it in place.

        Raises:
            StateError: ``refused`` when this run has no change under way, or the generation is not built.
        """
        with self._changing() as change:
            last = change.last_run(run_id)
            if change.intent is None and last and last["result"] == "active" and generation in ("", last["to"]):
                return change.report(f"{last['to']} is active already.")
            if self._only_planned(change, run_id):
                return change.report(f"{generation or 'What run ' + run_id + ' builds'} would be active.")
            intent = self._own(change, run_id, generation, of="a generation")
            to = intent["to"]
            entry = change.generations[to] if intent["kind"] == "provision" else None
            if entry is None or entry["status"] not in ("built", "verified") or not change.on_disk(to):
                what = entry["status"] if entry else "where this run goes back to"
                raise StateError(
                    "refused",
                    f"{to or 'Nothing'} is {what}, and only what is built and verified goes live: build it again.",
                )
            entry.update(status="verified", verified=now(), reason=None, layers=layers_of.records(change.state))
            intent.update(step=COMMIT, updated=now(), verdicts=verdicts or [])
            change.save()
            if change.current != to or change.current_problem:
                change.switch(to)
            self._end_switch(change, intent, "active", None, intent["verdicts"])
            change.save()
            return change.report(f"{to} is active.")

    def _end_switch(self, change: Change, intent: Json, result: str, reason: str | None, verdicts: list[Json]) -> None:
        """The journal's part of a commit, or of a rollback on demand, after the rename."""
        was = change.state["active"]
        change.state["active"] = intent["to"]
        change.fix_previous(was if was != intent["to"] else change.state["previous"])
        change.end_run(intent, result, reason, verdicts)

    # ---- and back ------------------------------------------------------------------------------------------

    def fail(self, run_id: str, reason: str, verdicts: list[Json] | None = None) -> Json:
        """End the run before its commit: the generation is failed, what is live stays live.

        A half-built generation loses its files (a full disk is a common reason), a built one keeps them for
        study. One that was verified earlier is blamed only when a failing verdict is about the stack. A run
        that has no change under way is left alone (``changed`` false), so a rescue may always call this.

        Raises:
            StateError: ``refused`` when this run has committed already: use `rollback`.
        """
        with self._changing() as change:
            self._finish_decided(change, run_id)
            intent = _mine(change, run_id)
            if intent:
                return self._end_failed(change, intent, reason, verdicts or [])
            last = change.last_run(run_id)
            if last and last["result"] == "active":
                raise StateError("refused", f"run {run_id} has committed {last['to']} already: roll it back.")
            return change.report(f"Run {run_id} has no change under way; nothing to undo.")

    def _end_failed(self, change: Change, intent: Json, reason: str, verdicts: list[Json], hold: bool = False) -> Json:
        """End a run whose generation has not been live."""
        to = intent["to"]
        entry = change.generations.get(to)
        if entry and entry["status"] == "building":
            change.discard(to)  # before the journal: the disk may be full
        if entry and intent["kind"] == "provision" and to != intent["from"]:
            if entry["status"] != "verified" or _blames_stack(verdicts):
                entry.update(status="failed", reason=reason)
            change.fix_previous(intent["previous"])
        run = change.last_run(intent["run_id"])
        if run:  # it has gone back, and failed on the way through the layers below
            run.update(result="failed", reason=reason, verdicts=run["verdicts"] + verdicts)
            change.state["intent"] = None
        else:
            change.end_run(intent, "failed", reason, verdicts)
        self._hold(change, intent, hold and bool(layers_of.to_undo(change.state, intent["run_id"])))
        change.save()
        return change.report(
            f"{change.state['active'] or 'Nothing'} stays live; run {intent['run_id']} failed: {reason}"
        )

    def rollback(
        self,
        run_id: str,
        generation: str = "",
        *,
        kind: str = "provision",
        reason: str = "",
        verdicts: list[Json] | None = None,
        holder: Json | None = None,
        take_over: bool = False,
        hold: bool = False,
    ) -> Json:
        """Go back.

        * In a run of kind rollback (begun, or begun here with ``kind`` rollback): to ``generation``, or to
          the previous one.
        * In a provisioning run after its commit: the new generation is failed with ``reason``, and active and
          previous are what they were before the run.
        * In a provisioning run before its commit: the same as `fail`.
        * Without any of these: nothing to undo, ``changed`` false.

        Args:
            hold: keep the node for this run, with an intent of kind layers, while the layers below the stack go
                back: after a rollback on demand always, else when this run has changed any. `end` lets it go.

        Returns:
            The common keys and ``to_undo``: driver and toolkit as this run found them, where it changed them,
            the newest first; each a dict with ``layer`` and ``record`` (None when there was none).

        Raises:
            StateError: ``refused`` when there is no verified generation to go to (says which there are);
            ``busy``.
        """
        _need("run_id", run_id)
        with self._changing() as change:
            change.result.update(to_undo=layers_of.to_undo(change.state, run_id))
            self._finish_decided(change, run_id, (COMMIT, UNDO))
            intent = _mine(change, run_id)
            if intent and intent["kind"] == LAYERS and change.last_run(run_id):
                return change.report(f"Run {run_id} has gone back already, except for what is in to_undo.")
            if intent and intent["kind"] == LAYERS and kind == "rollback":
                return change.report(f"{intent['to']} is active already; the layers below it go back.")
            if intent and intent["kind"] in ("provision", LAYERS):
                return self._end_failed(change, intent, reason, verdicts or [], hold)
            if intent:
                return self._go_back(change, intent, generation, reason, verdicts or [], hold)
            nothing = f"Run {run_id} has no change under way; nothing to undo."
            if kind != "rollback" and change.last_run(run_id) is None:
                return change.report(nothing)
            self._refuse_others(change, run_id, take_over)
            if change.intent:
                self._settle(change)
            last = change.last_run(run_id)
            if last and last["result"] == "active":
                return self._undo(change, last, reason, verdicts or [], holder or {}, hold)
            if last:
                # Its commit may have been settled a moment ago, for want of room; its layers still go back.
                self._hold(change, {**last, "holder": holder or {}}, hold and bool(change.result["to_undo"]))
                if change.intent:
                    change.save()
                return change.report(f"Run {run_id} has ended already: {last['result']}.")
            if kind != "rollback":
                return change.report(nothing)
            self._settle(change)
            if generation and generation == change.state["active"]:
                return change.report(f"{generation} is active already.")
            intent = self._announce(change, run_id, generation, "rollback", "", "", holder or {}, SWITCH)
            return self._go_back(change, intent, generation, reason, verdicts or [], hold)

    def _hold(self, change: Change, intent: Json, hold: bool) -> None:
        """After a run has gone back to a generation, keep the node for it while the layers below go back."""
        if hold:
            active = change.state["active"]
            kept = {key: intent[key] for key in ("run_id", "holder", "started")}
            change.state["intent"] = {
                **kept,
                "kind": LAYERS,
                "from": active,
                "previous": change.state["previous"],
                "to": active,
                "step": LAYERS,
                "updated": now(),
            }

    def _go_back(
        self, change: Change, intent: Json, generation: str, reason: str, verdicts: list[Json], hold: bool
    ) -> Json:
        """Carry out a rollback on demand."""
        to = intent["to"]
        if generation not in ("", to):
            raise StateError(
                "refused",
                f"run {intent['run_id']} is going back to {to}; end that before {generation}.",
            )
        if not change.usable(to):
            raise StateError(
                "refused",
                f"cannot go back to {to}: it is not on disk any more. Verified: "
                f"{_list(change.verified(change.state['active']))}. End this run and name one of those.",
            )
        if intent["step"] != SWITCH:
            intent.update(step=SWITCH, updated=now())
            change.save()
        if change.current != to or change.current_problem:
            change.switch(to)
        self._end_switch(change, intent, "rolled_back", reason or None, verdicts)
        self._hold(change, intent, hold)
        change.save()
        return change.report(f"{to} is active again.")

    def _destination(self, change: Change, wanted: str) -> str:
        """The verified, undamaged generation that a rollback goes to."""
        active = change.state["active"]
        if wanted:
            self.paths.generation(wanted)
        to = wanted or change.state["previous"]
        others = change.verified(active)
        if not to:
            raise StateError(
                "refused",
                f"there is no previous verified generation on {self.node} to go back to (active: "
                f"{active or 'none'}, other verified: {_list(others)}). Name one of those, or provision a "
                "profile that works.",
            )
        if not change.usable(to):
            entry = change.generations.get(to)
            what = "unknown here" if entry is None else entry["status"] if change.on_disk(to) else "not on disk"
            raise StateError(
                "refused",
                f"cannot go back to {to}: it is {what} on {self.node}. Verified: {_list(others)}. Name one of those.",
            )
        found = drift_of.inspect(self.paths.generation(to))
        if found:
            raise StateError(
                "refused",
                f"cannot go back to {to}: it was changed since it was verified ({found.sentence()}). Other "
                f"verified: {_list([name for name in others if name != to])}. Name one of those, or "
                f"provision {to} again.",
            )
        return str(to)

    def _undo(self, change: Change, run: Json, reason: str, verdicts: list[Json], holder: Json, hold: bool) -> Json:
        """Take back a commit of this very run, which is the last one on the node."""
        bad, back = run["to"], run["from"]
        hold = hold and bool(layers_of.to_undo(change.state, run["run_id"]))
        if bad == back or bad not in change.generations:
            run.update(result="failed", reason=reason, verdicts=run["verdicts"] + verdicts)
            self._hold(change, {**run, "holder": holder}, hold)
            change.save()
            return change.report(
                f"Run {run['run_id']} changed no generation; {change.state['active'] or 'nothing'} stays live: {reason}"
            )
        if back is not None and not change.usable(back):
            raise StateError(
                "refused",
                f"cannot go back to {back}, which was live before: it is not on disk or not verified any "
                f"more. Verified: {_list(change.verified(bad))}. Roll back to one of those by name.",
            )
        stamp = now()
        intent = {
            "run_id": run["run_id"],
            "kind": "rollback",
            "from": bad,
            "previous": run["previous"],
            "to": back,
        }
        intent.update(
            step=UNDO,
            holder=holder,
            started=run.get("started") or stamp,
            updated=stamp,
            reason=reason,
            verdicts=verdicts,
        )
        change.state["intent"] = intent
        change.save()
        self._finish_undo(change, intent)
        self._hold(change, intent, hold)
        change.save()
        return change.report(f"{back or 'Nothing, as before,'} is active again; {bad} failed: {reason}")

    def _finish_undo(self, change: Change, intent: Json) -> None:
        """Switch and write down; also called by settle, so everything needed is in the intent."""
        bad, back = intent["from"], intent["to"]
        if change.current != back or change.current_problem:
            change.switch(back)
        change.state["active"] = back
        if bad != back and bad in change.generations:
            change.generations[bad].update(status="failed", reason=intent.get("reason"))
        change.fix_previous(intent["previous"])
        run = change.last_run(intent["run_id"])
        if run:
            run.update(result="rolled_back", reason=intent.get("reason"), ended=now())
            run.update(switch_ms=change.switch_ms, verdicts=run["verdicts"] + intent.get("verdicts", []))
        change.state["intent"] = None

    # ---- after an interruption -----------------------------------------------------------------------------

    def settle(self, run_id: str = "", *, take_over: bool = False) -> Json:
        """End what was interrupted: a finished switch is completed, otherwise the live one stays.

        ``settled`` says what was found. A half-built generation is removed; a built one is kept for reuse.
        ``current`` is put back to the active generation, or, when an operator has pointed it at another
        verified one by hand, the journal follows.

        Raises:
            StateError: ``busy`` for another run's intent without ``take_over``; ``refused`` when ``current``
                names something unknown and there is no verified generation to put in its place.
        """
        with self._changing() as change:
            self._refuse_others(change, run_id, take_over)
            self._settle(change)
            return change.report(" ".join(change.settled) or "Nothing was left unfinished.")

    def _finish_decided(self, change: Change, run_id: str, steps: tuple[str, ...] = RESERVED) -> None:
        """End what this run had decided and could not record (a full disk) before it goes on."""
        intent = _mine(change, run_id)
        if intent and intent["step"] in steps:
            self._settle_intent(change, intent)

    def _settle(self, change: Change) -> None:
        if change.intent:
            self._settle_intent(change, change.intent)
        self._settle_current(change)
        self._forget_gone(change)

    def _settle_intent(self, change: Change, intent: Json) -> None:
        to, step, active = intent["to"], intent["step"], change.state["active"]
        told = f"{_who(intent)} was interrupted at step {step} on the way to {to or 'no generation'}: "
        there = change.usable(to) and change.current == to
        if step == COMMIT and there:
            told += "its commit was complete and is recorded now."
            self._end_switch(change, intent, "active", told, intent.get("verdicts", []))
        elif step == SWITCH and there:
            told += "its switch was complete and is recorded now."
            self._end_switch(change, intent, "rolled_back", told, [])
        elif step == UNDO and (to is None or change.usable(to)):
            told += f"it was going back from {intent['from']}, which is done now."
            self._finish_undo(change, intent)
        else:
            entry = change.generations.get(to)
            told += f"{active or 'nothing'} stays live"
            if entry and entry["status"] == "building":
                change.discard(to)
                del change.generations[to]
                if change.state["previous"] == to:
                    change.fix_previous(None)
                told += f", the half-built {to} is removed"
            elif entry and to != active:
                told += f", {to} is {entry['status']} and is kept"
            unfinished = [name for name, item in change.state["layers"].items() if item["to"] is not None]
            if unfinished:
                told += f", the change of the {' and the '.join(unfinished)} is not finished"
            told += "."
            change.end_run(intent, "settled", told, [])
        change.settled.append(told)
        change.save()

    def _settle_current(self, change: Change) -> None:
        """Bring the link and the journal together again."""
        active, names, problem = change.state["active"], change.current, change.current_problem
        if names == active and problem is None:
            return
        if problem is None and change.usable(names):
            change.state["active"] = names
            change.fix_previous(active)
            change.settled.append(f"{self.paths.current} was pointed at {names} by hand; the journal follows.")
        elif change.usable(active):
            change.switch(active)
            told = problem or f"{self.paths.current} named {names or 'nothing'}"
            change.settled.append(f"{told}: it names {active} again.")
            return
        elif active is not None and not change.on_disk(active) and (names in (None, active)):
            # its files were taken away: the link, if there is one, dangles and serves nobody
            if os.path.lexists(self.paths.current):
                change.switch(None)
            change.state["active"] = None
            change.settled.append(f"{active}, which was active, is not on disk any more; nothing is live now.")
        else:
            raise StateError(
                "refused",
                f"{problem or f'{self.paths.current} names {names}, which is not verified here'}, and the "
                f"journal has no verified generation to put there (active: {active or 'none'}). Look at it, "
                f"remove {self.paths.current} or point it at a verified generation, and run again.",
            )
        change.save()

    def _forget_gone(self, change: Change) -> None:
        """Drop entries whose files somebody removed by hand. A failed one may be without files."""
        gone = [
            name
            for name, entry in change.generations.items()
            if entry["status"] in ("built", "verified") and not change.on_disk(name) and name != change.state["active"]
        ]
        for name in gone:
            del change.generations[name]
            change.settled.append(f"{name} is not on disk any more and is forgotten.")
        if gone:
            if change.state["previous"] in gone:
                change.state["previous"] = None
                change.fix_previous(None)
            change.save()

    def prune(self, keep: int = 3) -> Json:
        """Remove the oldest generations so that ``keep`` are left, counting failed ones.

        Never removed: active, previous, the last verified one, what ``current`` names, and what an intent
        names, even if that leaves more than ``keep``. ``removed`` lists the ids.

        Raises:
            StateError: ``invalid`` when ``keep`` is less than 1.
        """
        if keep < 1:
            raise StateError("invalid", f"keep: {keep} would keep nothing; give 1 or more.")
        with self._changing() as change:
            state, intent = change.state, change.intent or {}
            safe = {state["active"], state["previous"], change.newest_verified(), change.current}
            safe |= {intent.get("from"), intent.get("previous"), intent.get("to")}
            newest_first = list(reversed(list(change.generations)))
            room = keep - sum(name in safe for name in newest_first)
            old = [name for name in newest_first if name not in safe][max(room, 0) :]
            for name in reversed(old):
                change.discard(name)
                del change.generations[name]
            if old:
                change.removed = [*change.removed, *(name for name in old if name not in change.removed)]
                change.save()
            return change.report(f"Removed: {_list(change.removed)}.")

    # ---- shared --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Change]:
        """Hold the lock, load the state, end interrupted removals; afterwards publish the fact."""
        if self.check:
            yield Change(self.paths, check=True)
            return
        with locked(self.paths.lock, self.lock_timeout_s):
            change = Change(self.paths, check=False)
            if is_real_dir(self.paths.generations):
                sweep(self.paths.generations)
            elif os.path.lexists(self.paths.generations):
                raise StateError(
                    "io",
                    f"{self.paths.generations} is not a directory; mount or link {self.paths.root} itself instead.",
                )
            yield change
            if change.touched or os.path.lexists(self.paths.state):
                make_dir(self.paths.facts_dir)
                publish(self.paths.fact, change.state)

    def _refuse_others(self, change: Change, run_id: str, take_over: bool) -> None:
        intent = change.intent
        if intent is None or intent["run_id"] == run_id or take_over:
            return
        raise StateError(
            "busy",
            f"{self.node} is being changed by {_who(intent)} since {intent['started']}, at step "
            f"{intent['step']}; wait until that run ends or, when it is dead, run again with "
            "bedplate_take_over=true.",
        )

    def _only_planned(self, change: Change, run_id: str) -> bool:
        """In check mode begin has written nothing, so the steps after it have nothing to stand on: say so."""
        planned = self.check and _mine(change, run_id) is None
        if planned:
            change.result["changed"] = True
        return planned

    def _own(self, change: Change, run_id: str, generation: str, of: str = "") -> Json:
        """The intent, when it is this run's and, where ``of`` says so, one of layers or of a generation."""
        _need("run_id", run_id)
        self._refuse_others(change, run_id, take_over=False)
        intent = change.intent
        if intent is None:
            last = change.state["runs"][-1] if change.state["runs"] else None
            ended = f" (last: run {last['run_id']}, {last['result']})" if last else ""
            raise StateError(
                "refused",
                f"run {run_id} has no change under way on {self.node}{ended}; begin first, or start the run again.",
            )
        if of and (of == LAYERS) != (intent["kind"] == LAYERS):
            raise StateError(
                "refused",
                f"run {run_id} changes a generation: commit it or roll it back."
                if of == LAYERS
                else f"run {run_id} changes layers and no generation: end it.",
            )
        if generation and generation != intent["to"]:
            raise StateError("refused", f"run {run_id} changes {self.node} to {intent['to']}, not to {generation}.")
        return intent


def _mine(change: Change, run_id: str) -> Json | None:
    """The intent, when it is this run's."""
    intent = change.intent
    return intent if intent and intent["run_id"] == run_id else None


def _need(name: str, value: str) -> None:
    if not value:
        raise StateError("invalid", f"{name} is needed for this action.")


def perform(node: Generations, given: Json) -> Json:
    """Run the action that a module's parameters name, with those of them that it takes."""
    takes = {
        "read": ("generation", "layers"),
        "begin": ("run_id", "generation", "kind", "profile", "target", "holder", "step", "take_over"),
        "step": ("run_id", "step"),
        "layer": ("run_id", "layer", "phase", "record", "found"),
        "end": ("run_id", "verdicts"),
        "built": ("run_id", "generation"),
        "commit": ("run_id", "generation", "verdicts"),
        "fail": ("run_id", "reason", "verdicts"),
        "rollback": ("run_id", "generation", "kind", "reason", "verdicts", "holder", "take_over", "hold"),
        "settle": ("run_id", "take_over"),
        "prune": ("keep",),
    }
    action = given["action"]
    result: Json = getattr(node, action)(**{name: given[name] for name in takes[action]})
    return result
