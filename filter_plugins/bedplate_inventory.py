"""Filters that check what an operator wrote into the inventory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bedplate.controller.inventory import known_variables, problems

ROLES = Path(__file__).resolve().parents[1] / "roles"


def bedplate_problems(variables: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each mistake in the `bedplate_` variables of a host."""
    return problems(variables, known_variables(ROLES))


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"bedplate_problems": bedplate_problems}
