"""Profiles: where they are found, what they hold, whether their lock may be deployed.

A profile is a directory `<name>/` with `profile.yml` (written by people), `<target>.lock` (one per target)
and `lock.yml` (both written by `bedplate lock`). docs/profiles.md describes the formats, `schema` enforces
them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import BedplateError, near
from .schema import LockData, ProfileData, TargetLock, parse
from .yamlfile import YamlFile, read_bytes

PROFILE_FILE = "profile.yml"
LOCK_FILE = "lock.yml"
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
PROFILES_VARIABLE = "BEDPLATE_PROFILES"


def check_name(name: str) -> str:
    """Return *name*, or raise BedplateError when it could not be a profile's directory name."""
    if not NAME_PATTERN.fullmatch(name):
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        raise BedplateError(
            f"{shown!r} is not a profile name: 1 to 64 characters of a-z 0-9 . _ - "
            "that begin with a letter or a digit" + (f" (it has {len(name)})" if len(name) > 64 else "")
        )
    return name


def default_directories() -> list[Path]:
    """Return where profiles are looked for: $BEDPLATE_PROFILES, else profiles/ of the checkout and here."""
    variable = os.environ.get(PROFILES_VARIABLE, "")
    if variable:
        return [Path(part) for part in variable.split(os.pathsep) if part]
    checkout = Path(__file__).resolve().parents[3] / "profiles"
    here = Path("profiles")
    return [checkout, here] if checkout.is_dir() and here.resolve() != checkout else [here]


def search_path(directories: Sequence[str | Path] | None = None) -> list[Path]:
    """Return the directories to search: *directories* when given, else `default_directories()`."""
    return [Path(directory) for directory in directories] if directories else default_directories()


def find_profiles(directories: Sequence[str | Path] | None = None) -> dict[str, Path]:
    """Return {name: directory} of all directories with a profile.yml; of two with one name the first wins."""
    found: dict[str, Path] = {}
    for directory in search_path(directories):
        if directory.is_dir():
            for file in directory.glob(f"*/{PROFILE_FILE}"):
                found.setdefault(file.parent.name, file.parent)
    return dict(sorted(found.items()))


def load_profile(name: str, directories: Sequence[str | Path] | None = None) -> Profile:
    """Return the profile *name*; BedplateError for a bad name, an unknown name, a bad file."""
    check_name(name)
    found = find_profiles(directories)
    if name not in found:
        places = ", ".join(str(directory) for directory in search_path(directories))
        known = f" Known: {', '.join(found)}." if found else ""
        hint = near(name, found) or "."
        raise BedplateError(f"no profile `{name}` in {places}{hint}{known}")
    path = found[name]
    raw = read_bytes(path / PROFILE_FILE)
    return Profile(name, path, raw, parse(ProfileData, YamlFile(path / PROFILE_FILE, raw)))


