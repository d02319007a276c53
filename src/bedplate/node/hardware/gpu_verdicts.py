"""Verdicts on the GPUs as devices: bus against NVML, links, BAR1, memory errors, Xids, GPUs that hang. Reads nothing.

gpu.py judges whether NVML answers and for how many; here it is whether each one is fit for work. They are faults of
hardware or of the chassis' settings, so the layer is ``node``, and no rollback of software follows from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..verdicts import Verdict
from . import xid
from .pci import short_bus_id

LAYER = "node"
SUBJECT = "GPUs"
MIB = 1 << 20

# What a GPU has where Resizable BAR or above-4G decoding is off.
SMALL_BAR1 = 256 * MIB

# Utilisation in percent from which a GPU counts as wedged when no process uses it.
BUSY_PERCENT = 99
# Utilisation in percent from which a GPU works, and its link must run at its full generation.
WORK_PERCENT = 30

# NVML's recovery actions (nvml_child.RECOVERY): status and next step.
_RECOVERY = {
    "gpu-reset": ("needs-reset", "Stop what uses this GPU, and reset it: `nvidia-smi --gpu-reset -i {}`."),
    "drain-p2p": (
        "needs-reset",
        "Stop what uses the GPUs together, and reset this one: `nvidia-smi --gpu-reset -i {}`.",
    ),
    "drain-and-reset": ("needs-reset", "Let its work end, and reset it: `nvidia-smi --gpu-reset -i {}`."),
    "bus-reset": ("needs-reset", "Reset the bus of this GPU ({}), or reboot."),
    "node-reboot": ("needs-reboot", "Reboot the node."),
    "system-reboot": ("needs-reboot", "Reboot the node."),
}

Gpus = Sequence[Mapping[str, Any]]


def pci_count(report: Mapping[str, Any], nvml: Mapping[str, Any] | None, expect: Mapping[str, Any]) -> Verdict:
    """Return the verdict gpu.pci_count: PCI bus = NVML = expected. Arguments as ``host.judge``."""
    expected, bus = expect.get("gpus"), report["gpus"]
    asked = nvml is not None and not nvml["error"]
    known = {short_bus_id(gpu["bus_id"]) for gpu in (nvml or {}).get("gpus", []) if "bus_id" in gpu}
    seen = len(nvml["gpus"]) if nvml is not None and asked else None
    evidence = {
        "expected": expected,
        "pci": [gpu["bus_id"] for gpu in bus],
        "nvml": sorted(known) if asked else None,
        "drivers": dict(Counter(str(gpu["driver"]) for gpu in bus)),
    }

    def verdict(status: str, message: str, action: str = "") -> Verdict:
        return Verdict("gpu.pci_count", status, LAYER, "GPUs on the bus", message, evidence, action)

    if not bus and seen:
        return verdict("skipped", f"sysfs shows no GPU, and NVML {seen}: this is not the /sys of the machine.")
    if expected is not None and len(bus) != expected:
        message = f"The PCI bus has {len(bus)}, and {expected} are expected."
        if len(bus) > expected:
            return verdict("fail", message, "Correct the number of GPUs in the inventory or the profile.")
        action = (
            "Compare the bus ids in the evidence with the slots, look at `dmesg` for Link Down, and reseat the GPU."
        )
        return verdict("fail", message, action)
    if seen is not None and seen != len(bus):
        missing = [gpu for gpu in bus if gpu["bus_id"] not in known]
        others = ", ".join(f"{gpu['bus_id']} (driver {gpu['driver'] or 'none'})" for gpu in missing)
        message = f"The PCI bus has {len(bus)}, and NVML sees {seen}; not seen: {others or 'unknown'}."
        return verdict("fail", message, "Look at `dmesg` for these bus ids; a GPU that is gone needs a reboot.")
    if expected is None and not bus:
        return verdict("skipped", "No number of GPUs is expected here, and none is on the bus.")
    so_does = " and so does NVML" if seen is not None else ""
    return verdict("pass", f"The PCI bus has {len(bus)}{so_does}.")


def judge(report: Mapping[str, Any], nvml: Mapping[str, Any] | None, expect: Mapping[str, Any]) -> list[Verdict]:
    """Return the other verdicts gpu.*: arguments as ``host.judge``."""
    well = [gpu for gpu in (nvml or {}).get("gpus", []) if "error" not in gpu]
    recovered = [bus_of(gpu) for gpu in well if gpu["recovery_action"] == "none"]
    verdicts = [
        *_off_bus(report),
        *_link_width(report, well, expect),
        *_bar1(report, well, expect),
        *xid.judge(report["kernel_log"], recovered),
        *_init_failed(report, nvml),
    ]
    if not well:
        return verdicts + _ids(report, expect)
    return [
        *verdicts,
        *_link_speed(well),
        *_ecc(well, expect),
        *_row_remap(well),
        *_retired_pages(well),
        *_recovery(well),
        *_wedged(well, report["users"]),
        *_throttle(well),
        *_persistence(well),
        *_arch(well, expect),
    ]


def _ids(report: Mapping[str, Any], expect: Mapping[str, Any]) -> list[Verdict]:
    """Are the GPUs on the bus those of the profile? Asked where NVML does not answer; else gpu.py asks NVML."""
    allowed = sorted({text.lower() for text in expect.get("gpu_ids") or []})
    seen = {gpu["bus_id"]: gpu["pci_id"] for gpu in report["gpus"]}
    if not allowed or not seen:
        return []
    evidence = {"expected": allowed, "seen": seen}
    wrong = [f"{bus_id} is {pci_id}" for bus_id, pci_id in seen.items() if pci_id not in allowed]
    if wrong:
        message = f"On the bus {', '.join(wrong)}; expected: {', '.join(allowed)}."
        action = "Use a profile made for these GPUs, or add the id to the profile."
        return [Verdict("gpu.ids", "fail", "driver", SUBJECT, message, evidence, action)]
    return [Verdict("gpu.ids", "pass", "driver", SUBJECT, f"All on the bus are {', '.join(allowed)}.", evidence)]


def bus_of(gpu: Mapping[str, Any]) -> str:
    """Return the bus id of a GPU of NVML as sysfs writes it: the name that outlives a change of NVML's order."""
    return short_bus_id(gpu["bus_id"])


