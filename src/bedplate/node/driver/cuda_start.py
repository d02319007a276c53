"""Does CUDA start? NVML answers on nodes on which it does not. Reporting (``query``) is apart from judging."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..child import run_probe
from ..verdicts import Verdict
from . import cuda_child
from .modprobe_config import same_value
from .sources import LAYER

SUBJECT = "cuInit"
# Seconds. Without the persistence daemon starting eight GPUs takes about ten.
TIMEOUT_S = 90.0

HMM = ("nvidia_uvm", "uvm_disable_hmm")
NOT_INITIALIZED = 3

# What the codes of cuInit mean and ask for (cuda.h, CUresult).
_ADVICE = {
    NOT_INITIALIZED: ("not initialised", "Look at `dmesg` for nvidia-uvm."),
    100: ("no device", "CUDA sees no GPU: compare with the verdicts gpu.*, and look at /dev/nvidia* and their owners."),
    802: ("system not ready", "Start nvidia-fabricmanager, which machines with NVSwitch need."),
    803: ("driver and library do not fit", "Look at driver.library_mismatch, and remove cuda-compat packages."),
    804: ("forward compatibility is not for this GPU", "Remove the cuda-compat package from the loader's path."),
    999: ("unknown", "Run `nvidia-modprobe -u -c=0`, look at `dmesg`; when nothing is there, reboot."),
}
_OTHER = ("another error", "Look it up in cuda.h, CUresult, and look at `dmesg`.")


def query(
    *, library: str = "libcuda.so.1", timeout_s: float = TIMEOUT_S, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return how CUDA starts, judging nothing; always the same keys.

    library: name or path of the driver's library. timeout_s: seconds after which the child is killed. environment:
    extra variables for the child.

    Keys: error (None, or why nothing was answered), timed_out, code (of cuInit), version (as cuDriverGetVersion gives
    it: 13000 for 13.0), devices.
    """
    outcome = run_probe(
        cuda_child, {"library": library}, python=sys.executable, timeout_s=timeout_s, environment=environment
    )
    found: dict[str, Any] = {"error": None, "timed_out": False, "code": None, "version": None, "devices": None}
    if isinstance(outcome.result, dict):
        return {**found, **outcome.result}
    stage = outcome.stages.get("cuda", "loading libcuda")
    return {**found, "error": f"The process {outcome.ending()} in {stage}", "timed_out": outcome.timed_out}


def judge(found: Mapping[str, Any], live: Mapping[str, Mapping[str, str]]) -> list[Verdict]:
    """Return the verdict for what ``query`` returned.

    live: the parameters of the loaded modules, module -> parameter -> value.
    """
    code, evidence = found["code"], dict(found)
    if found["error"]:
        message = f"CUDA could not be started: {str(found['error']).rstrip('.')}."
        action = "Install the driver's libcuda, or look at what it says when a CUDA program starts."
        if found["timed_out"]:
            action = "Look at `dmesg` for Xids, and reset the GPUs or reboot; a call that hangs in the driver stays."
        return [Verdict("driver.cuda_init", "fail", LAYER, SUBJECT, message, evidence, action)]
    if code == 0:
        message = f"CUDA starts, and sees {found['devices']} GPUs."
        return [Verdict("driver.cuda_init", "pass", LAYER, SUBJECT, message, evidence)]
    module, parameter = HMM
    hmm = live.get(module, {}).get(parameter)
    if code == NOT_INITIALIZED and not same_value(hmm, "1"):
        message = "It fails with 3 (not initialised) while HMM is on: a known fault of the two."
        action = f'Set driver.parameters.{module}.{parameter} to "1" in the profile, apply it, and reboot.'
        return [Verdict("driver.hmm", "fail", LAYER, module, message, {**evidence, "live": hmm}, action)]
    meaning, action = _ADVICE.get(code, _OTHER)
    message = f"It fails with {code} ({meaning})."
    return [Verdict("driver.cuda_init", "fail", LAYER, SUBJECT, message, evidence, action)]
