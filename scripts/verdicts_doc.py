#!/usr/bin/env python3
"""Print docs/verdicts.md from the table of codes, the one place where verdicts are explained."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from bedplate.node.verdicts import CODES, STATUSES, CodeInfo, layers_of

# What a reader needs to know about each status and severity; the tests keep the keys equal to the code's.
STATUS_MEANING = {
    "pass": "The check ran, and all is well.",
    "warn": "Something is worse than it should be; it does not stand in the way.",
    "skipped": "The check did not run; the message says why. It says nothing about the node.",
    "inconclusive": "The check ran and proved nothing. It counts as a failure: nothing goes live unverified.",
    "needs-reboot": "The node is not as it should be, and a reboot is what helps.",
    "needs-reset": "A GPU is stuck: reset it, or reboot. Do not run the check again blindly.",
    "fail": "The check ran, and something is wrong.",
}
SEVERITY_MEANING = {
    "info": "The code never says that something is wrong.",
    "warning": "The node works, but worse than it should, or the proof is missing.",
    "critical": "The node must not do work.",
}
GROUPS = {
    "abi": "Read from the bytes of the files; nothing is run",
    "collective": "An all-reduce over several processes",
    "driver": "The NVIDIA driver: packages, kernel modules, parameters",
    "gpu": "The GPUs, as NVML and the PCI bus show them",
    "import": "One Python import in a process of its own",
    "node": "The machine around the GPUs: kernel, PCI bridges, shared memory",
    "operation": "One small real call of a library on a GPU, with a checked value",
    "packages": "A transaction of the package manager, judged before it happens, and what is installed",
    "run": "A task of the playbook that failed; the subject is its name",
    "stack": "The generation of the Python stack",
    "toolkit": "The CUDA toolkit",
}

HEAD = """<!-- Written by `make docs` from src/bedplate/node/verdicts.py; do not edit. -->
# Verdicts

Every check of Bedplate answers with a verdict: `code`, `status`, `layer`, `subject`, `message`, `evidence`, `action`.
It carries `simulated: true` when the node simulates its GPUs, and `preexisting: true` when the same check failed before
the change: that is reported, and causes no rollback.

Codes are an API. One is never given another meaning and never renamed, so scripts may depend on them. A code whose name
is neutral, such as `gpu.count`, passes or fails by its status; a code that names a fault exists for that fault only.
"""


def meanings(title: str, table: dict[str, str]) -> str:
    """Return a table of words and what they mean."""
    lines = [f"## {title}", "", f"| {title.lower()} | meaning |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {text} |" for name, text in table.items()), ""])


def row(code: str, info: CodeInfo) -> str:
    """Return the line of one code."""
    statuses = ", ".join(sorted(info.statuses, key=STATUSES.index))
    helps = "-" if info.severity == "info" else "yes" if info.rollback_helps else "no"
    layers = ", ".join(layers_of(code))
    return f"| `{code}` | {layers} | {statuses} | {info.severity} | {helps} | {info.description} |"


def group(prefix: str) -> str:
    """Return the section of the codes with one prefix."""
    lines = [f"### {prefix}", "", f"{GROUPS[prefix]}.", ""]
    lines += ["| code | layer | statuses | severity | rollback can help | meaning |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    lines += [row(code, info) for code, info in sorted(CODES.items()) if code.startswith(f"{prefix}.")]
    return "\n".join([*lines, ""])


def document() -> str:
    """Return the whole document."""
    prefixes = sorted({code.partition(".")[0] for code in CODES})
    codes = "## Codes\n\nThe severity is that of a verdict which does not pass.\n"
    parts = [HEAD, meanings("Status", STATUS_MEANING), meanings("Severity", SEVERITY_MEANING), codes]
    return "\n".join([*parts, *map(group, prefixes)]).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
