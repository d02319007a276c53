"""Filters about the process that changes a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bedplate.controller.holder import is_alive
from bedplate.controller.plain import plain


def bedplate_holder_alive(holder: Any) -> bool | None:
    """Return whether the run of a holder lives: true, false, or none when it cannot be known here."""
    return is_alive(plain(holder)) if isinstance(holder, dict) else None


def bedplate_intent_is_dead(intent: Any) -> bool:
    """Return true only when there is an intent and the run that wrote it has surely ended."""
    return isinstance(intent, dict) and bedplate_holder_alive(intent.get("holder")) is False


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "bedplate_holder_alive": bedplate_holder_alive,
            "bedplate_intent_is_dead": bedplate_intent_is_dead,
        }
