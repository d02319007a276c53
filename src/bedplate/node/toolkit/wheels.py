"""Which wheels make a CUDA toolkit: the locks of role cuda_toolkit, and the part of one that a profile asks for.

A lock is a requirements file in pip's format with exactly one sha256 for each wheel and no addresses; a comment before
each entry holds the file's name and size. ``scripts/toolkit_wheels.py`` writes them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .releases import COMPONENTS, closure

# Counts up when a tree from the same wheels comes out otherwise, so that nodes build it again.
LAYOUT = 1

_ENTRY = re.compile(
    r"# (?P<file>\S+\.whl) (?P<size>\d+)\n(?P<name>[a-z0-9-]+)==(?P<version>\S+) \\\n"
    r"    --hash=sha256:(?P<sha256>[0-9a-f]{64})\n"
)
_NAME = re.compile(r"nvidia-(?P<name>.+?)(?:-cu\d+)?")

# Wheels that are called otherwise than their component.
_OTHER_NAMES = {
    "cuda-profiler-api": "profiler",
    "cuda-runtime": "cudart",
    "cuda-sanitizer-api": "sanitizer",
    "nvml-dev": "nvml",
}


class Wheel(NamedTuple):
    """One entry of a lock; size in bytes."""

    file: str
    size: int
    name: str
    version: str
    sha256: str


def parse(lock: str) -> list[Wheel]:
    """Return the entries of a lock. Raises ValueError, with the line, for what is none."""
    wheels = []
    position = 0
    while position < len(lock):
        matched = _ENTRY.match(lock, position)
        if matched:
            wheels.append(
                Wheel(matched["file"], int(matched["size"]), matched["name"], matched["version"], matched["sha256"])
            )
            position = matched.end()
            continue
        line, _, _ = lock[position:].partition("\n")
        if wheels or (line and not line.startswith("# ")):
            raise ValueError(f"{line!r} is no entry of a toolkit's lock")
        position += len(line) + 1
    return wheels


def render(wheels: Sequence[Wheel], heading: str = "") -> str:
    """Return the text of a lock, by name; heading: a comment for its first line."""
    lines = [f"# {heading}"] if heading else []
    for wheel in sorted(wheels, key=lambda entry: entry.name):
        lines += [
            f"# {wheel.file} {wheel.size}",
            f"{wheel.name}=={wheel.version} \\",
            f"    --hash=sha256:{wheel.sha256}",
        ]
    return "\n".join(lines) + "\n"


def components_of(wheel: str) -> tuple[str, ...]:
    """Return the components that a wheel brings, by the name of its package; none for one that only lists others."""
    name = wheel.replace("_", "-")
    matched = _NAME.fullmatch(name)
    if not matched:
        return ()
    short = matched["name"]
    component = _OTHER_NAMES.get(short, short[5:] if short.startswith("cuda-") else short)
    # What PyPI calls nvcc for CUDA 12 is ptxas, libnvvm and the compiler's headers, and no nvcc.
    return ("crt", "nvvm") if component == "nvcc" and name.endswith("-cu12") else (component,)


def select(lock: str, version: str, components: Sequence[str]) -> dict[str, Any]:
    """Return the part of a lock that brings some components; none asks for all.

    Keys: id (of the toolkit that it makes: version and 12 digits), lock (text), files (names), bytes (sum).
    Raises ValueError: a component that the release or its wheels do not have, a lock that is none.
    """
    wheels = parse(lock)
    has = {component for wheel in wheels for component in components_of(wheel.name)}
    unknown = sorted(set(components) - set(COMPONENTS.get(version, {})) - has)
    if unknown:
        raise ValueError(
            f"CUDA {version} has no component {unknown[0]}; it has {', '.join(sorted(COMPONENTS.get(version, has)))}"
        )
    absent = sorted(set(components) - has)
    if absent:
        raise ValueError(
            f"the wheels of CUDA {version} bring no {absent[0]}: leave it out of the profile's toolkit.components, "
            "or use cuda_toolkit_source=nvidia"
        )
    wanted = set(closure(components)) if components else has
    chosen = [wheel for wheel in wheels if wanted & set(components_of(wheel.name))]
    text = render(chosen)
    digest = hashlib.sha256(f"{LAYOUT}\n{version}\n{text}".encode()).hexdigest()
    return {
        "id": f"{version}-{digest[:12]}",
        "lock": text,
        "files": [wheel.file for wheel in chosen],
        "bytes": sum(wheel.size for wheel in chosen),
    }
