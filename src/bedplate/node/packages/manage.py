"""Exact package transactions, judged before they happen, and what is installed, judged afterwards.

A layer names every one of its packages with its exact version. What apt would do about that is asked of apt itself
(apt_query.py), and refused when it is more, less or other than what was named: another version, another branch behind
a transitional name, a kernel, a package of somebody else. Afterwards the package database is compared with the names.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..verdicts import Verdict, failing, sentence
from .apt_preview import preview
from .apt_query import (
    LOCKS,
    NODE,
    UPDATES,
    Apt,
    PackageError,
    Plan,
    Policy,
    Step,
    candidates,
    installed,
    interrupted,
    is_rpm,
    listing,
    lock_holder,
    parse_policy,
    resolve,
    resolve_all,
    simulate,
    upstream,
)

__all__ = ["assert_installed", "assert_pinned", "candidates", "installed", "judge", "perform", "resolve", "simulate"]

PIN_PRIORITY = 1000  # apt_preferences(5): from here on a version is chosen even if that is a downgrade

# A layer's own packages, as patterns of names. The driver's names come first: cuda-drivers is no toolkit.
DRIVER_OWN = (
    "nvidia-*", "libnvidia-*", "firmware-nvidia-*", "xserver-xorg-video-nvidia*", "cuda-drivers*", "libcuda1",
    "libcudadebugger1", "libnvcuvid1", "libnvoptix1", "libxnvctrl*", "libgl*-nvidia*", "libegl-nvidia*",
    "glx-alternative-nvidia", "linux-modules-nvidia-*", "linux-objects-nvidia-*", "linux-signatures-nvidia-*",
    "kmod-nvidia-*", "xorg-x11-nvidia", "dnf-plugin-nvidia",
)  # fmt: skip
TOOLKIT_OWN = (
    "cuda-*", "libcublas*", "libcufft*", "libcufile*", "libcurand*", "libcusolver*", "libcusparse*", "libnpp*",
    "libnvfatbin*", "libnvjitlink*", "libnvjpeg*", "libnvptxcompiler*", "libnvvm*", "nsight-*", "gds-tools-*",
)  # fmt: skip
OWN = {"driver": DRIVER_OWN, "toolkit": TOOLKIT_OWN}
# They match the patterns above and belong to neither layer: the container toolkit, NVIDIA's key and pin packages.
NEVER_OWN = ("nvidia-container-*", "libnvidia-container*", "cuda-keyring", "nvidia-driver-pinning*")

# Kernels, by the names that Debian, Ubuntu, Proxmox and Red Hat give them. Headers are not among them: DKMS needs them.
KERNELS = (
    "linux-image-*", "linux-modules-*", "pve-kernel-*", "proxmox-kernel-*", "kernel", "kernel-core", "kernel-modules*",
)  # fmt: skip
NO_KERNELS = ("linux-modules-nvidia-*",)

_BRANCH_IN_NAME = re.compile(r"-(\d{3})(?=-|\Z)")


# ---- whether that is wanted ----


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a package name fits one of the patterns (shell wildcards)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def owner(name: str) -> str:
    """Return the layer whose package this is by its name: driver, toolkit, or an empty text."""
    if matches(name, NEVER_OWN):
        return ""
    return next((layer for layer, patterns in OWN.items() if matches(name, patterns)), "")


@dataclass(frozen=True)
class _Case:
    """What the rules of ``judge`` look at."""

    plan: Plan
    wanted: Mapping[str, str]
    layer: str
    own: Sequence[str]

    def is_own(self, name: str) -> bool:
        if name in self.wanted:
            return True
        if self.own:
            return matches(name, self.own)
        return owner(name) == self.layer

    def verdict(self, code: str, names: Sequence[str], message: str, action: str, status: str = "fail") -> Verdict:
        steps: list[Any] = [asdict(step) for step in self.plan.steps if step.name in names]
        evidence = {"packages": steps or list(names)}
        return Verdict(f"packages.{code}", status, self.layer, names[0], message, evidence, action)


def judge(
    plan: Plan,
    wanted: Mapping[str, str],
    *,
    layer: str,
    own: Sequence[str] = (),
    allow_downgrade: bool = False,
    allow_kernel_change: bool = False,
) -> list[Verdict]:
    """Return why a transaction must not happen, or one verdict ``packages.ok``.

    wanted: package to exact version. layer: driver or toolkit. own: patterns of names of the layer's own packages;
    empty for those of this module. Rules: no kernel image changes (a warning when allowed), nothing of others is
    removed, no package of the other layer changes, each wanted package ends at its version, no transitional package
    hides another branch, no package of the layer comes that is not wanted (of the driver: not at the wanted
    version), none is on hold, and none goes down unless allowed.
    """
    case = _Case(plan, wanted, layer, own)
    verdicts = [
        *_kernels(case, "warn" if allow_kernel_change else "fail"),
        *_removals(case),
        *_other_layer(case),
        *_versions(case),
        *_strays(case),
        *_held(case),
    ]
    down = [step.name for step in plan.steps if step.action == "downgrade"]
    if down and not allow_downgrade:
        message = f"{_count(down)} would go down to an older version: {listing(down)}."
        verdicts.append(case.verdict("downgrade", down, message, "Allow it, if going back is what you want."))
    if any(verdict.status == "fail" for verdict in verdicts):
        return verdicts
    return [*verdicts, Verdict("packages.ok", "pass", layer, "packages", summary(plan), plan.to_dict())]


def summary(plan: Plan) -> str:
    """Return what a transaction does, as one sentence."""
    if not plan.steps:
        return "Every package is there at its version; nothing would change."
    actions = [step.action for step in plan.steps]
    parts = [f"{actions.count(action)} to {action}" for action in dict.fromkeys(actions)]
    sign = "-" if plan.disk_bytes < 0 else "+"
    sizes = f"{_size(plan.download_bytes)} to download, {sign}{_size(abs(plan.disk_bytes))} on disk"
    return f"{_count(plan.steps)}: {', '.join(parts)}; {sizes}."


def _size(count: int) -> str:
    """Return a number of bytes as a person reads it: "740.0 MB"; powers of ten, as apt's."""
    unit, divisor = next(((u, d) for u, d in (("GB", 1e9), ("MB", 1e6)) if count >= d), ("kB", 1e3))
    return f"{count / divisor:.1f} {unit}"


