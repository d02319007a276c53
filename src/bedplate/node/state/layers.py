"""The journal's part about driver and toolkit: what each is, what it was before the run, what it is on the way to.

A stack is a generation, kept whole beside the others, so that going back is one rename. Driver and toolkit are not:
there is one driver on a node. Their way back is written down before the way forward begins, and ``is`` changes only
after the layer has been verified. In state.json::

    "layers": {"driver": {"is": RECORD|null, "was": RECORD|null, "to": RECORD|null, "run_id": "..."}, ...}

RECORD is a dict with ``version`` and what the layer's role needs to install it again: of the driver ``packages``
(exact version by name), ``source``, ``flavour``, ``parameters``; of the toolkit ``path``, ``source``, ``default``,
``components``. ``to`` is null unless a change is under way or was interrupted.

A generation that goes live keeps the records of that moment, as ``layers`` of its own entry, so that going back to it
finds them however many changes ago that was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..verdicts import Verdict

__all__ = ["LAYERS", "begin", "done", "drift_verdict", "known", "problem", "problems", "records", "to_undo"]

Json = dict[str, Any]

# Bottom up; going back takes them the other way round.
LAYERS = ("driver", "toolkit")


def begin(state: Json, layer: str, record: Json, found: Json, run_id: str) -> None:
    """Write down that a run changes a layer to ``record``.

    ``found`` is what the node had before, for a layer that no run of Bedplate has changed yet; it may be empty. When
    the same run calls again, to go back for instance, what the layer was before that run stays. When a run before did
    not conclude the first change of a layer, what that one found stays: by now the node may have what it wanted.
    """
    entry = state["layers"].setdefault(layer, {"is": None, "was": None, "to": None, "run_id": ""})
    if entry["run_id"] != run_id:
        first_is_open = entry["is"] is None and entry["to"] is not None
        entry.update(was=entry["was"] if first_is_open else entry["is"] or found or None, run_id=run_id)
    entry["to"] = record


def done(state: Json, layer: str) -> None:
    """Write down that the layer is, and was verified to be, what it was on the way to."""
    entry = state["layers"][layer]
    entry.update({"is": entry["to"], "to": None})


def records(state: Json) -> Json:
    """Return the record of each layer as it is: what a generation that goes live now was verified on."""
    return {layer: entry["is"] for layer, entry in state["layers"].items() if entry["is"] is not None}


def differ(state: Json, generation: str) -> list[str]:
    """Return the layers that are not what a generation was verified on, or whose change was not concluded."""
    verified_on = state["generations"][generation].get("layers") or {}
    return [
        layer
        for layer in LAYERS
        if (entry := state["layers"].get(layer))
        and (entry["to"] is not None or (layer in verified_on and entry["is"] != verified_on[layer]))
    ]


def to_undo(state: Json, run_id: str) -> list[Json]:
    """Return the layers that a run changed and how they were, the newest first: ``layer``, ``record`` (or None)."""
    changed = []
    for layer in reversed(LAYERS):
        entry = state["layers"].get(layer)
        if entry and entry["run_id"] == run_id and (entry["to"] is not None or entry["is"] != entry["was"]):
            changed.append({"layer": layer, "record": entry["was"]})
    return changed


def problems(
    state: Json, wanted: Mapping[str, Mapping[str, Any]], installed: Callable[[list[str]], Mapping[str, str]]
) -> list[str]:
    """Return a sentence for each difference between layers as they are and as they are wanted.

    wanted: record by layer, with the keys that matter only. installed: returns the versions of installed packages by
    name, leaving out those that are not; it is asked for the packages of records only.
    """
    found = []
    for layer, record in wanted.items():
        entry = state["layers"].get(layer) or {"is": None, "to": None}
        now = entry["is"]
        if entry["to"] is not None:
            found.append(f"a change of the {layer} to {entry['to'].get('version')} was not finished")
        elif now is None:
            found.append(f"the {layer} was not installed by Bedplate; {record.get('version')} is wanted")
        else:
            found += [
                f"{key} of the {layer} is {now.get(key)}, and {value} is wanted"
                for key, value in record.items()
                if now.get(key) != value and (now.get(key) or value)
            ]
            found += _drift(layer, now, installed)
    return found


def _drift(layer: str, record: Json, installed: Callable[[list[str]], Mapping[str, str]]) -> list[str]:
    """Return a sentence for each difference between a record and what is on the node."""
    packages = record.get("packages") or {}
    versions = installed(sorted(packages)) if packages else {}
    found = [
        f"package {name} of the {layer} is {versions.get(name, 'not installed')}, was {version}"
        for name, version in sorted(packages.items())
        if versions.get(name) != version
    ]
    path = record.get("path")
    if path and not os.path.isdir(path):
        found.append(f"{path} of the {layer} is gone")
    return found


def drift_verdict(layer: str, items: Sequence[str], sound: str) -> Verdict:
    """Return the verdict about the drift of the driver or the toolkit.

    items: of ``problems``, of this layer. sound: what is said when there is none.
    """
    code = f"{layer}.drift"
    if not items:
        return Verdict(code, "pass", layer, layer, sound)
    more = f" ({len(items)} differences.)" if len(items) > 1 else ""
    message = f"{items[0][0].upper()}{items[0][1:]}.{more}"
    action = f"Install it again: playbooks/site.yml --tags {layer}"
    return Verdict(code, "fail", layer, layer, message, {"drift": list(items)}, action)


def problem(layers: object) -> str | None:
    """Say what is wrong with the part ``layers`` of a parsed state.json, or None."""
    if not isinstance(layers, dict) or not set(layers) <= set(LAYERS):
        return "layers is not about the driver and the toolkit"
    for layer, entry in layers.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("run_id"), str):
            return f"the entry of the {layer} is incomplete"
        for key in ("is", "was", "to"):
            record = entry.get(key, "")
            if record is not None and not _is_record(record):
                return f"{key} of the {layer} is no record"
    return None


def known(records: object) -> bool:
    """Tell whether this is what ``records`` returns; hostile input must not get past here."""
    return isinstance(records, dict) and set(records) <= set(LAYERS) and all(map(_is_record, records.values()))


def _is_record(record: object) -> bool:
    """Tell whether this is a record: a version, and packages that are names and versions."""
    if not isinstance(record, dict) or not isinstance(record.get("version"), str):
        return False
    packages = record.get("packages", {})
    return isinstance(packages, dict) and all(isinstance(value, str) for value in packages.values())
