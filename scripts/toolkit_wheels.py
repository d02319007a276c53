#!/usr/bin/env python3
"""Locks of the CUDA toolkit that role cuda_toolkit builds from wheels, and the wheels themselves.

  scripts/toolkit_wheels.py lock 13.0.1 12.8.1     writes roles/cuda_toolkit/files/toolkit-<version>-x86_64.lock
  scripts/toolkit_wheels.py fetch 13.0.1 --to DIRECTORY --components nvcc cudart

A lock holds every wheel of NVIDIA's cuda-toolkit[all] of that release for Linux on x86_64, with exactly one sha256 for
each. Versions come in here and nowhere else; the release must be in src/bedplate/node/toolkit/releases.py.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import requests

from bedplate.controller.download import Download
from bedplate.controller.errors import BedplateError
from bedplate.controller.fetch import default_directory, find_url
from bedplate.controller.package_index import default_index
from bedplate.controller.resolver import Sources, Upgrade, resolve
from bedplate.controller.schema import LockedFile, Stack
from bedplate.controller.wheels import choose, target_tags
from bedplate.node.toolkit.releases import COMPONENTS
from bedplate.node.toolkit.wheels import Wheel, components_of, parse, render, select

FILES = Path(__file__).resolve().parents[1] / "roles" / "cuda_toolkit" / "files"
# The wheels hold no Python code, so any interpreter's target gives the same ones.
TARGET, GLIBC = "cp311-x86_64", "2.28"


def lock_path(version: str) -> Path:
    """Return where the lock of a release is."""
    return FILES / f"toolkit-{version}-x86_64.lock"


def lock(version: str) -> None:
    """Resolve a release and write its lock."""
    stack = Stack.model_validate(
        {"targets": [TARGET], "glibc": GLIBC, "requirements": [f"cuda-toolkit[all]=={version}"]}
    )
    wheels = []
    for package in resolve(stack, TARGET, Sources(), Upgrade(everything=True), {}):
        if not components_of(package.name):
            continue
        wheel = choose(package.wheels, target_tags(TARGET, GLIBC), None)
        if wheel.sha256 is None or wheel.size is None:
            raise BedplateError(f"{wheel.url}: its index gives no sha256 or no size; use another index")
        wheels.append(Wheel(wheel.file, wheel.size, package.name, package.version, wheel.sha256))
        for component in components_of(package.name):
            expected = COMPONENTS[version].get(component)
            if expected != package.version:
                raise BedplateError(f"{package.name} is {package.version}; toolkit_releases.py says {expected}")
    lock_path(version).write_text(
        render(wheels, f"Written by `scripts/toolkit_wheels.py lock {version}`. Do not edit."), encoding="utf-8"
    )


def fetch(version: str, components: Sequence[str], directory: Path) -> None:
    """Download the wheels of some components (all when empty) that the directory lacks."""
    directory.mkdir(parents=True, exist_ok=True)
    chosen = parse(select(lock_path(version).read_text(encoding="utf-8"), version, components)["lock"])
    with requests.Session() as session:
        for wheel in chosen:
            path = directory / wheel.file
            if path.exists() and path.stat().st_size == wheel.size:
                continue  # its hash is checked when it is installed
            print(f"{wheel.file}  {wheel.size / 1e6:.0f} MB", flush=True)
            url = find_url(
                LockedFile(
                    name=wheel.name, version=wheel.version, file=wheel.file, size=wheel.size, sha256=wheel.sha256
                ),
                default_index(),
                session,
            )
            Download(url, path, wheel.sha256, wheel.size).run(session, lambda _: None, threading.Event())


def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("lock", help="resolve releases and write their locks")
    make.add_argument("versions", nargs="+", choices=sorted(COMPONENTS), metavar="VERSION")
    get = commands.add_parser("fetch", help="download the locked wheels of a release")
    get.add_argument("version", choices=sorted(COMPONENTS), metavar="VERSION")
    get.add_argument("--to", type=Path, default=default_directory(), metavar="DIRECTORY")
    get.add_argument("--components", nargs="*", default=[], metavar="NAME")
    arguments = parser.parse_args()
    try:
        if arguments.command == "lock":
            for version in arguments.versions:
                lock(version)
        else:
            fetch(arguments.version, arguments.components, arguments.to)
    except (BedplateError, ValueError) as error:
        sys.exit(f"toolkit_wheels.py: {error}")


if __name__ == "__main__":
    main()
