"""Which checks a verification runs, by layer: the logic behind the module bedplate_verify."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
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
from .verdicts import Verdict, blame, simulated, worst

Nvml = Callable[[], Mapping[str, Any]]

# What is said of a layer that is not verified: never "pass".
_NOT_MANAGED = {
    "driver": "Nothing says which driver this node must have.",
    "toolkit": "Nothing says which CUDA toolkit this node must have.",
}
_NOT_IDLE = "To run it beside that: bedplate_verify_collective=true."
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

    @cache  # asked once, when the first check needs it
    def nvml() -> dict[str, Any]:
        return gpu.query(options["tools"])

    if "driver" in layers:
        verdicts += _driver(options, checks, nvml)
    if "toolkit" in layers and "toolkit" in checks:
        verdicts += _toolkit(options)
    if "stack" in layers:
        verdicts += _stack(options, checks, nvml)
    verdicts = blame(verdicts, [Verdict.from_dict(verdict) for verdict in options["baseline"]])
    if options["simulated"]:
        verdicts = simulated(verdicts)
    return verdicts


def _has_kernel(options: Mapping[str, Any]) -> bool:
    """Tell whether the kernel here is the node's: a container shows that of the machine it runs on."""
    return not (options["simulated"] and options["sysroot"] == "/")


def _driver(options: Mapping[str, Any], checks: list[str], nvml: Nvml) -> list[Verdict]:
    """Return the verdicts of the driver, the GPUs and the host they sit in."""
    root, expect = options["sysroot"], options["expect"]
    has_kernel = _has_kernel(options)
    verdicts: list[Verdict] = []
    if "preflight" in checks and options["driver"] and has_kernel:
        verdicts += _preflight(options)
    if "idle" in checks and has_kernel:
        verdicts += driver.idle(_gpu_users(options), options["gpu_wait"])
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
            verdicts += driver.judge(report, wanted, nvml(), expected_gpus=expect.get("gpus"), cuda=cuda)
    if "gpus" in checks:
        verdicts += gpu.judge(
            nvml(),
            expected_count=expect.get("gpus"),
            expected_ids=expect.get("gpu_ids") or [],
            awaits_boot=any((v.code, v.status) == ("driver.module_not_loaded", "needs-reboot") for v in verdicts),
        )
    if "node" in checks and has_kernel:
        verdicts += host.judge(host.inspect(root), nvml(), expect)
    elif "node" in checks:
        verdicts.append(Verdict("gpu.pci_count", "skipped", "node", "GPUs on the bus", _SIMULATED_KERNEL))
    return verdicts


def _preflight(options: Mapping[str, Any]) -> list[Verdict]:
    """Return the verdicts of what stands for or against changing the driver now."""
    root = options["sysroot"]
    return driver.preflight(
        driver.inspect(root),
        options["driver"],
        gpus=host.gpus_on_bus(root),
        users=_gpu_users(options),
        waited_s=options["gpu_wait"],
        cuda=(options["toolkit"] or {}).get("version", ""),
    )


