"""Wheels of a few hundred bytes and profiles that pin them, made on the spot."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def make_wheel(
    directory: Path, name: str, version: str, tag: str = "py3-none-any", *, build: str = "", requires: str = ""
) -> Path:
    """Write an installable wheel whose only module holds the wheel's file name."""
    stem = name.replace("-", "_")
    path = directory / f"{stem}-{version}-{f'{build}-' if build else ''}{tag}.whl"
    info = f"{stem}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{stem}.py": f"FILE = {path.name!r}\n",
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {one}\n" for one in requires.split(", ") if one),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        + "".join(f"Tag: {one}\n" for one in single_tags(tag)),
    }
    record = [
        f"{file},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},"
        for file, text in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0)), text)
    return path


def single_tags(tag: str) -> Iterator[str]:
    python, abi, platforms = tag.split("-")
    for platform in platforms.split("."):
        yield f"{python}-{abi}-{platform}"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def profile_data(*requirements: str, **stack: Any) -> dict[str, Any]:
    """The content of a small valid profile.yml; *stack* adds to its block of that name."""
    return {
        "schema": 1,
        "description": "A profile of a test",
        "stack": {
            "targets": ["cp312-x86_64", "cp311-x86_64"],
            "glibc": "2.34",
            "requirements": list(requirements) or ["alpha==1.0"],
            **stack,
        },
        "expect": {"gpus": 8},
        "verify": {"imports": ["alpha"], "collective": {"ranks": [2]}},
    }


def write_profile(profiles: Path, name: str, data: dict[str, Any] | str) -> Path:
    """Write profiles/NAME/profile.yml and return its directory."""
    directory = profiles / name
    directory.mkdir(parents=True, exist_ok=True)
    text = data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False)
    (directory / "profile.yml").write_text(text)
    return directory
