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
_PACKAGED = ("driver", "toolkit")  # the layers that are made of packages
_NODE = ("node",)  # the layer of what only hands and firmware can change

CODES: dict[str, CodeInfo] = {
    # gpu.*: what NVML says about the devices (hardware/gpu.py)
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
        statuses=("fail", "needs-reboot", "inconclusive"),
    ),
    # gpu.*: the GPUs as devices (hardware/); no software makes them whole again
    "gpu.hardware_error": CodeInfo(
        "A GPU answers NVML with an error of its own: lost, reset required, no power, damaged board data.",
        False,
        statuses=("fail", "needs-reset", "inconclusive", "needs-reboot"),
        layers=_NODE,
    ),
    "gpu.pci_count": CodeInfo(
        "The number of GPUs on the PCI bus, against NVML's and the expected number.",
        False,
        statuses=("pass", "fail", "skipped"),
        layers=_NODE,
    ),
    "gpu.off_bus": CodeInfo(
        "Whether each GPU on the bus still answers configuration reads.",
        False,
        statuses=("pass", "needs-reboot", "skipped"),
        layers=_NODE,
    ),
    "gpu.link_width": CodeInfo(
        "The lanes of each GPU's PCIe link, against what it can have, or the profile wants.",
        False,
        "warning",
        ("pass", "warn", "fail", "skipped"),
        _NODE,
    ),
    "gpu.link_speed": CodeInfo(
        "The generation of each GPU's PCIe link under load; at rest it is not judged.",
        False,
        "warning",
        ("pass", "fail", "skipped"),
        _NODE,
    ),
    "gpu.bar1": CodeInfo(
        "The size of each GPU's BAR1, against its memory, or what the profile wants.",
        False,
        statuses=("pass", "warn", "fail", "skipped"),
        layers=_NODE,
    ),
    "gpu.ecc": CodeInfo(
        "Whether ECC is as the profile wants it, and errors that it could not correct.",
        False,
        statuses=("pass", "warn", "fail", "needs-reset", "skipped"),
        layers=_NODE,
    ),
    "gpu.row_remap": CodeInfo(
        "Rows of GPU memory that were remapped, wait for it, or could not be.",
        False,
        statuses=("pass", "warn", "fail", "needs-reset", "skipped"),
        layers=_NODE,
    ),
    "gpu.retired_pages": CodeInfo(
        "Retired pages of GPU memory; only GPUs older than Ampere have them.",
        False,
        "warning",
        ("pass", "warn", "needs-reboot"),
        _NODE,
    ),
    "gpu.xid": CodeInfo(
        "The Xids in the kernel log since boot, by what NVIDIA's catalogue asks for.",
        False,
        statuses=("pass", "warn", "fail", "needs-reset", "needs-reboot", "skipped"),
        layers=_NODE,
    ),
    "gpu.init_failed": CodeInfo(
        "The driver logged that it could not start a GPU: often the wrong kind of kernel module.",
        True,
        statuses=("fail", "warn"),
    ),
    "gpu.recovery": CodeInfo(
        "What the driver says a GPU needs to recover.",
        False,
        statuses=("pass", "needs-reset", "needs-reboot", "skipped"),
        layers=_NODE,
    ),
    "gpu.wedged": CodeInfo(
        "Whether a GPU is fully busy although no process uses it.",
        False,
        statuses=("pass", "needs-reset", "skipped"),
        layers=_NODE,
    ),
    "gpu.after_load": CodeInfo(
        "Whether each GPU still answers after operations and collective ran on it.",
        False,
        statuses=("pass", "needs-reboot"),
        layers=_NODE,
    ),
    "gpu.throttle": CodeInfo(
        "Whether heat or a lack of power holds clocks down.", False, "warning", ("pass", "warn", "skipped"), _NODE
    ),
    "gpu.persistence": CodeInfo(
        "Whether persistence mode is on.", False, "warning", ("pass", "warn", "skipped"), _NODE
    ),
    "gpu.arch": CodeInfo(
        "The architecture of each GPU, against the profile's.",
        False,
        statuses=("pass", "fail", "skipped"),
        layers=_NODE,
    ),
    # node.*: the machine around the GPUs (hardware/)
    "node.report": CodeInfo(
        "sysfs, procfs or the kernel log could not be read in time.", False, statuses=("inconclusive",)
    ),
    "node.nouveau": CodeInfo("Whether the module nouveau is loaded.", False, "warning", ("pass", "warn")),
    "node.iommu": CodeInfo(
        "How the IOMMU treats the GPUs, against what the profile wants.",
        False,
        statuses=("pass", "warn", "fail", "skipped", "inconclusive"),
    ),
    "node.acs": CodeInfo(
        "Whether bridges above the GPUs redirect peer-to-peer traffic upstream.",
        False,
        "warning",
        ("pass", "warn", "skipped"),
    ),
    "node.aer": CodeInfo(
        "PCIe errors that the kernel has counted since boot.", False, "warning", ("pass", "warn", "fail", "skipped")
    ),
    "node.link_down": CodeInfo("Slots whose link went down since boot.", False, "warning", ("pass", "warn", "skipped")),
    "node.shm": CodeInfo(
        "Room in /dev/shm and lockable memory, which NCCL needs without peer-to-peer.",
        False,
        "warning",
        ("pass", "warn", "fail", "skipped"),
    ),
    "node.hmm": CodeInfo(
        "Whether HMM is on in the loaded nvidia_uvm, where it is known to hurt.",
        False,
        "warning",
        ("pass", "warn", "skipped"),
    ),
    "node.forward_compat": CodeInfo(
        "Whether the loader's path has a forward-compatibility libcuda.", False, "warning", ("pass", "warn")
    ),
    # import.*: one Python import in a child process (stack/imports.py)
    "import.ok": CodeInfo("The module imports in a fresh interpreter of the generation.", False, "info", _PASS),
    "import.undefined_symbol": CodeInfo("The loader found a symbol that no loaded library defines.", True),
    "import.missing_library": CodeInfo("The loader did not find a shared library.", True),
    "import.missing_module": CodeInfo("A Python module that the import needs is not installed.", True),
    "import.version_mismatch": CodeInfo("A package refuses the version of one that it works with.", True),
    "import.crash": CodeInfo("The importing process died by a signal, or ended without an answer.", True),
    "import.timeout": CodeInfo("The import did not end in time and was killed.", True),
    "import.memory": CodeInfo("The import needs more memory than it may use.", True),
    "import.foreign_library": CodeInfo("The import loaded a library from outside the generation.", True),
    "import.duplicate_library": CodeInfo("One library is in the process twice: two files, or two CUDA majors.", True),
    "import.error": CodeInfo("The import raised an error of no class above.", True),
    # stack.*: whether the packages of a generation fit together (stack/check.py)
    "stack.nccl_version": CodeInfo(
        "The NCCL that torch loads, against the one that the lock pins.", True, statuses=("pass", "fail", "skipped")
    ),
    "stack.arch": CodeInfo(
        "torch was built for the profile's architecture.", False, "info", statuses=("pass", "skipped")
    ),
    "stack.arch_missing": CodeInfo("torch was not built for the profile's architecture.", True),
    "stack.package_conflict": CodeInfo("Two packages that own the same files are both installed.", True),
    "stack.flashinfer_versions": CodeInfo(
        "The versions of flashinfer's three packages, against each other.", True, statuses=("pass", "fail", "skipped")
    ),
    "stack.cuda_home": CodeInfo(
        "CUDA_HOME and its nvcc, as the stack sees them, against the CUDA release of torch.",
        True,
        statuses=("pass", "warn", "fail", "skipped"),
    ),
    # operation.*: one call of a library on a GPU (stack/operations.py)
    "operation.ok": CodeInfo("The operation gave the right values on every GPU.", False, "info", _PASS),
    "operation.wrong_value": CodeInfo("The operation gave a wrong value.", True),
    "operation.crash": CodeInfo("The operation died by a signal, or the GPU reported an illegal access.", True),
    "operation.timeout": CodeInfo("The operation did not end in time and was killed.", True),
    "operation.no_kernel_image": CodeInfo("The library holds no code for this GPU.", True),
    "operation.unavailable": CodeInfo(
        "The operation cannot be called: no such function, no compiler, too few GPUs.",
        True,
        statuses=("fail", "skipped"),
    ),
    "operation.no_memory": CodeInfo(
        "The GPU has no memory left for the operation, so it proved nothing.", False, "warning", ("inconclusive",)
    ),
    "operation.error": CodeInfo("The operation raised an error of no class above.", True),
    # collective.*: an all-reduce over several processes (stack/collective.py)
    "collective.ok": CodeInfo("All values are exact at every size and type.", False, "info", _PASS),
    "collective.wrong_value": CodeInfo("A collective ended with a wrong value.", True),
    "collective.timeout": CodeInfo(
        "It did not end in time; each rank's stage is given. Inconclusive when it was only slow, or when the cause "
        "could not be told apart.",
        True,
        statuses=("fail", "inconclusive"),
    ),
    "collective.p2p_broken": CodeInfo("It hangs, and works with peer-to-peer transfers disabled.", True),
    "collective.rank_failed": CodeInfo("A rank raised an error, or died by a signal.", True),
    "collective.shm_full": CodeInfo(
        "The shared memory of the node has too little room for NCCL.",
        False,
        statuses=("fail", "warn"),
        layers=("node",),
    ),
    "collective.gpus_not_idle": CodeInfo(
        "After its ranks were killed, GPUs are still busy, or a rank cannot be killed.",
        False,
        statuses=("needs-reset",),
        layers=("driver",),
    ),
    "collective.busbw_low": CodeInfo(
        "The bus bandwidth is below the profile's minimum, its warning level, or this chassis's baseline.",
        True,
        "warning",
        ("fail", "warn"),
    ),
    "collective.unavailable": CodeInfo(
        "torch.distributed or the asked backend cannot be used here.", True, statuses=("fail", "skipped")
    ),
    # abi.*: read from the bytes of the files, nothing is run (abi/)
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
    # node.*: what concerns the machine, and no layer
    "node.child_failed": CodeInfo(
        "A check could not be started at all: no interpreter, no user, no room.",
        True,
        layers=("node", "driver", "toolkit", "stack"),
    ),
    # toolkit.*: the CUDA toolkit: its files, versions, and the programs it makes (toolkit/)
    "toolkit.layout": CodeInfo(
        "The files of the toolkit: all there, and as they were laid out.", True, statuses=("pass", "warn", "fail")
    ),
    "toolkit.version": CodeInfo(
        "The toolkit's release, against the profile's.", True, statuses=("pass", "warn", "fail")
    ),
    "toolkit.component": CodeInfo("A part of the toolkit belongs to another release than the profile's.", True),
    "toolkit.library_path": CodeInfo(
        "What makes every program search CUDA directories: ld.so.conf, LD_LIBRARY_PATH.",
        False,
        statuses=("pass", "warn", "fail"),
    ),
    "toolkit.default_link": CodeInfo("Whether /usr/local/cuda names the profile's toolkit.", True, statuses=_CHECKED),
    "toolkit.compiler_missing": CodeInfo("There is no host compiler that nvcc could call.", False),
    "toolkit.compiler_unsupported": CodeInfo("nvcc does not take the host compiler's version.", True),
    "toolkit.compile": CodeInfo(
        "A program compiles for every architecture and holds the machine code.",
        False,
        "info",
        statuses=("pass", "skipped"),
    ),
    "toolkit.compile_failed": CodeInfo("nvcc cannot compile and link a small program.", True),
    "toolkit.arch_missing": CodeInfo("A compiled program lacks the machine code for an architecture.", True),
    "toolkit.runtime": CodeInfo(
        "The version that the CUDA runtime answers, against the release.", True, statuses=_CHECKED
    ),
    "toolkit.kernel": CodeInfo(
        "A compiled kernel runs on every GPU and computes right.", True, statuses=("pass", "fail", "skipped")
    ),
    "toolkit.driver_too_old": CodeInfo("The driver is older than the toolkit needs.", True),
    "toolkit.extension": CodeInfo(
        "A torch extension builds against the stack, loads and computes right.",
        True,
        statuses=("pass", "fail", "skipped"),
    ),
    # driver.*: the NVIDIA driver before and after a change (driver/)
    "driver.version": CodeInfo(
        "The version of the loaded module, the module on disk, the library and the packages, against the profile's.",
        True,
        statuses=("pass", "fail", "inconclusive"),
    ),
    "driver.reboot_pending": CodeInfo(
        "All that is on disk is as wanted, and something older still runs until the next boot.",
        False,
        statuses=("warn", "needs-reboot"),
    ),
    "driver.library_mismatch": CodeInfo(
        "The driver's library is not of the loaded module's version, and a reboot would not give the wanted one.", True
    ),
    "driver.module_not_loaded": CodeInfo(
        "The module nvidia is not loaded; the evidence names the cause.",
        True,
        statuses=("fail", "needs-reboot", "skipped"),
    ),
    "driver.flavour": CodeInfo(
        "Open or proprietary kernel modules, against the profile and against what the GPUs work with.",
        True,
        statuses=("pass", "fail", "needs-reboot", "inconclusive"),
    ),
    "driver.dkms_missing": CodeInfo(
        "Every kernel that can boot has the modules, in the wanted version.",
        True,
        statuses=("pass", "fail", "inconclusive", "skipped"),
    ),
    "driver.headers_missing": CodeInfo(
        "The headers of every kernel that can boot, which DKMS needs.", False, statuses=_CHECKED
    ),
    "driver.secure_boot": CodeInfo(
        "Whether the kernel accepts the modules' signatures under Secure Boot.",
        False,
        statuses=("pass", "fail", "inconclusive"),
    ),
    "driver.initramfs_stale": CodeInfo(
        "The initramfs of every kernel that can boot holds this driver or none.",
        True,
        statuses=("pass", "fail", "inconclusive"),
    ),
    "driver.firmware_missing": CodeInfo(
        "The GSP firmware of the driver's version is on disk.", True, statuses=("pass", "warn", "fail")
    ),
    "driver.parameter": CodeInfo(
        "A module parameter of the profile, configured and live.",
        True,
        statuses=("pass", "warn", "fail", "needs-reboot"),
    ),
    "driver.cuda_init": CodeInfo("CUDA starts: cuInit, which can fail while NVML answers.", True, statuses=_CHECKED),
    "driver.hmm": CodeInfo(
        "CUDA does not start although NVML answers, and heterogeneous memory management is on.", True
    ),
    "driver.nouveau": CodeInfo("The module nouveau holds the GPUs.", False, statuses=("warn", "fail", "needs-reboot")),
    "driver.gpu_in_use": CodeInfo("Processes use the GPUs whose driver is to change.", False, statuses=_CHECKED),
    "driver.no_space": CodeInfo("Room for a change of the driver.", False, statuses=_CHECKED),
    "driver.unsupported": CodeInfo(
        "Whether the wanted driver exists for this system and knows its GPUs.", False, statuses=_CHECKED
    ),
    "driver.toolkit_minimum": CodeInfo(
        "The driver is new enough for the CUDA version that the profile brings.", True, statuses=_CHECKED
    ),
    "driver.half_installed": CodeInfo(
        "dpkg was interrupted and left packages of the driver unfinished.", True, statuses=("warn", "fail")
    ),
    "driver.unattended_upgrades": CodeInfo(
        "Automatic upgrades leave the driver's packages alone.", False, "warning", statuses=("pass", "warn")
    ),
    "driver.unreadable": CodeInfo(
        "Files on which the verdicts stand could not be read.", False, "warning", statuses=("inconclusive",)
    ),
    # packages.*: transactions of the package manager, judged before they happen, and what is installed (packages/)
    "packages.ok": CodeInfo(
        "The packages are, or would be, exactly those that were named.", False, "info", _PASS, _PACKAGED
    ),
    "packages.not_available": CodeInfo(
        "No repository of the node has the version, or several have it.", False, layers=_PACKAGED
    ),
    "packages.conflict": CodeInfo(
        "The package manager finds no way to install exactly the named versions.", False, layers=_PACKAGED
    ),
    "packages.version_differs": CodeInfo(
        "A package is, or would end, at another version than the named one.", True, layers=_PACKAGED
    ),
    "packages.unpinned": CodeInfo(
        "Packages of the layer would come that nothing names: a meta package drifts.", False, layers=_PACKAGED
    ),
    "packages.transitional": CodeInfo("A package's name hides another branch of the driver.", False, layers=_PACKAGED),
    "packages.kernel_change": CodeInfo(
        "The transaction would install, change or remove a kernel.",
        False,
        statuses=("warn", "fail"),
        layers=_PACKAGED,
    ),
    "packages.removes_foreign": CodeInfo(
        "The transaction would remove a package that is not the layer's own.", False, layers=_PACKAGED
    ),
    "packages.other_layer": CodeInfo(
        "The transaction would change packages of the other layer.", False, layers=_PACKAGED
    ),
    "packages.downgrade": CodeInfo("The transaction would go down, and that was not allowed.", False, layers=_PACKAGED),
    "packages.held": CodeInfo("The transaction would change packages that are on hold.", False, layers=_PACKAGED),
    "packages.not_pinned": CodeInfo(
        "The package manager's preferences do not keep the packages at their versions.", True, layers=_PACKAGED
    ),
    "packages.locked": CodeInfo("Another process holds the package manager's lock.", False, layers=_PACKAGED),
    "packages.dpkg_interrupted": CodeInfo("An earlier change of packages was not finished.", True, layers=_PACKAGED),
    "packages.mirror": CodeInfo(
        "A repository cannot be read: not reachable, not signed by the pinned key, or inconsistent.",
        False,
        layers=_PACKAGED,
    ),
    "packages.query_failed": CodeInfo(
        "The package manager could not be asked, or did not answer in time.", False, layers=_PACKAGED
    ),
    # run.*: a task of the playbook that failed without a check's verdict (bedplate.controller.report.failure)
    "run.refused": CodeInfo(
        "A task refused to go on: what it was given, or found, is not what it needs.", False, layers=_NODE
    ),
    "run.timeout": CodeInfo("A task did not end in the time that it has.", False, layers=_NODE),
    "run.task_failed": CodeInfo("A task failed for a reason that no check has a code for.", False, layers=_NODE),
    # what is not there, or not as recorded
    "driver.not_managed": CodeInfo("The driver layer is not managed by this profile.", False, "info", _SKIPPED),
    "toolkit.not_managed": CodeInfo("The toolkit layer is not managed by this profile.", False, "info", _SKIPPED),
    "stack.absent": CodeInfo("No generation of the Python stack is present.", False, statuses=("fail", "skipped")),
    "stack.drift": CodeInfo("The live generation's files, against those that were built.", True, statuses=_CHECKED),
    "stack.profile": CodeInfo(
        "The live generation, against the profile that the inventory names.",
        False,
        "warning",
        ("pass", "warn", "skipped"),
    ),
    "driver.drift": CodeInfo("The installed driver, against the profile and the journal.", False, statuses=_CHECKED),
    "toolkit.drift": CodeInfo("The installed toolkit, against the profile and the journal.", False, statuses=_CHECKED),
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
