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

# What this version says of layers that it does not manage yet: never "pass".
_NOT_MANAGED = {
    "driver": "This version of Bedplate does not manage the driver; it only asks NVML for the GPUs.",
    "toolkit": "This version of Bedplate does not manage the CUDA toolkit.",
}


def verify(options: Mapping[str, Any]) -> list[Verdict]:
    """Run the checks of the given layers and return their verdicts, in the order driver, toolkit, stack.

    options: those of the module bedplate_verify (its DOCUMENTATION describes them). Checks belong to
    layers: gpus to driver, imports and collective to stack; a check whose layer is not asked for does not
    run. Imports that fail do not keep the collective from running unless it is torch itself that does not
    import.

    Raises child.ChildError when a child cannot be started at all.
    """
    layers, checks = options["layers"], options["checks"]
    verdicts: list[Verdict] = []
    if "driver" in layers:
        verdicts.append(_not_managed("driver"))
        if "gpus" in checks:
            verdicts += judge(
                query(options["tools"]),
                expected_count=options["expected_gpus"],
                expected_ids=options["expected_gpu_ids"],
                expected_driver_version=options["expected_driver_version"],
            )
    if "toolkit" in layers:
        verdicts.append(_not_managed("toolkit"))
    if "stack" in layers:
        verdicts += _stack(options, checks)
    if options["simulated"]:
        verdicts = simulated(verdicts)
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
    verdicts: list[Verdict] = []
    if "imports" in checks:
        verdicts += check_imports(options["imports"], timeout_s=options["import_timeout"], **shared)
    if "collective" in checks:
        torch = next((v for v in verdicts if v.subject == "torch" and v.status == "fail"), None)
        if torch:
            subject = f"all-reduce {options['backend']}"
            message = "It did not run, because torch does not import."
            verdicts.append(Verdict("collective.unavailable", "skipped", "stack", subject, message))
        else:
            verdicts += check_collective(
                backend=options["backend"],
                ranks=options["ranks"],
                max_bytes=options["max_bytes"],
                timeout_s=options["collective_timeout"],
                min_busbw_gbps=options["min_busbw_gbps"],
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
