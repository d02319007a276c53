"""Which checks a verification runs, by layer: the logic behind the module bedplate_verify."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .child import read_environment
from .collective import check_collective
from .gpu import judge, query
from .imports import check_imports
from .verdicts import Verdict, simulated

# What is said of a layer that nobody asked to verify: never "pass".
_NOT_MANAGED = {
    "driver": "Nothing says which driver this node must have; NVML is asked for the GPUs only.",
    "toolkit": "Nothing says which CUDA toolkit this node must have.",
}


def verify(options: Mapping[str, Any]) -> list[Verdict]:
    """Run the checks of the given layers and return their verdicts, in the order driver, toolkit, stack.

    options: those of the module bedplate_verify (its DOCUMENTATION describes them). A check whose layer is not
    asked for does not run. Imports that fail do not keep the collective from running unless it is torch itself
    that does not import.

    Raises child.ChildError when a child cannot be started at all.
    """
    layers, checks = options["layers"], options["checks"]
    verdicts: list[Verdict] = []
    if "driver" in layers:
        verdicts += _driver(options, checks)
    if "toolkit" in layers:
        verdicts.append(_not_managed("toolkit"))
    if "stack" in layers:
        verdicts += _stack(options, checks)
    if options["simulated"]:
        verdicts = simulated(verdicts)
    return verdicts


def _driver(options: Mapping[str, Any], checks: list[str]) -> list[Verdict]:
    """Return the verdicts of the driver and of the GPUs."""
    verdicts = [_not_managed("driver")] if "driver" in checks else []
    if "gpus" in checks:
        wanted, expect = options["driver"] or {}, options["expect"]
        verdicts += judge(
            query(options["tools"]),
            expected_count=expect.get("gpus"),
            expected_ids=expect.get("gpu_ids") or [],
            expected_driver_version=wanted.get("version", ""),
        )
    return verdicts


def _stack(options: Mapping[str, Any], checks: list[str]) -> list[Verdict]:
    """Return the verdicts of the Python stack: absent, broken, or those of its checks."""
    if not options["generation"] or not Path(options["generation"]).is_dir():
        where = (
            f"There is no generation at {options['generation']}." if options["generation"] else "No generation is live."
        )
        return [Verdict("stack.absent", "skipped", "stack", "Python stack", where)]
    generation = Path(options["generation"])
    python = generation / "venv" / "bin" / "python"
    if not python.exists():
        message = f"{python} is missing."
        action = "Build the generation again: run the playbook provision.yml."
        return [Verdict("stack.drift", "fail", "stack", str(generation), message, {"missing": str(python)}, action)]
    shared: dict[str, Any] = {
        "python": str(python),
        "environment": read_environment(generation / "environment"),
        "user": options["user"],
    }
    collective = options["collective"]
    verdicts: list[Verdict] = []
    if "imports" in checks:
        verdicts += check_imports(options["imports"], timeout_s=options["import_timeout"], **shared)
    if "collective" in checks:
        torch = next((v for v in verdicts if v.subject == "torch" and v.status == "fail"), None)
        if torch:
            subject = f"all-reduce {collective['backend']}"
            message = "It did not run, because torch does not import."
            verdicts.append(Verdict("collective.unavailable", "skipped", "stack", subject, message))
        else:
            verdicts += check_collective(
                backend=collective["backend"],
                ranks=collective["ranks"],
                max_bytes=collective["max_bytes"],
                timeout_s=collective["timeout_s"],
                min_busbw_gbps=collective["min_busbw_gbps"],
                **shared,
            )
    return verdicts


def _not_managed(layer: str) -> Verdict:
    """Return the verdict of a layer that nothing here manages."""
    return Verdict(f"{layer}.not_managed", "skipped", layer, layer, _NOT_MANAGED[layer])


def summary(verdicts: list[Verdict]) -> str:
    """Return the number of verdicts by status, such as "7 checks: 5 pass, 2 skipped"."""
    statuses = [verdict.status for verdict in verdicts]
    parts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    return f"{len(statuses)} check{'' if len(statuses) == 1 else 's'}: {', '.join(parts) or 'none'}"