@dataclass(frozen=True)
class Profile:
    """A profile on disk: its name, its directory, and profile.yml as bytes (`raw`) and as values (`data`)."""

    name: str
    path: Path
    raw: bytes
    data: ProfileData

    @cached_property
    def lock(self) -> LockData | None:
        """lock.yml, or None where there is none; BedplateError when it cannot be understood."""
        file = self.path / LOCK_FILE
        if not file.exists():
            return None
        try:
            return parse(LockData, YamlFile(file, read_bytes(file)))
        except BedplateError as error:
            raise BedplateError(f"{error}\nWrite it anew: {self.lock_command()}") from error

    @property
    def id(self) -> str:
        """`<name>-<12 hex>`: the first 12 hexadecimal digits of a sha256 over profile.yml and its locks.

        The digest runs over, for `profile.yml` and then for `<target>.lock` of every locked target by name,
        the bytes `<file name>\\n<length in bytes>\\n<content>`. lock.yml is left out: all that decides what
        a node gets is in those files, and an ABI verdict added later must not make a fleet rebuild.
        """
        digest = hashlib.sha256()
        contents = {PROFILE_FILE: self.raw}
        for target in sorted(self.lock.targets if self.lock else ()):
            contents[f"{target}.lock"] = read_bytes(self.lock_path(target))
        for file, content in contents.items():
            digest.update(f"{file}\n{len(content)}\n".encode() + content)
        return f"{self.name}-{digest.hexdigest()[:12]}"

    @property
    def inputs_sha256(self) -> str:
        """sha256 over what a lock depends on: targets, glibc, requirements, indexes, hashes.

        They are written as canonical JSON: keys sorted, no spaces, UTF-8; lists whose order means nothing
        are sorted.
        """
        stack = self.data.stack.model_dump(mode="json", exclude={"system_packages"})
        stack["targets"].sort()
        stack["requirements"].sort()
        for by_target in stack["hashes"].values():
            for allowed in by_target.values():
                allowed.sort()
        text = json.dumps(stack, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def lock_path(self, target: str) -> Path:
        """Return the path of the requirements file of *target*."""
        return self.path / f"{target}.lock"

    def lock_command(self) -> str:
        """Return the command that locks this profile, ready to paste."""
        known = {directory.resolve() for directory in default_directories()}
        place = "" if self.path.parent.resolve() in known else f" --profiles {shlex.quote(str(self.path.parent))}"
        return f"`bedplate lock {self.name}{place}`"

    def lock_problem(self) -> str | None:
        """Return why the lock as a whole may not be deployed, or None when it may."""
        if self.lock is None:
            return f"profile {self.name} is not locked: run {self.lock_command()}"
        if self.lock.inputs_sha256 != self.inputs_sha256:
            return (
                f"{self.path / LOCK_FILE} does not match {self.path / PROFILE_FILE}: "
                f"the profile changed after it was locked. Run {self.lock_command()}"
            )
        for target in self.data.stack.targets:
            if problem := self.target_problem(target):
                return problem
        return None

    def target_problem(self, target: str) -> str | None:
        """Return why the lock of *target* may not be deployed, or None when it may."""
        if target not in self.data.stack.targets:
            return (
                f"profile {self.name} has no target `{target}`{near(target, self.data.stack.targets) or '.'} "
                f"Its targets: {', '.join(self.data.stack.targets)}"
            )
        if self.lock is None or self.lock.inputs_sha256 != self.inputs_sha256:
            return self.lock_problem()
        locked, file = self.lock.targets.get(target), self.lock_path(target)
        if locked is None:
            return f"profile {self.name} is not locked for {target}: run {self.lock_command()}"
        if not file.exists():
            return f"{file} is missing: run {self.lock_command()}"
        if hashlib.sha256(read_bytes(file)).hexdigest() != locked.sha256:
            return (
                f"{file} is not the file that was locked (its sha256 differs from {self.path / LOCK_FILE}): "
                f"restore it, or run {self.lock_command()}"
            )
        return None

    def target_lock(self, target: str) -> TargetLock:
        """Return the lock of *target*; BedplateError says why it may not be used and what to run."""
        problem = self.target_problem(target)
        if problem:
            raise BedplateError(problem)
        assert self.lock is not None  # noqa: S101  # target_problem has just said so
        return self.lock.targets[target]


def for_deploy(
    name: str, target: str, directories: Sequence[str | Path] | None = None, *, allow_refused: bool = False
) -> dict[str, Any]:
    """Return all that a playbook needs to put profile *name* on a node of *target*, such as `cp311-x86_64`.

    An empty *target* means the first of the profile.

    Keys: name, id, description, refused (text or None), target, python ("3.11"), lock_file (path here),
    lock_text, packages (count), bytes (sum of the known wheel sizes), stack, verify, expect, driver,
    toolkit (None where the profile has no such block), system_packages {apt, dnf}. Raises BedplateError for
    a name or file that is wrong, a profile marked refused or whose locked files do not fit together (both unless
    *allow_refused*), and a lock that is missing, stale, damaged or not for *target*.
    """
    profile = load_profile(name, directories)
    data = profile.data
    if data.refused and not allow_refused:
        raise BedplateError(
            f"profile {name} is refused: {data.refused.strip()} "
            "To deploy it all the same, allow refused profiles (bedplate_allow_refused: true)."
        )
    target = target or data.stack.targets[0]
    locked = profile.target_lock(target)
    lock = profile.lock
    if lock and lock.abi.status == "fail" and not allow_refused:
        raise BedplateError(
            f"profile {name} is refused, its files do not fit together: {lock.abi.reason}\n"
            "To deploy it all the same, allow refused profiles (bedplate_allow_refused: true)."
        )
    plain = data.model_dump(mode="json", by_alias=True)
    return {
        "name": profile.name,
        "id": profile.id,
        "description": data.description,
        "refused": data.refused,
        "target": target,
        "python": python_of(target),
        "lock_file": str(profile.lock_path(target).resolve()),
        "lock_text": read_bytes(profile.lock_path(target)).decode(),
        "packages": len(locked.files),
        "bytes": sum(file.size or 0 for file in locked.files),
        "stack": plain["stack"],
        "verify": plain["verify"],
        "expect": plain["expect"],
        "driver": plain["driver"],
        "toolkit": plain["toolkit"],
        "system_packages": plain["stack"]["system_packages"],
    }


def python_of(target: str) -> str:
    """Return the Python version of a target: `3.11` of `cp311-x86_64`."""
    digits = target.split("-", 1)[0].removeprefix("cp")
    return f"{digits[0]}.{digits[1:]}"
