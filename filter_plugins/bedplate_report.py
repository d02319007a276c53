"""Filters for the end of a run: why it failed, where the node is now, what was found, which generation was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from bedplate.controller.errors import BedplateError
from bedplate.controller.nodes import baseline, generation_named, layers_to_go_back, layers_to_prove
from bedplate.controller.plain import plain
from bedplate.controller.report import age_s, ended, failure, record, report, same_hardware
from bedplate.controller.report_drift import drift


def bedplate_failure(result: Any, task: str = "", action: str = "") -> dict[str, Any]:
    """Return the task, the reason and the verdicts of a failed task's result."""
    return failure(plain(result), str(plain(task)), str(plain(action)))


def bedplate_same_hardware(failed: Any, live: Any) -> bool:
    """Tell whether a change failed for nothing but hardware that what is live misses as well."""
    return same_hardware(plain(failed), plain(live))


def bedplate_ended(failed: Any, outcome: Any, wanted: str) -> dict[str, str]:
    """Return how a change that failed has ended: outcome and reason for the record, and the text for the person."""
    return ended(plain(failed), plain(outcome), str(plain(wanted)))


def bedplate_report(verdicts: Any) -> str:
    """Return what fails, with what to do, and the table of all verdicts, as one text."""
    return report(plain(verdicts))


def bedplate_record(verdicts: Any, **about: Any) -> dict[str, Any]:
    """Return what reports/<run>/<host>/verdicts.json holds, without secrets."""
    try:
        return record(plain(verdicts), **plain(about))
    except (KeyError, ValueError) as error:
        raise AnsibleFilterError(f"bedplate_record: {error}") from error


def bedplate_drift(before: Any, layers: Any, plan: Any = None, simulated: bool = False) -> list[dict[str, Any]]:
    """Return verdicts about what is installed, against the profile, the lock and the record of the build."""
    found = drift(plain(before), plain(layers), plain(plan) or None, bool(simulated))
    return [verdict.to_dict() for verdict in found]


def bedplate_run_age(holder: Any) -> float:
    """Return for how many seconds the run of a holder has been going on."""
    return age_s(plain(holder))


def bedplate_generation(state: Any, wanted: str) -> str:
    """Return the id of the generation that a profile name or an id means on this node; empty stays empty."""
    try:
        return generation_named(plain(state), str(plain(wanted)))
    except BedplateError as error:
        raise AnsibleFilterError(str(error)) from error


def bedplate_layers_of(state: Any, profile: Any) -> list[dict[str, Any]]:
    """Return the layers below the stack that a node must change to be on the profile of a generation again."""
    return layers_to_go_back(plain(state), plain(profile))


def bedplate_layers_to_prove(profile: Any, state: Any, sources: Any, managed: Any) -> dict[str, dict[str, Any]]:
    """Return what the check of driver and toolkit is told of them, by layer."""
    return layers_to_prove(plain(profile), plain(state), plain(sources), plain(managed))


def bedplate_excuses(verdicts: Any, changed: Any) -> list[dict[str, Any]]:
    """Return those verdicts from before a change that can excuse the same failure after it."""
    return baseline(plain(verdicts), plain(changed))


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "bedplate_failure": bedplate_failure,
            "bedplate_ended": bedplate_ended,
            "bedplate_same_hardware": bedplate_same_hardware,
            "bedplate_report": bedplate_report,
            "bedplate_record": bedplate_record,
            "bedplate_drift": bedplate_drift,
            "bedplate_run_age": bedplate_run_age,
            "bedplate_generation": bedplate_generation,
            "bedplate_excuses": bedplate_excuses,
            "bedplate_layers_of": bedplate_layers_of,
            "bedplate_layers_to_prove": bedplate_layers_to_prove,
        }