class _Check:
    """The verdicts of one code over several GPUs: one for each that does not pass, or one that says that all do."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.found: list[Verdict] = []

    def add(self, status: str, bus_id: str, message: str, evidence: dict[str, Any], action: str) -> None:
        """Note a GPU that does not pass."""
        self.found.append(Verdict(self.code, status, LAYER, f"GPU {bus_id}", message, evidence, action))

    def end(self, status: str, message: str, evidence: dict[str, Any]) -> list[Verdict]:
        """Return what was noted, or else one verdict over all."""
        return self.found or [Verdict(self.code, status, LAYER, SUBJECT, message, evidence)]


def _off_bus(report: Mapping[str, Any]) -> list[Verdict]:
    """Does each GPU on the bus still answer configuration reads?"""
    check = _Check("gpu.off_bus")
    for gpu in report["gpus"]:
        if gpu["answers"] is False:
            message = "The kernel lists it, and it no longer answers: it fell off the bus."
            action = "Reboot; when it is gone again, switch the chassis off, reseat the GPU and its power."
            check.add("needs-reboot", gpu["bus_id"], message, {"driver": gpu["driver"]}, action)
    known = [gpu["bus_id"] for gpu in report["gpus"] if gpu["answers"] is not None]
    if not known:
        return check.end("skipped", "The configuration space of no GPU could be read.", {})
    return check.end("pass", f"All {len(known)} answer on the bus.", {"answering": known})


def _link_width(report: Mapping[str, Any], well: Gpus, expect: Mapping[str, Any]) -> list[Verdict]:
    """Has each link the lanes it can have? Unlike the generation, the width does not go down at rest."""
    check = _Check("gpu.link_width")
    ports = {bridge["bus_id"]: bridge for bridge in report["bridges"]}
    links = {bus_of(gpu): (gpu["pcie_width"], gpu["pcie_width_max"], None) for gpu in well}
    for gpu in report["gpus"]:
        port = ports.get(gpu["bridges"][-1]) if gpu["bridges"] else None
        links[gpu["bus_id"]] = (gpu["width"], gpu["width_max"], port["width_max"] if port else None)
    wanted = expect.get("pcie_width")
    widths = {}
    for bus_id, (width, most, slot) in sorted(links.items()):
        if width is None:
            continue
        widths[bus_id] = width
        evidence = {"width": width, "width_max": most, "slot_max": slot, "wanted": wanted}
        action = "Reseat the GPU and its riser, clean the contacts, and look at the slot's bifurcation in the BIOS."
        if wanted is not None and width < wanted:
            check.add("fail", bus_id, f"Its link has {width} lanes, and the profile wants {wanted}.", evidence, action)
        elif wanted is None and most is not None and width < most:
            if slot is not None and width >= slot:
                message = f"Its link has {width} of {most} lanes, since its slot has no more."
                action = "Move it to a wider slot, or say so in the profile: `expect: pcie_width`."
                check.add("warn", bus_id, message, evidence, action)
            else:
                check.add("fail", bus_id, f"Its link has {width} of {most} lanes.", evidence, action)
    if not widths:
        return check.end("skipped", "Neither sysfs nor NVML tells the width of a link.", {})
    return check.end("pass", f"The links have {_counted(widths.values())} lanes.", {"widths": widths})


def _link_speed(well: Gpus) -> list[Verdict]:
    """Does each link run at its full generation while its GPU works? At rest it goes down, which is normal."""
    check = _Check("gpu.link_speed")
    working = [g for g in well if g["processes"] and (g["utilization"] or 0) >= WORK_PERCENT]
    judged = [gpu for gpu in working if gpu["pcie_gen"] and gpu["pcie_gen_max"]]
    for gpu in judged:
        if gpu["pcie_gen"] < gpu["pcie_gen_max"]:
            message = f"Under load its link runs at generation {gpu['pcie_gen']} of {gpu['pcie_gen_max']}."
            evidence = {"pcie_gen": gpu["pcie_gen"], "pcie_gen_max": gpu["pcie_gen_max"]}
            action = (
                "Look at `dmesg` for AER and at the BIOS for the slot's speed; try `pcie_aspm=off`; reseat the GPU."
            )
            check.add("fail", bus_of(gpu), message, evidence, action)
    if not judged:
        return check.end("skipped", "The GPUs are at rest, when links slow down; the speed counts under load only.", {})
    speeds = {bus_of(gpu): gpu["pcie_gen"] for gpu in judged}
    return check.end("pass", f"Under load {len(judged)} links run at their full generation.", {"generations": speeds})


def _bar1(report: Mapping[str, Any], well: Gpus, expect: Mapping[str, Any]) -> list[Verdict]:
    """Is each GPU's window into its memory (BAR1) as large as the memory? Peers reach it through this window."""
    check = _Check("gpu.bar1")
    memory = {bus_of(gpu): gpu["memory_bytes"] for gpu in well}
    sizes = {gpu["bus_id"]: max(bar["size"] for bar in gpu["bars"]) for gpu in report["gpus"] if gpu["bars"]}
    sizes.update({bus_of(gpu): gpu["bar1_bytes"] for gpu in well if gpu["bar1_bytes"] is not None})
    unplaced = {gpu["bus_id"] for gpu in report["gpus"] if any(bar["start"] == 0 for bar in gpu["bars"])}
    wanted = (expect.get("bar1_min_mib") or 0) * MIB
    action = "Turn on above-4G decoding and Resizable BAR in the BIOS."
    for bus_id, size in sorted(sizes.items()):
        evidence = {"bar1_mib": size // MIB, "wanted_mib": wanted // MIB or None}
        evidence["memory_mib"] = (memory.get(bus_id) or 0) // MIB or None
        if bus_id in unplaced:
            check.add("fail", bus_id, "The BIOS gave one of its memory windows no address.", evidence, action)
        elif wanted and size < wanted:
            message = f"BAR1 has {size // MIB} MiB, and the profile wants {wanted // MIB}."
            check.add("fail", bus_id, message, evidence, action)
        elif not wanted and size <= SMALL_BAR1:
            message = f"BAR1 has only {size // MIB} MiB: Resizable BAR or above-4G decoding is off."
            check.add("fail", bus_id, message, evidence, action)
        elif not wanted and size < (memory.get(bus_id) or 0):
            message = f"BAR1 has {size // MIB} MiB, less than the GPU's {evidence['memory_mib']} MiB."
            check.add("warn", bus_id, message, evidence, action)
    if not sizes:
        return check.end("skipped", "Neither sysfs nor NVML tells the size of BAR1.", {})
    in_mib = {bus_id: size // MIB for bus_id, size in sizes.items()}
    return check.end("pass", f"BAR1 has {_counted(in_mib.values())} MiB.", {"bar1_mib": in_mib})


def _init_failed(report: Mapping[str, Any], nvml: Mapping[str, Any] | None) -> list[Verdict]:
    """Has the driver failed to start a GPU since boot? That is what the wrong kind of kernel module does.

    The only verdict here that another driver may cure. Where NVML has the GPU now, it is a warning.
    """
    verdicts = []
    seen = {bus_of(gpu) for gpu in (nvml or {}).get("gpus", []) if "bus_id" in gpu and "error" not in gpu}
    for entry in report["kernel_log"]["init_failures"]:
        status = "warn" if entry["bus_id"] in seen else "fail"
        message = f"The driver could not start it, {entry['count']} times since boot."
        action = (
            "Blackwell needs the open kernel modules (`modinfo -F license nvidia`); else look at its Xids in `dmesg`."
        )
        subject = f"GPU {entry['bus_id']}"
        verdicts.append(Verdict("gpu.init_failed", status, "driver", subject, message, dict(entry), action))
    return verdicts


def _ecc(well: Gpus, expect: Mapping[str, Any]) -> list[Verdict]:
    """Is ECC as the profile wants it, and has it found errors that it could not correct?"""
    check = _Check("gpu.ecc")
    wanted = expect.get("ecc")
    for gpu in well:
        errors = gpu["ecc_errors"]
        evidence = {"ecc": gpu["ecc"], "ecc_pending": gpu["ecc_pending"], "wanted": wanted, "errors": dict(errors)}
        reset = f"`nvidia-smi --gpu-reset -i {bus_of(gpu)}`"
        if errors["uncorrected"]:
            message = f"{errors['uncorrected']} uncorrectable ECC errors since the driver was loaded."
            action = f"Stop what uses this GPU, and reset it: {reset}; replace it when they come back."
            check.add("needs-reset", bus_of(gpu), message, evidence, action)
        elif wanted is not None and gpu["ecc"] is None:
            message = f"It does not tell whether ECC is on, and the profile wants it {_on(wanted)}."
            check.add("fail", bus_of(gpu), message, evidence, "Remove `ecc` from the profile's `expect`: no ECC here.")
        elif wanted is not None and gpu["ecc"] != wanted:
            message = f"ECC is {_on(gpu['ecc'])}, and the profile wants it {_on(wanted)}."
            action = f"Run `nvidia-smi --ecc-config={int(wanted)} -i {bus_of(gpu)}`, then {reset}."
            status = "needs-reset" if gpu["ecc_pending"] == wanted else "fail"
            check.add(status, bus_of(gpu), message, evidence, action)
        elif errors["uncorrected_total"]:
            message = f"{errors['uncorrected_total']} uncorrectable ECC errors over its life, none since the driver."
            check.add("warn", bus_of(gpu), message, evidence, "Watch this GPU; NVIDIA replaces it by the row remapper.")
    modes = {bus_of(gpu): gpu["ecc"] for gpu in well}
    if set(modes.values()) == {None}:
        return check.end("skipped", "These GPUs do not tell of ECC.", {})
    words = _counted(_on(mode) for mode in modes.values())
    return check.end("pass", f"ECC is {words}; no uncorrectable errors.", {"ecc": modes})


def _row_remap(well: Gpus) -> list[Verdict]:
    """Have rows of memory been replaced by spare ones, and were there enough?"""
    check = _Check("gpu.row_remap")
    known = [gpu for gpu in well if gpu["remapped_rows"] is not None]
    for gpu in known:
        rows = dict(gpu["remapped_rows"])
        if rows["failed"]:
            message = "A row of its memory could not be remapped: it has no spare ones left there."
            action = "Take the node out of service, and have the GPU replaced: NVIDIA's RMA policy names this flag."
            check.add("fail", bus_of(gpu), message, rows, action)
        elif rows["pending"]:
            message = "A row of its memory will be remapped at the next reset."
            action = f"Stop what uses this GPU, and reset it: `nvidia-smi --gpu-reset -i {bus_of(gpu)}`."
            check.add("needs-reset", bus_of(gpu), message, rows, action)
        elif rows["uncorrectable"]:
            message = f"{rows['uncorrectable']} rows of its memory were remapped after uncorrectable errors."
            check.add("warn", bus_of(gpu), message, rows, "Watch this GPU: it has spare rows left.")
    if not known:
        return check.end("skipped", "These GPUs do not tell of remapped rows.", {})
    return check.end("pass", "No row of memory waits for a remapping, and none failed.", {"gpus": len(known)})


def _retired_pages(well: Gpus) -> list[Verdict]:
    """Do older GPUs wait for pages to be retired? Newer ones remap rows instead, and have no verdict here."""
    check = _Check("gpu.retired_pages")
    known = [gpu for gpu in well if gpu["retired_pages"] is not None]
    for gpu in known:
        pages = dict(gpu["retired_pages"])
        if pages["pending"]:
            message = "A page of its memory will be retired when the driver is loaded again."
            check.add("needs-reboot", bus_of(gpu), message, pages, "Reboot the node.")
        elif pages["double_bit"]:
            message = f"{pages['double_bit']} pages of its memory were retired after double bit errors."
            check.add(
                "warn", bus_of(gpu), message, pages, "Watch this GPU; NVIDIA replaces it from 60 retired pages on."
            )
    return check.end("pass", "No page of memory waits for retirement.", {"gpus": len(known)}) if known else []


def _recovery(well: Gpus) -> list[Verdict]:
    """Does the driver itself say that a GPU must be reset, or the node rebooted?"""
    check = _Check("gpu.recovery")
    known = [gpu for gpu in well if gpu["recovery_action"] is not None]
    for gpu in known:
        action = gpu["recovery_action"]
        if action != "none":
            status, step = _RECOVERY.get(action, ("needs-reset", "Look at the driver's documentation for this action."))
            message = f"The driver says what it needs to recover: {action}."
            check.add(status, bus_of(gpu), message, {"recovery_action": action}, step.format(bus_of(gpu)))
    if not known:
        return check.end("skipped", "This driver does not tell what a GPU needs to recover.", {})
    return check.end("pass", f"{len(known)} need no recovery.", {"gpus": len(known)})


def _wedged(well: Gpus, users: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Is a GPU fully busy with nobody using it? That is how a killed collective can leave it, until a reset."""
    check = _Check("gpu.wedged")
    known = [gpu for gpu in well if gpu["utilization"] is not None and gpu["processes"] is not None]
    others = [user for user in users if not user["daemon"]]
    for gpu in known:
        if gpu["utilization"] >= BUSY_PERCENT and not gpu["processes"] and not others:
            message = f"It is {gpu['utilization']} % busy, and no process uses it."
            evidence = {"utilization": gpu["utilization"], "processes": [], "users": [dict(user) for user in users]}
            action = (
                f"Reset it: `nvidia-smi --gpu-reset -i {bus_of(gpu)}`, or reboot; do not run the check again before."
            )
            check.add("needs-reset", bus_of(gpu), message, evidence, action)
    if not known:
        return check.end("skipped", "These GPUs do not tell how busy they are, or with what.", {})
    busy = {bus_of(gpu): gpu["utilization"] for gpu in known}
    return check.end("pass", "No GPU is busy without a process.", {"utilization": busy})


def _throttle(well: Gpus) -> list[Verdict]:
    """Are clocks held down by heat, or by a lack of power?"""
    check = _Check("gpu.throttle")
    known = [gpu for gpu in well if gpu["throttle"] is not None]
    for gpu in known:
        if gpu["throttle"]:
            message = f"Its clocks are held down: {', '.join(gpu['throttle'])}, at {gpu['temperature_c']} °C."
            evidence = {"throttle": list(gpu["throttle"]), "temperature_c": gpu["temperature_c"]}
            action = "Look at fans, air flow and inlet temperature, and at the power supplies."
            check.add("warn", bus_of(gpu), message, evidence, action)
    if not known:
        return check.end("skipped", "These GPUs do not tell why their clocks are low.", {})
    heat = {bus_of(gpu): gpu["temperature_c"] for gpu in known}
    return check.end("pass", "No clock is held down by heat or power.", {"temperature_c": heat})


def _persistence(well: Gpus) -> list[Verdict]:
    """Is persistence mode on? Without it, every first use starts the GPU anew, which takes seconds."""
    check = _Check("gpu.persistence")
    known = [gpu for gpu in well if gpu["persistence"] is not None]
    off = [gpu for gpu in known if not gpu["persistence"]]
    if off:
        message = f"{len(off)} of {len(known)} have persistence mode off."
        action = "Enable the service nvidia-persistenced."
        return [
            Verdict("gpu.persistence", "warn", LAYER, SUBJECT, message, {"off": [bus_of(gpu) for gpu in off]}, action)
        ]
    if not known:
        return check.end("skipped", "These GPUs do not tell of persistence mode.", {})
    return check.end("pass", f"{len(known)} have persistence mode on.", {"gpus": len(known)})


def _arch(well: Gpus, expect: Mapping[str, Any]) -> list[Verdict]:
    """Have the GPUs the architecture that the profile's kernels were built for?"""
    check = _Check("gpu.arch")
    wanted = (expect.get("arch") or "").rstrip("af")  # sm_120a is a set of instructions of sm_120
    known = {
        bus_of(gpu): f"sm_{gpu['compute_capability'].replace('.', '')}" for gpu in well if gpu["compute_capability"]
    }
    if not wanted:
        return []
    for bus_id, arch in known.items():
        if arch != wanted:
            message = f"Its architecture is {arch}, and the profile wants {wanted}."
            action = "Use a profile made for these GPUs."
            check.add("fail", bus_id, message, {"arch": arch, "wanted": wanted}, action)
    if not known:
        return check.end("skipped", "NVML does not tell the GPUs' architecture.", {})
    return check.end("pass", f"{len(known)} are {wanted}.", {"arch": known})


def _on(mode: bool | None) -> str:
    """Return a word for a switch."""
    return "unknown" if mode is None else "on" if mode else "off"


def _counted(values: Any) -> str:
    """Return "16", or "16 (7 GPUs), 8 (1 GPU)" where they differ."""
    counts = Counter(values)
    if len(counts) == 1:
        return str(next(iter(counts)))
    return ", ".join(f"{value} ({n} GPU{'s' if n > 1 else ''})" for value, n in counts.most_common())
