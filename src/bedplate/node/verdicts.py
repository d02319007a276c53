"""Verdicts: the one shape in which every check of Bedplate reports, and the table of codes that it may use.

A verdict says what was checked (``subject``), how it ended (``status``), which layer answers for it
(``layer``), what was seen (``evidence``) and what to do next (``action``). Codes are an API: operators script
on them, so a code is never reused for another meaning and never renamed. A code whose name ends in a neutral
word, such as ``gpu.count``, passes or fails by its status; a code that names a fault, such as
``import.undefined_symbol``, exists for that fault only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# From harmless to bad; ``worst`` picks the last one present. "skipped" is below "pass" because a check that
# did not run says nothing, so [pass, skipped] is a pass and only [skipped] is skipped.
STATUSES = ("skipped", "pass", "warn", "inconclusive", "needs-reboot", "needs-reset", "fail")

# What does not stand in the way of going live. An inconclusive check does: nothing goes live unverified.
ACCEPTED_STATUSES = ("skipped", "pass", "warn")

LAYERS = ("node", "driver", "toolkit", "stack")

# How much a verdict of a code matters when it does not pass. critical: the node must not do work. warning: it
# works, but worse than it should, or the proof is missing. info: the code never says that something is wrong.
SEVERITIES = ("info", "warning", "critical")

# The layers that answer for codes whose prefix is no layer's name.
_LAYER_OF_PREFIX = {"abi": "stack", "collective": "stack", "gpu": "driver", "import": "stack", "operation": "stack"}


@dataclass(frozen=True)
class CodeInfo:
    """What a code means.

    description: one sentence for the documentation.
    rollback_helps: whether going back to the previous profile of the verdict's layer can cure a failure with
        this code. It is False for passes and for faults of hardware or of the inventory.
    severity: one of ``SEVERITIES``, of a verdict that does not pass; "info" for a code that never fails.
    statuses: those that a verdict with this code may have.
    layers: those that it may name; empty means the one of the code's prefix (``layers_of``).
    """

    description: str
    rollback_helps: bool
    severity: str = "critical"
    statuses: tuple[str, ...] = ("fail",)
    layers: tuple[str, ...] = ()


# The statuses that several codes share.
_PASS = ("pass",)
_SKIPPED = ("skipped",)
_CHECKED = ("pass", "fail")

CODES: dict[str, CodeInfo] = {
    # gpu.*: what NVML says about the devices (gpu.py)
    "gpu.count": CodeInfo(
        "The number of GPUs that NVML sees, against the expected number.",
        False,
        statuses=("pass", "fail", "skipped"),
    ),
    "gpu.ids": CodeInfo(
        "The PCI ids of the GPUs that NVML sees, against the ids the profile allows.", False, statuses=_CHECKED
    ),
    "gpu.nvml_error": CodeInfo(
        "NVML cannot be asked: not loadable, an error code, no answer in time.",
        True,
        statuses=("fail", "needs-reboot", "needs-reset"),
    ),
    "gpu.driver_version": CodeInfo(
        "The driver version that NVML reports, against the profile's.", True, statuses=_CHECKED
    ),
    # import.*: one Python import in a child process (imports.py)
    "import.ok": CodeInfo("The module imports in a fresh interpreter of the generation.", False, "info", _PASS),
    "import.undefined_symbol": CodeInfo("The loader found a symbol that no loaded library defines.", True),
    "import.missing_library": CodeInfo("The loader did not find a shared library.", True),
    "import.missing_module": CodeInfo("A Python module that the import needs is not installed.", True),
    "import.version_mismatch": CodeInfo("A package refuses the version of one that it works with.", True),
    "import.crash": CodeInfo("The importing process died by a signal, or ended without an answer.", True),
    "import.timeout": CodeInfo("The import did not end in time and was killed.", True),
    "import.error": CodeInfo("The import raised an error of no class above.", True),
    # collective.*: an all-reduce over several processes (collective.py)
    "collective.ok": CodeInfo("The all-reduce gave the exact sums at every size and type.", False, "info", _PASS),
    "collective.wrong_value": CodeInfo("The all-reduce ended with a wrong sum.", True),
    "collective.timeout": CodeInfo("The all-reduce did not end in time; each rank's stage is given.", True),
    "collective.rank_failed": CodeInfo("A rank raised an error, or died by a signal.", True),
    "collective.busbw_low": CodeInfo("The bus bandwidth is below the profile's minimum.", True, "warning"),
    "collective.unavailable": CodeInfo(
        "torch.distributed or the asked backend cannot be used here.", True, statuses=("fail", "skipped")
    ),
    # abi.*: read from the bytes of the files, nothing is run (abi.py)
    "abi.ok": CodeInfo("Every extension file finds its symbols and libraries.", False, "info", ("pass", "skipped")),
    "abi.undefined_symbol": CodeInfo("An extension needs symbols that nothing it loads provides.", True),
    "abi.missing_library": CodeInfo(
        "An extension needs a library that is nowhere on the node.", True, statuses=("fail", "warn")
    ),
    "abi.cuda_major": CodeInfo("An extension was built for another CUDA major than torch.", True),
    "abi.glibc_too_old": CodeInfo("A file needs a newer glibc than the node has.", True),
    "abi.cxxabi": CodeInfo("A file needs a newer libstdc++ than the one it would load.", True),
    "abi.python_abi": CodeInfo("An extension was built for another Python than the interpreter.", True),
    "abi.layout_suspect": CodeInfo("All symbols resolve, but class layouts changed in between.", True),
    "abi.unreadable_file": CodeInfo(
        "A file could not be read as ELF: truncated, hostile, not ELF.", True, statuses=("fail", "inconclusive")
    ),
    # what is not there, or not as recorded
    "driver.not_managed": CodeInfo("The driver layer is not managed by this profile.", False, "info", _SKIPPED),
    "toolkit.not_managed": CodeInfo("The toolkit layer is not managed by this profile.", False, "info", _SKIPPED),
    "stack.absent": CodeInfo("No generation of the Python stack is present.", False, "info", _SKIPPED),
    "stack.drift": CodeInfo("What is installed is not what was recorded.", True),
}


@dataclass(frozen=True)
class Verdict:
    """The result of one check.

    code: a key of ``CODES``.
    status: one of ``STATUSES``.
    layer: one of ``LAYERS``; the layer that answers for the subject and would be rolled back.
    subject: what was checked, such as ``sgl_kernel`` or ``all-reduce gloo x4``.
    message: one plain sentence saying what was found.
    evidence: what was measured; JSON types only.
    action: the next step, one sentence; empty when there is nothing to do.
    simulated: the node simulates its GPUs, so the verdict says nothing about hardware.
    preexisting: the same check failed before the change, so the change is not to blame (``blame``).

    Raises ValueError for an unknown code, status or layer, naming the allowed ones.
    """

    code: str
    status: str
    layer: str
    subject: str
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)
    action: str = ""
    simulated: bool = False
    preexisting: bool = False

    def __post_init__(self) -> None:
        """Refuse what is not in the tables, so that the first test finds a misspelt code."""
        for name, value, allowed in (
            ("code", self.code, tuple(CODES)),
            ("status", self.status, STATUSES),
            ("layer", self.layer, LAYERS),
        ):
            if value not in allowed:
                raise ValueError(f"unknown verdict {name} {value!r}; known: {', '.join(sorted(allowed))}")

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a JSON dict, keys as the fields; ``simulated`` and ``preexisting`` only when true."""
        result: dict[str, Any] = {
            "code": self.code,
            "status": self.status,
            "layer": self.layer,
            "subject": self.subject,
            "message": self.message,
            "evidence": self.evidence,
            "action": self.action,
        }
        if self.simulated:
            result["simulated"] = True
        if self.preexisting:
            result["preexisting"] = True
        return result

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """Return the verdict that ``to_dict`` wrote. Raises KeyError or ValueError for another shape."""
        return cls(
            code=data["code"],
            status=data["status"],
            layer=data["layer"],
            subject=data["subject"],
            message=data["message"],
            evidence=dict(data.get("evidence", {})),
            action=data.get("action", ""),
            simulated=bool(data.get("simulated", False)),
            preexisting=bool(data.get("preexisting", False)),
        )