def _count(things: Collection[Any]) -> str:
    """Return "1 package" or "n packages"."""
    return f"{len(things)} package{'' if len(things) == 1 else 's'}"


def _kernels(case: _Case, status: str) -> list[Verdict]:
    """No kernel comes, changes or goes with a driver: the node would boot into something nobody asked for."""
    names = [s.name for s in case.plan.steps if matches(s.name, KERNELS) and not matches(s.name, NO_KERNELS)]
    if not names:
        return []
    message = f"The transaction would change a kernel: {listing(names)}."
    return [case.verdict("kernel_change", names, message, "Update the kernel on its own first, or allow it.", status)]


def _removals(case: _Case) -> list[Verdict]:
    """Only the layer's own packages may go, and nothing that the system needs."""
    gone = [s.name for s in case.plan.steps if s.action == "remove"]
    foreign = [name for name in gone if name in case.plan.essential or not case.is_own(name)]
    if not foreign:
        return []
    message = f"The transaction would remove what is not the {case.layer}'s own: {listing(foreign)}."
    return [
        case.verdict(
            "removes_foreign", foreign, message, "Find out what conflicts, and remove it by hand or not at all."
        )
    ]


def _other_layer(case: _Case) -> list[Verdict]:
    """A toolkit brings no driver, and a driver no toolkit: each has its own pins and its own way back."""
    names = [s.name for s in case.plan.steps if not case.is_own(s.name) and owner(s.name) not in ("", case.layer)]
    names = [name for name in names if name not in case.wanted]
    if not names:
        return []
    message = f"The transaction would change packages of the {owner(names[0])}: {listing(names)}."
    return [case.verdict("other_layer", names, message, "Leave out the meta package that depends on them.")]


def _versions(case: _Case) -> list[Verdict]:
    """Each wanted package ends at its version."""
    after = {**case.plan.installed, **{step.name: step.after for step in case.plan.steps}}
    wrong = {name: after.get(name, "") for name, version in case.wanted.items() if after.get(name) != version}
    if not wrong:
        return []
    said = [f"{name} at {found or 'nothing'} instead of {case.wanted[name]}" for name, found in wrong.items()]
    message = f"The transaction would end with {listing(said)}."
    return [
        case.verdict(
            "version_differs", list(wrong), message, "Pin the exact version, and name every package of the set."
        )
    ]


