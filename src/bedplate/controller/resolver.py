"""Asks uv which versions fit together, and which wheels each of them has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import tomllib
import uv
from packaging.utils import canonicalize_name

from .errors import BedplateError
from .files import sha256_of
from .profiles import python_of
from .schema import Stack
from .wheels import Candidate

# The name of the made-up project that uv resolves; it shows up in uv's explanations.
PROJECT = "this-profile"


@dataclass(frozen=True)
class Sources:
    """Where packages are looked for beside the profile's own indexes; uv's own settings apply where empty."""

    index_url: str | None = None
    find_links: Sequence[str] = ()
    no_index: bool = False


@dataclass(frozen=True)
class Upgrade:
    """What may move away from the previous lock: everything, or the packages named."""

    everything: bool = False
    packages: Sequence[str] = ()


@dataclass(frozen=True)
class Resolved:
    """A package at the version that uv chose, with all its wheels."""

    name: str
    version: str
    wheels: Sequence[Candidate]


def uv_version() -> str:
    """Return the version of the uv in this environment."""
    return metadata.version("uv")


def resolve(
    stack: Stack, target: str, sources: Sources, upgrade: Upgrade, previous: Mapping[str, str]
) -> list[Resolved]:
    """Return the closure of the requirements of *stack* for *target*, by name.

    *previous* ({name: version}) is preferred where it still fits. BedplateError says in plain words what uv found:
    an index out of reach, a package without wheels, versions that exclude each other.
    """
    with tempfile.TemporaryDirectory(prefix="bedplate-lock-") as directory:
        work = Path(directory)
        # Outside any project, so that no pyproject.toml of the caller's directory is mixed in.
        (work / "pyproject.toml").write_text(_project(stack, sources), encoding="utf-8")
        output = work / "pylock.toml"
        if previous:
            output.write_text(_preferences(previous), encoding="utf-8")
        command = [
            *(uv.find_uv_bin(), "pip", "compile", "pyproject.toml", "--quiet", "--color", "never"),
            *("--format", "pylock.toml", "--output-file", output.name),
            *("--only-binary", ":all:", "--index-strategy", "first-index"),
            # Any interpreter will do, since all of its properties are given; without one uv searches for the
            # target's, which is seldom here and takes seconds.
            *("--python", sys.executable, "--no-python-downloads"),
            *("--python-version", python_of(target), "--python-platform", uv_platform(target, stack.glibc)),
            *_options(sources, upgrade),
        ]
        try:
            done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        except OSError as error:
            raise BedplateError(f"cannot run uv ({command[0]}): {error.strerror}") from error
        if done.returncode != 0:
            raise BedplateError(explain(done.stderr, target, stack.glibc))
        document = tomllib.loads(output.read_text(encoding="utf-8"))
    return [_resolved(package) for package in document.get("packages", [])]


def uv_platform(target: str, glibc: str) -> str:
    """Return uv's name of a platform: `x86_64-manylinux_2_34`."""
    return f"{target.split('-', 1)[1]}-manylinux_{glibc.replace('.', '_')}"


def explain(stderr: str, target: str, glibc: str) -> str:
    """Return uv's error as a sentence or two for a person."""
    unreachable = re.search(r"Failed to fetch: `?(\S+?)`?$", stderr, re.MULTILINE)
    causes = re.findall(r"^\s*(?:error|cause|hint|Caused by):\s*(.+)$", stderr, re.MULTILINE)
    if unreachable:
        return f"cannot read {unreachable[1]} ({causes[-1]})"
    no_wheels = re.search(r"(?<=Because )(?:only )?(\S+?)(?: is available and \S+)? has no usable wheels", stderr)
    if no_wheels:
        return (
            f"{no_wheels[1]} has no wheels, only source. Bedplate installs wheels only, since what a node builds "
            "is not what was verified: build a wheel and offer it with --find-links or an index"
        )
    if "No solution found" in stderr:
        text = re.sub(r"\s*\n\s*(?:cause: |hint: )?", " ", stderr.strip()).partition(" Because ")[2]
        return f"no set of wheels fits {target} with glibc {glibc}: because {text.rstrip('.')}"
    return f"uv failed: {stderr.strip()}"


def _options(sources: Sources, upgrade: Upgrade) -> list[str]:
    options = ["--no-index"] if sources.no_index else []
    if sources.index_url:
        options += ["--default-index", sources.index_url]
    for place in sources.find_links:
        # uv runs in another directory, so a path has to be absolute
        options += ["--find-links", place if "://" in place else str(Path(place).absolute())]
    if upgrade.everything:
        options.append("--upgrade")
    for package in upgrade.packages:
        options += ["--upgrade-package", package]
    return options


def _project(stack: Stack, sources: Sources) -> str:
    """Return a pyproject.toml with the pins, and the indexes bound to their packages.

    `explicit = true`: uv asks such an index for these packages only, so a foreign index cannot slip in others.
    With --no-index the indexes are left out; everything then comes from --find-links.
    """
    lines = [
        *("[project]", f"name = {_toml(PROJECT)}", 'version = "0"'),
        f"dependencies = {_toml(list(stack.requirements))}",
    ]
    indexes = [] if sources.no_index else stack.indexes
    if indexes:
        lines.append("[tool.uv.sources]")
    for index in indexes:
        lines += [f"{_toml(name)} = {{ index = {_toml(index.name)} }}" for name in index.packages]
    for index in indexes:
        lines += ["[[tool.uv.index]]", f"name = {_toml(index.name)}", f"url = {_toml(index.url)}", "explicit = true"]
    return "\n".join(lines) + "\n"


def _preferences(previous: Mapping[str, str]) -> str:
    """Return a pylock.toml of names and versions, which uv reads from the output file as preferences."""
    lines = ['lock-version = "1.0"', 'created-by = "bedplate"']
    for name, version in sorted(previous.items()):
        lines += ["[[packages]]", f"name = {_toml(name)}", f"version = {_toml(version)}"]
    return "\n".join(lines) + "\n"


def _toml(value: str | list[str]) -> str:
    # a JSON string, or a list of them, is TOML as well
    return json.dumps(value, ensure_ascii=False)


def _resolved(package: Mapping[str, Any]) -> Resolved:
    wheels = [_candidate(wheel) for wheel in package.get("wheels", [])]
    return Resolved(canonicalize_name(package["name"]), str(package["version"]), wheels)


def _candidate(wheel: Mapping[str, Any]) -> Candidate:
    url = str(wheel.get("url") or wheel.get("path"))
    parts = urlsplit(url)
    file = wheel.get("name") or unquote(parts.path).rsplit("/", 1)[-1]
    sha256, size = wheel.get("hashes", {}).get("sha256"), wheel.get("size")
    if parts.scheme in ("", "file"):
        path = Path(unquote(parts.path))
        size = path.stat().st_size
        sha256 = sha256 or sha256_of(path)
    return Candidate(file, url, sha256, size)
