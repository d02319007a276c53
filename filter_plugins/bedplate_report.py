"""Filters for the end of a run: why it failed, where the node is now, which generation was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from bedplate.controller.errors import BedplateError
from bedplate.controller.nodes import generation_named
from bedplate.controller.plain import plain
from bedplate.controller.report import failure, failure_report, report


def bedplate_failure(result: Any, task: str = "") -> dict[str, Any]:
    """Return the task, the reason and the verdicts of a failed task's result."""
    return failure(plain(result), str(plain(task)))


def bedplate_failure_report(failed: Any, outcome: Any, wanted: str) -> str:
    """Return the text that ends a failed host."""
    return failure_report(plain(failed), plain(outcome), str(plain(wanted)))


def bedplate_report(verdicts: Any) -> list[str]:
    """Return one line per verdict, the failing ones first."""
    return report(plain(verdicts))


def bedplate_generation(state: Any, wanted: str) -> str:
    """Return the id of the generation that a profile name or an id means on this node; empty stays empty."""
    try:
        return generation_named(plain(state), str(plain(wanted)))
    except BedplateError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "bedplate_failure": bedplate_failure,
            "bedplate_failure_report": bedplate_failure_report,
            "bedplate_report": bedplate_report,
            "bedplate_generation": bedplate_generation,
        }
