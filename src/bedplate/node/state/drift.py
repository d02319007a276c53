"""Has anybody changed a generation since it was built? Answered from names, sizes and times.

What is compared, against ``manifest.json`` written when the build ended:

* each ``*.dist-info``: there, and the sha256 of its RECORD unchanged;
* each file that a RECORD lists: there, a regular file, of the listed size, and not newer than the build;
* the names at the top of site-packages: nothing added (``pip install --target``, a ``.pth``), nothing gone.

RECORD's format: "Recording installed projects" in the Python packaging user guide (CSV: path relative to
site-packages, ``sha256=...``, size in bytes; the last two may be empty).
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import stat
from dataclasses import dataclass, field
from typing import Any

from .durable import StateError, read_text, write_atomic

__all__ = ["ACTION", "Drift", "fingerprint", "inspect", "write_manifest"]

SHOWN = 20
# A live generation is never repaired in place.
ACTION = (
    "Go back with playbooks/rollback.yml, then provision it again; where there is no other one, see docs/rollback.md."
)
# Written by interpreters and by uv at any time; no part of what was installed.
IGNORED = frozenset({"__pycache__", ".lock"})


@dataclass
class Drift:
    """What differs from the manifest: the first 20 items by name, and how many of each kind."""

    items: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, item: str) -> None:
        """Count one difference of ``kind`` and keep its name while there is room."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.items) < SHOWN:
            self.items.append(item)

    def __bool__(self) -> bool:
        """Tell whether anything differs."""
        return bool(self.counts)

    def sentence(self) -> str:
        """Say it in one line: how much, and the first item."""
        total = sum(self.counts.values())
        return f"{total} difference{'s' if total != 1 else ''}, first: {self.items[0]}" if self else "none"


def _site_packages(generation: str) -> list[str]:
    """Return the site-packages directories of the generation's environment, relative to ``venv``."""
    lib = os.path.join(generation, "venv", "lib")
    try:
        names = sorted(name for name in os.listdir(lib) if name.startswith("python"))
    except OSError:
        return []
    found = [os.path.join("lib", name, "site-packages") for name in names]
    return [path for path in found if os.path.isdir(os.path.join(generation, "venv", path))]


def _listed(record: bytes) -> list[tuple[str, str]] | None:
    """Return path and size, as they stand there, of each file that a RECORD lists; None when it is no CSV."""
    try:
        rows = list(csv.reader(record.decode("utf-8", "replace").splitlines()))
    except csv.Error:
        return None
    return [(row[0], row[2]) for row in rows if len(row) == 3 and row[0]]


def _scan(generation: str) -> dict[str, Any]:
    """Return what the disk says now: dists, entries, and the anomalies of every file that a RECORD lists.

    ``anomalies`` and ``times`` (mtime in ns) are keyed by the path below ``venv``.
    """
    venv = os.path.join(generation, "venv")
    dists: dict[str, str | None] = {}
    entries: list[str] = []
    anomalies: dict[str, str] = {}
    times: dict[str, int] = {}
    count = size_sum = 0
    for site in _site_packages(generation):
        base = os.path.join(venv, site)
        for name in sorted(os.listdir(base)):
            if name in IGNORED:
                continue
            entries.append(f"{site}/{name}")
            if not name.endswith(".dist-info"):
                continue
            try:
                with open(os.path.join(base, name, "RECORD"), "rb") as file:
                    record = file.read()
            except OSError:
                dists[f"{site}/{name}"] = None
                continue
            dists[f"{site}/{name}"] = hashlib.sha256(record).hexdigest()
            listed = _listed(record)
            if listed is None:
                anomalies[f"{site}/{name}/RECORD"] = "cannot be read as a list of files"
                continue
            for file_name, size in listed:
                path = f"{site}/{file_name}"
                if ".." in file_name or file_name.startswith("/"):
                    # scripts are ../../../bin/x; anything that leaves the environment is not ours to look at
                    path = os.path.normpath(path)
                    if file_name.startswith("/") or path.startswith(".."):
                        continue
                count += 1
                try:
                    info = os.lstat(f"{venv}/{path}")
                except (OSError, ValueError):  # no path holds a NUL, and a damaged RECORD may
                    anomalies[path] = "missing"
                    continue
                size_sum += info.st_size
                times[path] = info.st_mtime_ns
                if not stat.S_ISREG(info.st_mode):
                    anomalies[path] = "not a regular file"
                elif size and str(info.st_size) != size:
                    anomalies[path] = f"{info.st_size} bytes, RECORD says {size[:20]}"
    return {
        "dists": dists,
        "entries": entries,
        "anomalies": anomalies,
        "times": times,
        "files": count,
        "bytes": size_sum,
    }


