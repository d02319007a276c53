"""Questions about a node's journal that only a person's words raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bedplate.node.verdicts import CODES

from .errors import BedplateError, near


def generation_named(state: Mapping[str, Any], wanted: str) -> str:
    """Return the id of the generation that *wanted* means.

    Args:
        state: the node's journal, as module bedplate_state returns it.
        wanted: an id, a profile name (its generation verified last is meant), or empty (stays empty: the node knows
            its previous one).

    Raises:
        BedplateError: no verified generation has that id or profile; names the near one and those there are.
    """
    generations: Mapping[str, Mapping[str, Any]] = state["generations"]
    if not wanted or wanted in generations:
        return wanted
    verified = {name: g for name, g in generations.items() if g["status"] == "verified"}
    of_profile = [name for name, g in verified.items() if g["profile"] == wanted]
    if not of_profile:
        known = sorted({g["profile"] for g in verified.values()} | verified.keys())
        hint = near(wanted, known) or "."
        raise BedplateError(
            f"no verified generation `{wanted}` on this node{hint} Verified: {', '.join(known) or 'none'}."
        )
    return max(of_profile, key=lambda name: verified[name]["verified"])


def layers_to_go_back(state: Mapping[str, Any], profile: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the layers below the stack that a node must change to be on *profile* again, the newest first.

    Args:
        state: the node's journal.
        profile: the profile.json that a generation carries; its blocks driver and toolkit may be None.

    Returns:
        A dict with ``layer`` and ``record`` for each layer that Bedplate manages on the node and that differs. The
        record is the one that the generation was verified on, or another one of that version that the journal
        remembers, with its exact packages; else what the profile pins, from the source in use.
    """
    verified_on = state["generations"].get(profile["id"], {}).get("layers", {})
    changes = []
    for layer in ("toolkit", "driver"):
        pins, entry = profile.get(layer), state["layers"].get(layer)
        if not pins or not entry or not (entry["is"] or entry["to"]):
            continue
        now = entry["is"] or {}
        if entry["to"] is None and all(now.get(key, value) == value for key, value in pins.items()):
            continue
        past = [verified_on.get(layer) or {}, now, entry["was"] or {}]
        remembered = next((record for record in past if record.get("version") == pins["version"]), {})
        source = {key: (now or entry["to"])[key] for key in ("source",) if key in (now or entry["to"])}
        changes.append({"layer": layer, "record": {**source, **remembered, **pins}})
    return changes


def layers_to_prove(
    profile: Mapping[str, Any], state: Mapping[str, Any], sources: Mapping[str, str], managed: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return what the check of driver and toolkit is told of them, by layer; one that is not pinned is left out.

    Args:
        profile: a profile.json or a plan, with blocks driver and toolkit that may be None.
        state: the node's journal, which knows the packages and the path where Bedplate installed the layer.
        sources: where each layer comes from; ``none`` for one that the host has of its own, of any version.
        managed: the layers that a run may change; another one is judged as the host's own.
    """
    known = {"driver": ("packages", {}), "toolkit": ("path", "")}
    found = {}
    for layer, (key, nothing) in known.items():
        if profile.get(layer):
            now = (state["layers"].get(layer) or {}).get("is") or {}
            source = sources[layer] if layer in managed else "none"
            found[layer] = {**profile[layer], "source": source, key: now.get(key, nothing)}
    return found


def baseline(verdicts: Sequence[Mapping[str, Any]], changed: Sequence[str]) -> list[dict[str, Any]]:
    """Return those verdicts from before a change that can excuse the same failure after it.

    Args:
        verdicts: of the verification before the change.
        changed: the layers that the run may change.

    Of a layer that changes only what no software can cure is kept, such as a missing GPU, and the collectives: a
    path between GPUs that was broken before is not the new stack's fault. That the old stack did not import either
    excuses nothing.
    """
    return [
        dict(verdict)
        for verdict in verdicts
        if verdict["layer"] not in changed
        or verdict["code"].startswith("collective.")
        or not CODES[verdict["code"]].rollback_helps
    ]
