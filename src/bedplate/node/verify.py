"""Which checks a verification runs, by layer: the logic behind the module bedplate_verify."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .child import read_environment
from .driver import check as driver
from .driver import cuda_start
from .hardware import gpu, host
from .stack.check import check_stack
from .stack.collective import busy_gpus, check_collective
from .stack.imports import check_imports
from .stack.operations import check_operations
from .toolkit import check as toolkit
from .verdicts import Verdict, blame, simulated

# What is said of a layer that is not verified: never "pass".
_NOT_MANAGED = {
    "driver": "Nothing says which driver this node must have.",
    "toolkit": "Nothing says which CUDA toolkit this node must have.",
}
_SIMULATED_KERNEL = "This node simulates its GPUs, and its kernel is not that of a GPU node."


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
    if "toolkit" in layers and "toolkit" in checks:
        verdicts += _toolkit(options)
    if "stack" in layers:
        verdicts += _stack(options, checks)
    verdicts = blame(verdicts, [Verdict.from_dict(verdict) for verdict in options["baseline"]])
    if options["simulated"]:
        verdicts = simulated(verdicts)
    return verdicts


def _driver(options: Mapping[str, Any], checks: list[str]) -> list[Verdict]:
    """Return the verdicts of the driver, the GPUs and the host they sit in."""
    root, expect = options["sysroot"], options["expect"]
    # A container shows the kernel of the machine it runs on: judging that would be about another machine.
    has_kernel = not (options["simulated"] and root == "/")
    nvml = gpu.query(options["tools"]) if {"driver", "gpus", "node"} & set(checks) else {}
    verdicts: list[Verdict] = []
    if "preflight" in checks and options["driver"] and has_kernel:
        verdicts += _preflight(options)
    if "driver" in checks:
        if not options["driver"]:
            verdicts.append(_not_managed("driver", _NOT_MANAGED["driver"]))
        elif not has_kernel:
            verdicts.append(_not_managed("driver", _SIMULATED_KERNEL))
        else:
            wanted = dict(options["driver"])
            if wanted["source"] == "none":
                wanted["version"] = ""  # the host's own matter; its parts must still agree with each other
            report = driver.inspect(root)
            # Asking CUDA wakes up every GPU, and says nothing where no module is loaded or the GPUs are simulated.
            asks = report["loaded"]["module"] and expect.get("gpus") and not options["simulated"]
            cuda = cuda_start.query() if asks else None
            verdicts += driver.judge(report, wanted, nvml, expected_gpus=expect.get("gpus"), cuda=cuda)
    if "gpus" in checks:
        verdicts += gpu.judge(
            nvml,
            expected_count=expect.get("gpus"),
            expected_ids=expect.get("gpu_ids") or [],
            awaits_boot=any((v.code, v.status) == ("driver.module_not_loaded", "needs-reboot") for v in verdicts),
        )
    if "node" in checks and has_kernel:
        verdicts += host.judge(host.inspect(root), nvml, expect)
    elif "node" in checks:
        verdicts.append(Verdict("gpu.pci_count", "skipped", "node", "GPUs on the bus", _SIMULATED_KERNEL))
    return verdicts


def _preflight(options: Mapping[str, Any]) -> list[Verdict]:
    """Return the verdicts of what stands for or against changing the driver now."""
    root, waits = options["sysroot"], options["gpu_wait"]
    return driver.preflight(
        driver.inspect(root),
        options["driver"],
        gpus=host.gpus_on_bus(root),
        users=driver.wait_for_users(lambda: host.gpu_users(root), waits),
        waited_s=waits,
        cuda=(options["toolkit"] or {}).get("version", ""),
    )


def _toolkit(options: Mapping[str, Any]) -> list[Verdict]:
    """Return the verdicts of the CUDA toolkit; a torch extension is built where that is asked for."""
    if not options["toolkit"]:
        return [_not_managed("toolkit", _NOT_MANAGED["toolkit"])]
    generation = options["generation"] if "extension" in options["checks"] else None
    python = str(Path(generation) / "venv" / "bin" / "python") if generation else ""
    arch = options["expect"].get("arch")
    return toolkit.judge(
        {**options["toolkit"], "arch": [arch] if arch else []},
        stack_python=python if python and Path(python).exists() else None,
        stack_environment=read_environment(Path(generation) / "environment") if generation else None,
        user=options["user"],
    )


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
        verdicts += check_stack(
            verdicts,
            generation=str(generation),
            environment=shared["environment"],
            user=options["user"],
            arch=options["expect"].get("arch") or "",
        )
    hindered = _hindrance(options, verdicts) if {"operations", "collective"} & set(checks) else ""
    if "operations" in checks and hindered:
        for name in options["operations"]:
            verdicts.append(Verdict("operation.unavailable", "skipped", "stack", name, hindered))
    elif "operations" in checks:
        # The GPUs of a simulated node are there for NVML only: torch sees none, and cannot.
        gpus = None if options["simulated"] else options["expect"].get("gpus")
        timeout = options["operation_timeout"]
        verdicts += check_operations(options["operations"], timeout_s=timeout, gpus=gpus, **shared)
    if "collective" in checks:
        if hindered:
            subject = f"all-reduce {collective['backend']}"
            verdicts.append(Verdict("collective.unavailable", "skipped", "stack", subject, hindered))
        else:
            verdicts += check_collective(collective, busy=lambda: busy_gpus(gpu.query(options["tools"])), **shared)
    return verdicts


def _hindrance(options: Mapping[str, Any], verdicts: list[Verdict]) -> str:
    """Return why operations and collective cannot or must not run now; empty when they may."""
    if any(v.subject == "torch" and v.status == "fail" for v in verdicts):
        return "It did not run, because torch does not import."
    if options["collective_when"] == "idle":
        users = [user for user in host.gpu_users(options["sysroot"]) if not user["daemon"]]
        if users:
            first = f"{users[0]['comm']} (pid {users[0]['pid']}, {users[0]['user']})"
            more = f" and {len(users) - 1} more" if len(users) > 1 else ""
            return (
                f"It did not run, because {first}{more} uses the GPUs. To run it beside that: "
                "bedplate_verify_collective=true."
            )
    return ""


def _not_managed(layer: str, reason: str) -> Verdict:
    """Return the verdict of a layer that is not verified here."""
    return Verdict(f"{layer}.not_managed", "skipped", layer, layer, reason)


def summary(verdicts: list[Verdict]) -> str:
    """Return the number of verdicts by status, such as "7 checks: 5 pass, 2 skipped"."""
    statuses = [verdict.status for verdict in verdicts]
    parts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    return f"{len(statuses)} check{'' if len(statuses) == 1 else 's'}: {', '.join(parts) or 'none'}"