def layers_of(code: str) -> tuple[str, ...]:
    """Return the layers that a verdict with this code of ``CODES`` may name."""
    prefix = code.partition(".")[0]
    return CODES[code].layers or (_LAYER_OF_PREFIX.get(prefix, prefix),)


def worst(verdicts: Iterable[Verdict], *, preexisting: bool = False) -> str:
    """Return the gravest status, in the order of ``STATUSES``; "skipped" when there are no verdicts.

    A failure that was there before the change counts as "warn", since it does not stand in the way; with
    ``preexisting`` true it counts in full.
    """
    statuses = (
        "warn" if v.preexisting and v.status not in ACCEPTED_STATUSES and not preexisting else v.status
        for v in verdicts
    )
    return max(statuses, key=STATUSES.index, default="skipped")


def failing(verdicts: Iterable[Verdict], *, preexisting: bool = False) -> list[Verdict]:
    """Return the verdicts that stand in the way of going live: not in ``ACCEPTED_STATUSES``.

    Those that failed before the change do not, because going back cannot cure them: who wants them too, to
    show them or to judge a node for itself, asks with ``preexisting`` true.
    """
    return [v for v in verdicts if v.status not in ACCEPTED_STATUSES and (preexisting or not v.preexisting)]


def blame(after: Iterable[Verdict], before: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts of *after*; each failing one whose check failed in the baseline is ``preexisting``.

    after: verdicts taken since the change. before: the baseline taken before it, by the same checks. Two
    verdicts are of the same check when code, layer and subject agree. What has become worse (it was
    inconclusive and fails now) is new. Give as *before* only what the change could have left alone: a
    generation that is not live yet answers for its own imports, however those of the live one end.
    """
    known: dict[tuple[str, str, str], int] = {}
    for v in failing(before, preexisting=True):
        check = (v.code, v.layer, v.subject)
        known[check] = max(known.get(check, 0), STATUSES.index(v.status))

    def was_there(v: Verdict) -> bool:
        gravity = STATUSES.index(v.status)
        return v.status not in ACCEPTED_STATUSES and gravity <= known.get((v.code, v.layer, v.subject), -1)

    return [replace(v, preexisting=was_there(v)) for v in after]


def simulated(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts, each marked as coming from a node that simulates its GPUs."""
    return [replace(verdict, simulated=True) for verdict in verdicts]


def sentence(verdict: Verdict) -> str:
    """Return the line an operator reads: ``<subject>: <message> <action>``."""
    return f"{verdict.subject}: {verdict.message} {verdict.action}".rstrip()
