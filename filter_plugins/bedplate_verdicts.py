"""Filter that puts verdicts into words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from bedplate.controller.plain import plain
from bedplate.node.verdicts import Verdict, failing, sentence


def _read(verdicts: Any) -> list[Verdict]:
    try:
        return [Verdict.from_dict(verdict) for verdict in plain(verdicts)]
    except (KeyError, TypeError, ValueError) as error:
        raise AnsibleFilterError(f"not a list of verdicts: {error!r}") from error


def bedplate_sentences(verdicts: Any) -> list[str]:
    """Return one line for each verdict that stands in the way of going live."""
    return [sentence(verdict) for verdict in failing(_read(verdicts))]


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by name."""
        return {"bedplate_sentences": bedplate_sentences}