def _strays(case: _Case) -> list[Verdict]:
    """What comes with the wanted packages is of their version too, or is named itself."""
    coming = [s for s in case.plan.steps if s.after and s.name not in case.wanted and case.is_own(s.name)]
    if case.layer == "toolkit":
        if not coming:
            return []
        names = [step.name for step in coming]
        said = listing([f"{step.name} {step.after}" for step in coming])
        message = f"{_count(names)} of the toolkit would come that nothing pins: {said}."
        return [case.verdict("unpinned", names, message, "Name every package with its version: meta packages drift.")]
    versions = {upstream(version) for version in case.wanted.values()}
    sources = {case.plan.records[n].source for n in case.wanted if n in case.plan.records}
    strays = [s for s in coming if upstream(s.after) not in versions and _same_driver(s, case, versions, sources)]
    hiding = [name for name, version in case.wanted.items() if _hides(name, version, case.plan, bool(strays))]
    if hiding:
        brought = [s for s in coming if s in strays] or coming
        said = listing([f"{step.name} {step.after}" for step in brought]) or "nothing yet"
        message = f"It is a transitional package for another branch: it would bring {said}."
        return [case.verdict("transitional", hiding, message, "Ask for the branch by its own package names.")]
    if not strays:
        return []
    names = [step.name for step in strays]
    said = listing([f"{step.name} {step.after}" for step in strays])
    message = f"{_count(names)} of the driver would come at another version than {', '.join(sorted(versions))}: {said}."
    return [
        case.verdict("version_differs", names, message, "Pin the exact version, and name every package of the set.")
    ]


def _same_driver(step: Step, case: _Case, versions: Iterable[str], sources: Iterable[str]) -> bool:
    """Tell whether a package must have the driver's version: by its source, or by being of another branch.

    Distributions have helpers beside the driver, with versions of their own, such as nvidia-support 20220217+3.
    """
    record = case.plan.records.get(step.name)
    if record and record.source in sources:
        return True
    branch = upstream(step.after).split(".")[0]
    return bool(re.match(r"\d{3}\.\d", upstream(step.after))) and branch not in {v.split(".")[0] for v in versions}


def _hides(name: str, version: str, plan: Plan, strays: bool) -> bool:
    """Tell whether a wanted driver package stands for another branch.

    Its name has one branch and its version another, or it says that it is transitional and brings other versions.
    """
    suffix = _BRANCH_IN_NAME.search(name)
    if suffix and re.match(r"\d{3}\.", upstream(version)) and suffix.group(1) != upstream(version).split(".")[0]:
        return True
    record = plan.records.get(name)
    return strays and record is not None and "transitional" in record.summary.lower()


def _held(case: _Case) -> list[Verdict]:
    """A hold is somebody's decision, and apt would refuse later without naming it."""
    names = [step.name for step in case.plan.steps if step.name in case.plan.held]
    if not names:
        return []
    message = f"The transaction would change packages that are on hold: {listing(names)}."
    return [case.verdict("held", names, message, f"Find out who holds them; then: apt-mark unhold {' '.join(names)}")]


def readiness(layer: str, apt: Apt = NODE, *, updates: str = UPDATES, locks: Sequence[str] = LOCKS) -> list[Verdict]:
    """Return what keeps dpkg from working: a lock that is held, an interrupted run. Raises PackageError."""
    verdicts = []
    holder = lock_holder(locks)
    if holder:
        who = f"{holder['command'] or 'a process'} ({holder['pid']})"
        message = f"{who} holds dpkg's lock."
        verdicts.append(
            Verdict("packages.locked", "fail", layer, holder["path"], message, holder, "Wait until it has ended.")
        )
    left = interrupted(apt, updates)
    if left:
        message = f"An earlier change of packages was not finished: {listing(left)}."
        action = "Run `dpkg --configure -a`, then run the playbook again."
        verdicts.append(
            Verdict("packages.dpkg_interrupted", "fail", layer, "dpkg", message, {"unfinished": left}, action)
        )
    return verdicts


# ---- afterwards ----


def assert_installed(wanted: Mapping[str, str], *, layer: str, apt: Apt = NODE) -> list[Verdict]:
    """Return whether each package is installed at its exact version: one verdict. Raises PackageError."""
    found = installed(wanted, apt)
    wrong = {name: found.get(name, "") for name, version in wanted.items() if found.get(name) != version}
    if not wrong:
        message = f"{_count(wanted)} installed at the wanted versions."
        return [Verdict("packages.ok", "pass", layer, "packages", message, {"packages": dict(wanted)})]
    said = [f"{name} is {version or 'not installed'}, not {wanted[name]}" for name, version in wrong.items()]
    evidence = {"found": wrong, "wanted": {name: wanted[name] for name in wrong}}
    message = f"{listing(said)}."
    action = "Run the playbook again; if it comes back, see who changes packages: /var/log/apt/history.log"
    return [Verdict("packages.version_differs", "fail", layer, next(iter(wrong)), message, evidence, action)]


