"""A filter about parameters of kernel modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bedplate.node.driver.modprobe_config import canonical, options


def bedplate_dropped_parameters(text: str, parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the text of a file for modprobe sets and ``parameters`` no longer has.

    Keys: parameters (module -> parameter -> value) and subjects (MODULE.PARAMETER, as verdicts name them).
    """
    kept = {(canonical(module), name) for module, values in parameters.items() for name in values}
    dropped: dict[str, dict[str, str]] = {}
    for module, values in options(text).items():
        for name, value in values.items():
            if (module, name) not in kept:
                dropped.setdefault(module, {})[name] = value
    subjects = [f"{module}.{name}" for module, values in dropped.items() for name in values]
    return {"parameters": dropped, "subjects": subjects}


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"bedplate_dropped_parameters": bedplate_dropped_parameters}
