"""Ask apt what it would do if a repository were configured that is not: for check mode on a node that has nothing yet.

The repository's lists are fetched into a private directory, under a key that must have the pinned fingerprint, and apt
is told to look there. The node's own lists, sources, preferences and caches are read and never written.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..addresses import without_user
from .apt_query import Apt, PackageError, native
from .repository_key import pinned_key

UPDATE_TIMEOUT_S = 300.0  # NVIDIA's list has a few megabytes
LISTS = "/var/lib/apt/lists"
CONFIGURATION = "/etc/apt"

# What apt says of a repository, in the order in which it is looked for: pattern, what is wrong, what to do next.
_MIRROR = (
    (
        r"SHA1 is not considered secure|Policy rejected",
        "this system's apt rejects the repository's key, for its SHA-1 signature",
        "Use a repository made for this release, or a mirror that signs with a key of its own.",
    ),
    (
        r"NO_PUBKEY|BADSIG|EXPKEYSIG|is not signed|couldn't be verified|clearsigned file isn't valid",
        "its signature is not by the pinned key",
        "Compare the key's fingerprint with the repository's.",
    ),
    (
        r"Hash Sum mismatch|unexpected size|Mirror sync in progress",
        "its files do not fit together",
        "Try again later: the mirror is being updated.",
    ),
    (r"Release file .* (expired|is not valid yet)", "its Release file is out of date", "Update the mirror."),
)


@contextlib.contextmanager
def preview(repository: Mapping[str, Any], timeout_s: float) -> Iterator[Apt]:
    """Yield an Apt that sees one more repository, and preferences, than the node has.

    repository: ``uris`` (address), ``suites`` (such as "./"), ``key`` (address or path of the key, or the armored key
    itself), ``fingerprint`` (of the key, 40 hexadecimal digits), ``preferences`` (text of a preferences file, or
    empty), ``without`` (patterns of names of source and preferences files that are taken for absent). timeout_s: of one
    query.

    Raises PackageError ``packages.mirror`` when the key is another one, or the repository cannot be read.
    """
    folder = Path(tempfile.mkdtemp(prefix="bedplate-apt-"))
    try:
        folder.chmod(0o755)  # apt fetches as a user of its own
        key = folder / "key.asc"
        key.write_text(pinned_key(repository["key"], repository["fingerprint"]), encoding="utf-8")
        lines = (
            "Types: deb", f"URIs: {repository['uris']}", f"Suites: {repository['suites']}",
            f"Architectures: {native()}", f"Signed-By: {key}",
        )  # fmt: skip
        source = folder / "preview.sources"
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        _links(Path(LISTS), folder / "lists", ["lock"])
        for name in ("sources.list.d", "preferences.d"):
            _links(Path(CONFIGURATION, name), folder / name, repository["without"])
        (folder / "sources.list.d" / source.name).symlink_to(source)
        if repository["preferences"]:
            (folder / "preferences.d" / "zz-bedplate-preview.pref").write_text(
                repository["preferences"], encoding="utf-8"
            )
        configuration = folder / "apt.conf"
        configuration.write_text(_configuration(folder), encoding="utf-8")
        options = ("-c", str(configuration))  # apt.conf(5): read after the node's own
        _update(Apt(options, UPDATE_TIMEOUT_S), source, repository["uris"])
        yield Apt(options, timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configuration(folder: Path) -> str:
    """Return what tells apt to look into the folder, and to run no command of the node's after an update."""
    settings = {
        "Dir::State::lists": folder / "lists",
        "Dir::Etc::sourceparts": folder / "sources.list.d",
        "Dir::Etc::preferencesparts": folder / "preferences.d",
        # Built once, and then used by each query.
        "Dir::Cache::pkgcache": folder / "pkgcache.bin",
        "Dir::Cache::srcpkgcache": folder / "srcpkgcache.bin",
    }
    hooks = ("Pre-Invoke", "Post-Invoke", "Post-Invoke-Success")
    lines = [f"#clear APT::Update::{hook};" for hook in hooks]
    return "\n".join([*lines, *(f'{name} "{value}";' for name, value in settings.items())]) + "\n"


def _links(source: Path, target: Path, without: Sequence[str]) -> None:
    """Make a directory that shows the files of another one, but for those whose names fit a pattern."""
    target.mkdir()
    with contextlib.suppress(FileNotFoundError):
        for path in source.iterdir():
            if path.is_file() and not any(fnmatchcase(path.name, pattern) for pattern in without):
                (target / path.name).symlink_to(path)


def _update(apt: Apt, source: Path, uris: str) -> None:
    """Fetch the lists of this source only. Raises PackageError."""
    code, out, error = apt.run(
        "apt-get", "-q", "update", "-o", f"Dir::Etc::sourcelist={source}", "-o", "Dir::Etc::sourceparts=-",
        "-o", "APT::Get::List-Cleanup=0", "-o", "APT::Update::Error-Mode=any",
    )  # fmt: skip
    if code:
        raise mirror_error(uris, out + error)


def mirror_error(uris: str, output: str) -> PackageError:
    """Return what is wrong with a repository, from what ``apt-get update`` printed."""
    subject = without_user(uris)
    said = [line for line in output.splitlines() if re.match(r"[EW]: |Err:", line)]
    for pattern, problem, action in _MIRROR:
        if re.search(pattern, output):
            return PackageError("packages.mirror", subject, f"It cannot be used: {problem}.", action, output=said[:10])
    reason = next((line[3:] for line in said if line.startswith("E: ")), "apt gave no reason").rstrip(".")
    action = "See that the node reaches it, through its proxy if it has one."
    return PackageError("packages.mirror", subject, f"It cannot be read: {reason}.", action, output=said[:10])