def assert_pinned(wanted: Mapping[str, str], *, layer: str, apt: Apt = NODE) -> list[Verdict]:
    """Return whether apt's preferences keep each package at its version: one verdict.

    Pinned means: the version is apt's candidate, and its priority is 1000 or more. A preferences file that apt
    ignores, for the extension of its name, shows here. Raises PackageError.
    """
    if is_rpm():
        message, action = "Whether versions are locked cannot be read here yet.", "See `dnf versionlock list`."
        raise PackageError("packages.query_failed", "dnf", message, action)
    policies = parse_policy(apt.ask("apt-cache", "policy", *sorted(wanted)))
    wrong = {}
    for name, version in wanted.items():
        policy = policies.get(name, Policy("", "", {}))
        priority = policy.priorities.get(version, 0)
        if policy.candidate != version or priority < PIN_PRIORITY:
            wrong[name] = {"wanted": version, "candidate": policy.candidate, "priority": priority}
    if not wrong:
        message = f"{_count(wanted)} pinned: apt keeps them where they are."
        return [Verdict("packages.ok", "pass", layer, "pins", message)]
    said = [f"{n} (apt would choose {w['candidate'] or 'none'}, priority {w['priority']})" for n, w in wrong.items()]
    message = f"apt's preferences do not keep {listing(said)}."
    action = "See `apt-cache policy` and /etc/apt/preferences.d: names there end in .pref or have no extension."
    return [Verdict("packages.not_pinned", "fail", layer, next(iter(wrong)), message, {"packages": wrong}, action)]


# ---- the module ----


def perform(options: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Do what the module bedplate_packages was asked for (its DOCUMENTATION describes options and result).

    Returns the result, and whether a verdict stands in the way. Raises PackageError when apt or dpkg cannot be asked.
    """
    with contextlib.ExitStack() as stack:
        apt = Apt(timeout_s=options["timeout"])
        if options["preview"]:
            try:
                apt = stack.enter_context(preview(options["preview"], options["timeout"]))
            except PackageError as error:
                return _nothing_known(error.verdict(options["layer"])), True
        return _perform(options, apt)


def _nothing_known(verdict: Verdict) -> dict[str, Any]:
    """Return the result where the repository that was to be looked at cannot be used."""
    plan = Plan(())
    result: dict[str, Any] = {"changed": False, "packages": {}, "installed": {}, "plan": plan.to_dict()}
    return {**result, "diff": diff(plan), "verdicts": [verdict.to_dict()], "msg": sentence(verdict)}


def _perform(options: Mapping[str, Any], apt: Apt) -> tuple[dict[str, Any], bool]:
    """Do what ``perform`` does, with this apt."""
    layer = options["layer"]
    named = {name: str(version or "") for name, version in options["packages"].items()}
    there = installed(named, apt)
    if options["action"] == "installed":
        return {"changed": False, "installed": there}, False
    wanted, errors = named, list[PackageError]()
    if options["action"] != "assert":
        wanted, errors = resolve_all(named, there, site=options["site"], apt=apt)
    verdicts = [error.verdict(layer) for error in errors]
    result: dict[str, Any] = {"changed": False, "packages": wanted, "installed": there}
    if options["action"] == "assert":
        verdicts += assert_installed(wanted, layer=layer, apt=apt)
        if options["pinned"]:
            verdicts += assert_pinned(wanted, layer=layer, apt=apt)
    if options["action"] == "simulate":
        verdicts += [] if is_rpm() else readiness(layer, apt)
        plan = Plan(())
        if not errors:
            try:
                plan = simulate(wanted, allow_downgrade=options["allow_downgrade"], apt=apt)
            except PackageError as error:
                verdicts.append(error.verdict(layer))
            else:
                allowed = {key: options[key] for key in ("allow_downgrade", "allow_kernel_change")}
                verdicts += judge(plan, wanted, layer=layer, own=options["own"], **allowed)
        result.update(plan=plan.to_dict(), changed=bool(plan.steps), diff=diff(plan))
    refused = failing(verdicts)
    result["verdicts"] = [verdict.to_dict() for verdict in verdicts]
    last = verdicts[-1].message if verdicts else f"{_count(wanted)} resolved."
    result["msg"] = sentence(refused[0]) if refused else last
    return result, bool(refused)


def diff(plan: Plan) -> dict[str, str]:
    """Return the packages and versions before and after, for Ansible's --diff."""
    return {
        "before": "".join(f"{step.name} {step.before}\n" for step in plan.steps if step.before),
        "after": "".join(f"{step.name} {step.after}\n" for step in plan.steps if step.after),
    }