def fingerprint(generation: str) -> dict[str, Any]:
    """Return the manifest of the environment in directory ``generation`` as it is now.

    Keys: ``schema``, ``dists`` (dist-info path: sha256 of RECORD or null), ``entries`` (names at the top of
    site-packages), ``known`` (listed files that differ from RECORD already: two wheels may own one file),
    ``files`` (count), ``bytes`` (sum), ``newest_mtime_ns`` (no listed file is newer), ``python`` (its
    interpreter is there).

    Raises:
        StateError: ``missing`` when there is no environment with an installed distribution.
    """
    scan = _scan(generation)
    if not scan["dists"]:
        raise StateError(
            "missing",
            f"{generation}/venv holds no installed distribution, so there is nothing to seal; look at the "
            "output of the build.",
        )
    return {
        "schema": 1,
        "dists": scan["dists"],
        "entries": scan["entries"],
        "known": scan["anomalies"],
        "files": scan["files"],
        "bytes": scan["bytes"],
        "newest_mtime_ns": max(scan["times"].values(), default=0),
        "python": os.path.exists(os.path.join(generation, "venv", "bin", "python")),
    }


def write_manifest(generation: str) -> dict[str, Any]:
    """Write ``manifest.json`` into directory ``generation`` and return it. Raises StateError."""
    manifest = fingerprint(generation)
    write_atomic(os.path.join(generation, "manifest.json"), json.dumps(manifest, indent=1) + "\n")
    return manifest


def _manifest(generation: str) -> dict[str, Any] | None:
    """Return the manifest, or None when it is not there or not usable."""
    try:
        text = read_text(os.path.join(generation, "manifest.json"))
        manifest = json.loads(text) if text else None
    except (StateError, ValueError, RecursionError):
        return None
    wanted = {"dists": dict, "entries": list, "known": dict, "newest_mtime_ns": int}
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(k), t) for k, t in wanted.items()):
        return None
    return manifest


def inspect(generation: str) -> Drift:
    """Compare directory ``generation`` with its manifest.

    Kinds counted: ``manifest``, ``dist_missing``, ``dist_extra``, ``dist_changed``, ``entry_missing``,
    ``entry_extra``, ``file_missing``, ``file_changed``. A file that was edited to the same size is found by
    its time; one whose time was put back as well is not: this finds accidents and habits, not an attacker.
    """
    drift = Drift()
    manifest = _manifest(generation)
    if manifest is None:
        drift.add("manifest", f"{generation}/manifest.json is missing or damaged")
        return drift
    if manifest.get("python") and not os.path.exists(os.path.join(generation, "venv", "bin", "python")):
        drift.add("file_missing", "bin/python: the interpreter it names is gone")
    scan = _scan(generation)
    before, after = manifest["dists"], scan["dists"]
    for path in sorted(set(before) | set(after)):
        name = os.path.basename(path)
        if path not in after:
            drift.add("dist_missing", f"{name}: was installed and is gone")
        elif path not in before:
            drift.add("dist_extra", f"{name}: was not installed by Bedplate")
        elif before[path] != after[path]:
            drift.add("dist_changed", f"{name}: its RECORD changed")
    before_top, after_top = set(manifest["entries"]), set(scan["entries"])
    for path in sorted(before_top ^ after_top):
        if path in before or path in after:
            continue  # a dist-info, named above
        if path in after_top:
            drift.add("entry_extra", f"{path}: was added")
        else:
            drift.add("entry_missing", f"{path}: is gone")
    known = manifest["known"]
    for path, what in sorted(scan["anomalies"].items()):
        if known.get(path) != what:
            drift.add("file_missing" if what == "missing" else "file_changed", f"{path}: {what}")
    newest = manifest["newest_mtime_ns"]
    for path, mtime in scan["times"].items():
        if mtime > newest and path not in scan["anomalies"]:
            drift.add("file_changed", f"{path}: written after the build")
    return drift
