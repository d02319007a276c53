"""Checks of the variables an operator writes into an inventory. Nothing here contacts a host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import near
from .plain import plain

PREFIX = "bedplate_"
# What plays and roles set themselves, and what playbooks read before any role: no argument spec lists these.
PLAY_VARIABLES = frozenset(
    {
        "bedplate_baseline",
        "bedplate_before",
        "bedplate_begun",
        "bedplate_ended",
        "bedplate_failure",
        "bedplate_hardware",
        "bedplate_layers_now",
        "bedplate_let_go",
        "bedplate_plan",
        "bedplate_run",
        "bedplate_serial",
        "bedplate_stays",
        "bedplate_wanted",
        "bedplate_way_back",
    }
)


def known_variables(roles: Path) -> dict[str, dict[str, Any]]:
    """Return {variable: its argument spec} of every `bedplate_` option of the roles under *roles*."""
    known: dict[str, dict[str, Any]] = {}
    for file in sorted(roles.glob("*/meta/argument_specs.yml")):
        specs = yaml.safe_load(file.read_text(encoding="utf-8"))["argument_specs"]
        for entry in specs.values():
            options = entry.get("options") or {}
            known.update((name, spec) for name, spec in options.items() if name.startswith(PREFIX))
    return known


def problems(variables: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each mistake in the `bedplate_` variables of a host.

    Checked: names nobody reads (with the near name), values outside the choices of *known* (as of
    `known_variables`), a missing `bedplate_profile`, and a `bedplate_wheels_location` that does not fit
    `bedplate_wheels_source`. Types are left to Ansible's own argument validation, profiles to
    `profiles.for_deploy`.
    """
    given = {str(key): plain(variables[key]) for key in variables if str(key).startswith(PREFIX)}
    found = []
    for name, value in sorted(given.items()):
        if name in PLAY_VARIABLES:
            continue
        if name not in known:
            found.append(f"nothing reads the variable `{name}`{near(name, known, PREFIX) or '.'}")
            continue
        choices = [str(choice) for choice in known[name].get("choices") or ()]
        for one in map(str, value if isinstance(value, list) else [value]):
            if choices and one not in choices:
                allowed = ", ".join(choice or "(empty)" for choice in choices)
                found.append(f"{name} is `{one}`{near(one, choices) or '.'} Allowed: {allowed}.")
    if not given.get("bedplate_profile"):
        found.append("bedplate_profile is not set: name a profile (`bedplate profile list` shows them).")
    source, location = given.get("bedplate_wheels_source"), str(given.get("bedplate_wheels_location") or "")
    if source == "mirror" and not location.startswith(("http://", "https://")):
        found.append(f"bedplate_wheels_source is mirror: bedplate_wheels_location must be a URL, is `{location}`.")
    if source == "directory" and not location.startswith("/"):
        found.append(
            "bedplate_wheels_source is directory: bedplate_wheels_location must be an absolute path on the "
            f"node, is `{location}`."
        )
    return found
