"""`bedplate lock`: from the pins of a profile to one hashed file per package and target.

uv resolves, for the Python and the glibc of each target, and lists every wheel of the versions it chose; of these
`wheels.choose` keeps the one that an installer takes. What was locked before is preferred, so a new lock moves only
what has to move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from bedplate.node.addresses import without_user
from bedplate.node.verdicts import failing, sentence, worst

from .abi_check import check_lock
from .abi_engine import Engine
from .abi_index import index_files, load_index
from .errors import BedplateError
from .files import replace_file, sha256_of
from .profiles import LOCK_FILE, Profile
from .resolver import Resolved, Sources, Upgrade, resolve, uv_version
from .schema import AbiStatus, LockData, LockedFile, TargetLock, split_pin
from .wheels import choose, target_tags

UNCHECKED = {"status": "unchecked", "reason": "no ABI check of these files is recorded"}


@dataclass(frozen=True)
class NewLock:
    """A lock that is not written yet.

    files: {path: text} of everything a complete write puts on disk.
    removed: lock files of targets that the profile no longer has.
    changes: {target: lines such as `torch 2.9.0 -> 2.9.1`} for the targets that were resolved.
    data: the content of lock.yml.
    """

    files: Mapping[Path, str]
    removed: Sequence[Path]
    changes: Mapping[str, Sequence[str]]
    data: LockData

    def differing(self) -> list[Path]:
        """Return the files that `write` would create, change or remove."""
        changed = [path for path, text in self.files.items() if not path.exists() or path.read_bytes() != text.encode()]
        return changed + list(self.removed)

    def write(self) -> None:
        """Write each file by rename, lock.yml last: a write that is cut short leaves a lock known as damaged."""
        for path, text in self.files.items():
            _write(path, text)
        for path in self.removed:
            path.unlink(missing_ok=True)


def make_lock(profile: Profile, targets: Sequence[str], sources: Sources, upgrade: Upgrade) -> NewLock:
    """Resolve *targets* (all of the profile when empty) and return the new lock; nothing is written.

    BedplateError: a target that the profile does not have, targets left out that would be stale, an index out of
    reach, a package without wheels, a hash that is not allowed.
    """
    stack = profile.data.stack
    for target in targets:
        if target not in stack.targets:
            raise BedplateError(profile.target_problem(target) or target)
    chosen = targets or stack.targets
    old = _old_lock(profile)
    left_out = [target for target in stack.targets if target not in chosen and old and target in old.targets]
    if left_out and old and old.inputs_sha256 != profile.inputs_sha256:
        raise BedplateError(
            f"{', '.join(left_out)} was locked before the profile changed and would not match it: lock all "
            f"targets, {profile.lock_command()}"
        )
    locks = {target: old.targets[target] for target in left_out if old}
    files: dict[Path, str] = {}
    changes: dict[str, list[str]] = {}
    for target in chosen:
        before = old.targets[target].files if old and target in old.targets else []
        previous = {file.name: file.version for file in before}
        try:
            resolved = resolve(stack, target, sources, upgrade, previous)
            after = [_choose_file(profile, target, package) for package in resolved]
        except BedplateError as error:
            raise BedplateError(
                f"profile {profile.name}, {target}: {error}.\nNothing was changed; try again with "
                f"{profile.lock_command()}"
            ) from error
        _check_constraints_met(profile, target, after)
        text = requirements_text(profile.name, target, after)
        files[profile.lock_path(target)] = text
        locks[target] = TargetLock(sha256=hashlib.sha256(text.encode()).hexdigest(), files=after)
        changes[target] = differences(previous, {file.name: file.version for file in after})
    data = _lock_data(profile, old, {target: locks[target] for target in stack.targets if target in locks})
    files[profile.path / LOCK_FILE] = _lock_text(profile.name, data)
    gone = [profile.lock_path(target) for target in (old.targets if old else ()) if target not in stack.targets]
    return NewLock(files, [path for path in gone if path.exists()], changes, data)


def requirements_text(name: str, target: str, files: Sequence[LockedFile]) -> str:
    """Return the requirements file of a target: pip's format, one hash per package, no URL, by name."""
    lines = [f"# Written by `bedplate lock {name}` for {target}. Do not edit."]
    for file in sorted(files, key=lambda file: file.name):
        lines += [f"{file.name}=={file.version} \\", f"    --hash=sha256:{file.sha256}"]
    return "\n".join(lines) + "\n"


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return what changed between two {name: version}, one line per package, by name."""
    lines = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old is None:
            lines.append(f"+ {name} {new}")
        elif new is None:
            lines.append(f"- {name} {old}")
        elif old != new:
            lines.append(f"~ {name} {old} -> {new}")
    return lines


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text)
    except OSError as error:
        raise BedplateError(f"cannot write {path}: {error.strerror or error}; it is as it was") from error


def record_abi(profile: Profile, find_links: Sequence[Path] = (), index_url: str | None = "") -> AbiStatus:
    """Hold the locked wheels against each other, and write the outcome into lock.yml.

    Args:
        profile: a profile whose lock was just written.
        find_links: directories with wheels; others are read by HTTP range from their index, about a megabyte each.
        index_url: the index that the lock was made with; empty means the default one, None none at all.

    Returns:
        status `pass`, `fail` or `inconclusive`, and the reason in plain words: for `fail` the sentences of the failing
        verdicts of `abi_check.check_lock`.
    """
    lock = profile.lock
    if lock is None:
        raise BedplateError(f"profile {profile.name} is not locked: run {profile.lock_command()}")
    basis = abi_basis(profile)
    known = lock.abi if lock.abi.basis_sha256 == basis else None
    if known and known.status == "pass":
        return known
    engine = Engine(load_index())  # one for all targets, which ask for the same symbols
    verdicts = [
        verdict
        for target in lock.targets
        for verdict in check_lock(profile, target, find_links=find_links, index_url=index_url, engine=engine)
    ]
    bad = failing(verdicts)
    reasons = dict.fromkeys(sentence(verdict) for verdict in (bad or verdicts))  # targets share most wheels
    status = worst(bad) if bad else "pass"
    abi = AbiStatus(
        status="fail" if status == "fail" else "inconclusive" if bad else "pass",
        reason=without_user("\n".join(reasons)),
        basis_sha256=basis,
    )
    if known and known.status == "fail" and abi.status == "inconclusive":
        return known  # files that cannot be read now are no reason to deploy what is known not to fit
    _write(profile.path / LOCK_FILE, _lock_text(profile.name, lock.model_copy(update={"abi": abi})))
    return abi


def abi_basis(profile: Profile) -> str:
    """Return the sha256 over what an ABI verdict depends on beside the locked files.

    That is: the inputs of the lock (of which glibc counts here), the architecture of the GPUs, and the index of torch
    releases.
    """
    parts = [profile.inputs_sha256, profile.data.expect.arch or "", *(sha256_of(path) for path in index_files())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _old_lock(profile: Profile) -> LockData | None:
    try:
        return profile.lock
    except BedplateError:  # damaged: a new one is what mends it, without preferences
        return None


def _choose_file(profile: Profile, target: str, package: Resolved) -> LockedFile:
    stack = profile.data.stack
    allowed = {split_pin(pin): by_target.get(target) for pin, by_target in stack.hashes.items()}
    pin = (package.name, str(Version(package.version)))
    try:
        wheel = choose(package.wheels, target_tags(target, stack.glibc), allowed.get(pin))
    except BedplateError as error:
        raise BedplateError(f"{package.name}=={package.version}: {error}") from error
    if wheel.sha256 is None:
        raise BedplateError(f"{wheel.url}: its index gives no sha256. Download the file and offer it with --find-links")
    return LockedFile(name=package.name, version=package.version, file=wheel.file, size=wheel.size, sha256=wheel.sha256)


def _check_constraints_met(profile: Profile, target: str, files: Sequence[LockedFile]) -> None:
    """Refuse a hash constraint that nothing was held against: it names another version, or no package."""
    versions = {file.name: str(Version(file.version)) for file in files}
    for pin, by_target in profile.data.stack.hashes.items():
        name, version = split_pin(pin)
        if target in by_target and versions.get(name) != version:
            found = f"{name}=={versions[name]}" if name in versions else f"no {name}"
            raise BedplateError(
                f"profile {profile.name}: `stack.hashes` constrains {pin}, but the set for {target} has {found}"
            )


def _lock_data(profile: Profile, old: LockData | None, locks: Mapping[str, TargetLock]) -> LockData:
    # Which uv made this content stays true as long as the content stays; a verdict on it also needs its basis.
    kept = old if old and dict(old.targets) == locks else None
    judged = kept and kept.abi.basis_sha256 == abi_basis(profile)
    return LockData.model_validate(
        {
            "schema": 1,
            "inputs_sha256": profile.inputs_sha256,
            "tools": kept.tools if kept else {"uv": uv_version()},
            "targets": {target: lock.model_dump() for target, lock in locks.items()},
            "abi": kept.abi.model_dump() if kept and judged else UNCHECKED,
        }
    )


def _lock_text(name: str, data: LockData) -> str:
    # The default flow style None puts each file on a line of its own, so that a diff reads well.
    document: dict[str, Any] = data.model_dump(mode="json", by_alias=True)
    document["abi"] = data.abi.model_dump(exclude_none=True)
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=4096)
    return f"# yamllint disable-file\n# Written by `bedplate lock {name}`. Do not edit.\n---\n{text}"
