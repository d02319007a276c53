#!/usr/bin/env python3
"""Print docs/variables.md from the argument specs of the roles, the one place where variables are explained."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROLES = Path(__file__).resolve().parent.parent / "roles"
# The fleet's variables first, then the roles in the order they run.
ORDER = ("bedplate", "node_tools", "nvidia_driver", "cuda_toolkit", "python_stack", "rollback", "node_monitor")

HEAD = """<!-- Written by `make docs` from roles/*/meta/argument_specs.yml; do not edit. -->
# Variables

Set the `bedplate_*` variables in the inventory; the roles take theirs from them. Of a role's own variables set those
that concern it alone, such as `nvidia_driver_reboot`.
"""


def markup(text: str | list[str]) -> str:
    """Return Ansible's documentation markup as Markdown, on one line."""
    joined = " ".join(text) if isinstance(text, list) else text
    return re.sub(r"[CVO]\((.*?)\)", r"`\1`", " ".join(joined.split()))


def default(option: dict[str, Any]) -> str:
    """Return the default as a person would write it in YAML."""
    if option.get("required"):
        return "**required**"
    value = option.get("default")
    return f"`{yaml.safe_dump(value, default_flow_style=True).removesuffix('...' + chr(10)).strip()}`"


def role_section(role: str) -> str:
    """Return the section of one role: its purpose and a table per entry point."""
    specs = yaml.safe_load((ROLES / role / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    lines = [f"## {role}", ""]
    told: set[str] = set()
    for entry, spec in specs.items():
        options = {name: option for name, option in spec.get("options", {}).items() if name not in told}
        told |= options.keys()
        lines += [f"{'' if entry == 'main' else f'`{entry}`: '}{markup(spec['short_description'])}.", ""]
        if options:
            lines += ["| variable | type | default | meaning |", "| --- | --- | --- | --- |"]
        for name, option in options.items():
            choices = option.get("choices")
            kind = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
            allowed = f" One of {', '.join(f'`{choice or chr(34) * 2}`' for choice in choices)}." if choices else ""
            lines.append(f"| `{name}` | {kind} | {default(option)} | {markup(option['description'])}{allowed} |")
        if options:
            lines.append("")
    return "\n".join(lines)


def document() -> str:
    """Return the whole document."""
    return "\n".join([HEAD, *(role_section(role) for role in ORDER)])


if __name__ == "__main__":
    sys.stdout.write(document())