def _gpu_users(options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the processes that use the GPUs, after waiting for them to leave as long as is allowed."""
    return driver.wait_for_users(lambda: host.gpu_users(options["sysroot"]), options["gpu_wait"])


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


def _stack(options: Mapping[str, Any], checks: list[str], nvml: Nvml) -> list[Verdict]:
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
        verdicts += check_stack(
            verdicts,
            generation=str(generation),
            environment=shared["environment"],
            user=options["user"],
            arch=options["expect"].get("arch") or "",
        )
    if {"operations", "collective"} & set(checks):
        verdicts += _work(options, checks, _hindrance(options, verdicts, nvml), shared, nvml)
    return verdicts


def _work(
    options: Mapping[str, Any], checks: list[str], hindered: str, shared: Mapping[str, Any], nvml: Nvml
) -> list[Verdict]:
    """Return the verdicts of operations and collective, which put work on the GPUs, and of the GPUs after it.

    hindered: why they must not run. shared: what both checks take.
    """
    collective = options["collective"] if "collective" in checks else None
    names = options["operations"] if "operations" in checks else []
    if hindered:
        verdicts = [Verdict("operation.unavailable", "skipped", "stack", name, hindered) for name in names]
        if collective:
            subject = f"all-reduce {collective['backend']}"
            verdicts.append(Verdict("collective.unavailable", "skipped", "stack", subject, hindered))
        return verdicts
    on_gpus = collective is not None and collective["backend"] == "nccl"
    before = nvml() if names or on_gpus else None
    # The GPUs of a simulated node are there for NVML only: torch sees none, and cannot.
    gpus = None if options["simulated"] else options["expect"].get("gpus")
    verdicts = check_operations(names, timeout_s=options["operation_timeout"], gpus=gpus, **shared)
    worked = list(verdicts)
    if collective:
        verdicts += check_collective(collective, busy=lambda: busy_gpus(gpu.query(options["tools"])), **shared)
        worked = verdicts if on_gpus else worked
    if before and any(v.status != "skipped" for v in worked):
        verdicts += _after_work(options, before)
    return verdicts


def _after_work(options: Mapping[str, Any], before: Mapping[str, Any]) -> list[Verdict]:
    """Return the verdicts of counting the GPUs again after they had work; before: NVML's answers from before it."""
    after = gpu.query(options["tools"])
    verdicts = gpu.after_load(before, after, ())
    if worst(verdicts) == "needs-reboot" and _has_kernel(options):
        verdicts = gpu.after_load(before, after, host.inspect(options["sysroot"])["kernel_log"]["xids"])
    return verdicts


def _hindrance(options: Mapping[str, Any], verdicts: list[Verdict], nvml: Nvml) -> str:
    """Return why operations and collective cannot or must not run now; empty when they may."""
    if any(v.subject == "torch" and v.status == "fail" for v in verdicts):
        return "It did not run, because torch does not import."
    if options["collective_when"] == "idle":
        users = [user for user in host.gpu_users(options["sysroot"]) if not user["daemon"]]
        if users:
            first = f"{users[0]['comm']} (pid {users[0]['pid']}, {users[0]['user']})"
            more = f" and {len(users) - 1} more" if len(users) > 1 else ""
            return f"It did not run, because {first}{more} uses the GPUs. {_NOT_IDLE}"
        return _not_idle(nvml(), expected=bool(options["expect"].get("gpus")))
    return ""


def _not_idle(answer: Mapping[str, Any], *, expected: bool) -> str:
    """Return why the GPUs of ``gpu.query`` cannot be called idle; empty when nobody uses them.

    expected: there must be GPUs, so that NVML's own error, be it that the driver hangs, says nothing of their use.

    NVML knows processes that are not seen from here, such as those outside of this container. A GPU that does not
    tell of its processes counts as used.
    """
    if answer["error"] and expected:
        return f"It did not run, because NVML does not answer: {answer['error']['text'].rstrip('.')}. {_NOT_IDLE}"
    for found in answer["gpus"]:
        if "error" in found:
            continue
        if found["processes"] is None:
            return f"It did not run, because GPU {found['index']} does not tell whether a process uses it. {_NOT_IDLE}"
        if found["processes"]:
            first = found["processes"][0]
            return f"It did not run, because a process (pid {first}) uses GPU {found['index']}. {_NOT_IDLE}"
    return ""


def _not_managed(layer: str, reason: str) -> Verdict:
    """Return the verdict of a layer that is not verified here."""
    return Verdict(f"{layer}.not_managed", "skipped", layer, layer, reason)


def summary(verdicts: list[Verdict]) -> str:
    """Return the number of verdicts by status, such as "7 checks: 5 pass, 2 skipped"."""
    statuses = [verdict.status for verdict in verdicts]
    parts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    return f"{len(statuses)} check{'' if len(statuses) == 1 else 's'}: {', '.join(parts) or 'none'}"
