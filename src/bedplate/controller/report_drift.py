"""Is a node what the inventory asks for, and still what was built? The answers as verdicts, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bedplate.node.state.drift import ACTION
from bedplate.node.state.layers import drift_verdict
from bedplate.node.verdicts import Verdict, simulated

JsonDict = Mapping[str, Any]


def drift(
    before: JsonDict, layers: Sequence[JsonDict], plan: JsonDict | None, simulated_node: bool = False
) -> list[Verdict]:
    """Return the verdicts about what is installed, against the profile, the lock and the record of the build.

    before: what bedplate_state read, without layers: ``current``, ``drift``, ``drift_counts``, ``state``.
    layers: for each of driver and toolkit that the inventory asks for, what bedplate_state read with the wanted
        record of that one, as a loop over {key, value} registers it: ``item.key``, ``drift``, ``drift_counts``; or
        ``verdicts`` instead, where the package manager could not be asked.
    plan: the plan of the profile that the inventory names, or None when it cannot be read here.
    """
    verdicts = [verdict for read in layers for verdict in _layer(read, before)]
    verdicts.append(_generation(before))
    if before["current"]:
        verdicts.append(_profile(before["current"], plan))
    return simulated(verdicts) if simulated_node else verdicts


def _layer(read: JsonDict, before: JsonDict) -> list[Verdict]:
    """Return the verdict about a layer, or why there is none."""
    if "verdicts" in read:
        return [Verdict.from_dict(verdict) for verdict in read["verdicts"]]
    name = read["item"]["key"]
    sound = f"The {name} is what the profile pins and what was installed."
    return [drift_verdict(name, _of_layer(read, before), sound)]


def _of_layer(read: JsonDict, before: JsonDict) -> list[str]:
    """Return what of a reading is about the layer: the generation's own drift is in it as well, and comes first.

    A reading shows 20 items, so the layer's may be cut off; their number is always there.
    """
    items = [item for item in read["drift"] if item not in before["drift"]]
    count = (read.get("drift_counts") or {}).get("layers", 0)
    return items or ([f"{count} things are not as recorded"] if count else [])


def _generation(before: JsonDict) -> Verdict:
    """Return the verdict about the live generation's files."""
    current, items = before["current"], list(before["drift"])
    if not current:
        if not items:
            action = "Provision it: playbooks/site.yml"
            return Verdict(
                "stack.absent", "fail", "stack", "Python stack", "The node has no live generation.", {}, action
            )
        message = f"The node has no live generation: {items[0]}."
        return Verdict("stack.drift", "fail", "stack", "Python stack", message, {"drift": items}, ACTION)
    if not items:
        message = "Its files are those that were built and verified."
        return Verdict("stack.drift", "pass", "stack", current, message)
    more = f" (and {len(items) - 1} more)" if len(items) > 1 else ""
    message = f"It was changed after it was verified: {items[0]}{more}."
    evidence = {"drift": items, "counts": dict(before.get("drift_counts") or {})}
    return Verdict("stack.drift", "fail", "stack", current, message, evidence, ACTION)


def _profile(current: str, plan: JsonDict | None) -> Verdict:
    """Return the verdict about which profile is live."""
    code = "stack.profile"
    if plan is None:
        message = "The profile that the inventory names cannot be read here, so the live one was not compared with it."
        return Verdict(code, "skipped", "stack", current, message)
    wanted = plan["id"]
    if wanted == current:
        return Verdict(code, "pass", "stack", current, "It is what the inventory asks for.", {"seen": current})
    what = "another lock of the same profile" if wanted.rpartition("-")[0] == current.rpartition("-")[0] else wanted
    message = f"The inventory asks for {what}."
    action = "Bring the node there with playbooks/site.yml, or name the live profile in the inventory."
    return Verdict(code, "warn", "stack", current, message, {"live": current, "wanted": wanted}, action)
