"""`bedplate fetch`: fills a directory with the locked wheels of a profile, for nodes that install from a directory.

The directory is flat and holds wheels under their own names, so `--find-links` and any web server can serve it.
Files are found on the index by sha256, so a mirror under other URLs serves as well.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import requests
from packaging.utils import canonicalize_name

from .download import Download, Stopped
from .errors import BedplateError
from .files import replace_file, sha256_of, user_cache
from .package_index import open_index
from .profiles import Profile
from .schema import LockedFile

PARALLEL = 4
VERIFIED_FILE = ".bedplate-verified.json"


@dataclass(frozen=True)
class Plan:
    """What a fetch has to do: `present` files are there and right, `missing` are not; `free` bytes of disk."""

    directory: Path
    present: Sequence[LockedFile]
    missing: Sequence[LockedFile]
    free: int

    @property
    def bytes_missing(self) -> int:
        """Bytes still to come, as far as the lock knows sizes; parts of earlier tries count as there."""
        return sum(max((file.size or 0) - _size(self.directory / f"{file.file}.part"), 0) for file in self.missing)

    def check_space(self) -> None:
        """Raise BedplateError when the disk cannot hold what is missing."""
        if self.bytes_missing > self.free:
            raise BedplateError(
                f"{self.directory} has {self.free / 1e9:.1f} GB free and {self.bytes_missing / 1e9:.1f} GB are "
                "missing: make room, or choose another place with --to"
            )


def default_directory() -> Path:
    """Return `$XDG_CACHE_HOME/bedplate/wheels`, else `~/.cache/bedplate/wheels`."""
    return user_cache() / "wheels"


def make_plan(
    profile: Profile, targets: Sequence[str], directory: Path, *, recheck: bool, checked: Callable[[LockedFile], None]
) -> Plan:
    """Compare the lock with *directory*, which is created; *checked* is called after each file.

    A file counts as present when its sha256 is right. Results are remembered in the directory with size and
    modification time, so that gigabytes are read once; *recheck* reads all of them again.
    """
    files = wanted(profile, targets)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BedplateError(f"cannot create {directory}: {error.strerror}") from error
    seen = {} if recheck else _read_verified(directory)
    present: list[LockedFile] = []
    missing: list[LockedFile] = []
    for file in files:
        path = directory / file.file
        (present if _is_right(path, file, seen) else missing).append(file)
        checked(file)
    _write_verified(directory, seen)
    return Plan(directory, present, missing, shutil.disk_usage(directory).free)


def wanted(profile: Profile, targets: Sequence[str]) -> list[LockedFile]:
    """Return the files of *targets* (all when empty), each once, the biggest first; BedplateError if not locked."""
    by_name: dict[str, LockedFile] = {}
    for target in targets or profile.data.stack.targets:
        for file in profile.target_lock(target).files:
            if by_name.setdefault(file.file, file).sha256 != file.sha256:
                raise BedplateError(
                    f"two targets lock different files named {file.file}: fetch them one by one, with --target "
                    "and another --to for each"
                )
    return sorted(by_name.values(), key=lambda file: (-(file.size or 0), file.file))


def fetch(
    profile: Profile, plan: Plan, index_url: str, progress: Callable[[LockedFile, int], None], done: Callable[[], None]
) -> None:
    """Download what *plan* misses, a few files at a time; *progress* gets (file, bytes so far), *done* ends a file.

    One file that fails does not stop the others; a BedplateError at the end lists all that failed. On
    KeyboardInterrupt the parts stay and the next fetch goes on from them.
    """
    stop = threading.Event()
    seen = _read_verified(plan.directory)
    todo = iter(plan.missing)  # shared: taking the next of a list's items is one step for Python's threads
    problems: list[str] = []
    bugs: list[Exception] = []

    def one(file: LockedFile) -> None:
        url = find_url(file, index_of(profile, file.name, index_url), session)
        download = Download(url, plan.directory / file.file, file.sha256, file.size)
        status = download.run(session, lambda count: progress(file, count), stop)
        seen[file.file] = _stamp(status, file.sha256)
        done()

    def work() -> None:
        for file in todo:
            if not stop.is_set():
                attempt(file)

    def attempt(file: LockedFile) -> None:
        try:
            one(file)
        except Stopped:
            return
        except BedplateError as error:
            problems.append(str(error))
        except Exception as error:  # noqa: BLE001  # raised again below, where it is seen
            bugs.append(error)
            stop.set()

    # Daemons, so that an interrupt need not wait for a server that does not answer.
    workers = [threading.Thread(target=work, daemon=True) for _ in range(PARALLEL)]
    with requests.Session() as session:
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            stop.set()
            _write_verified(plan.directory, dict(seen))
    if bugs:
        raise bugs[0]
    if problems:
        raise BedplateError("\n".join([*sorted(problems), "What arrived is kept; run the same command to go on."]))


def index_of(profile: Profile, package: str, default: str) -> str:
    """Return the index that serves *package*: the profile's own for the packages it lists, else *default*."""
    for index in profile.data.stack.indexes:
        if package in {str(canonicalize_name(name)) for name in index.packages}:
            return index.url
    return default


def find_url(file: LockedFile, index: str, session: requests.Session) -> str:
    """Return where *index* has the file with the locked sha256; BedplateError names file and index."""
    try:
        with open_index(index, session) as client:
            page = client.get_project_page(file.name, timeout=(10, 60))
    except BedplateError as error:
        raise BedplateError(f"{file.file}: {error}") from error
    for package in page.packages:
        if package.digests.get("sha256") == file.sha256:
            return package.url
    # An index need not give hashes. The name will do then: the download is checked in any case.
    for package in page.packages:
        if package.filename == file.file and "sha256" not in package.digests:
            return package.url
    raise BedplateError(f"{file.file}: {index} has no file with the locked sha256 {file.sha256}")


Stamps = dict[str, list[int | str]]


def _is_right(path: Path, file: LockedFile, seen: Stamps) -> bool:
    if not path.is_file() or (file.size is not None and _size(path) != file.size):
        return False
    stamp = _stamp(path.stat(), file.sha256)
    if seen.get(file.file) != stamp:
        if sha256_of(path) != file.sha256:
            return False
        seen[file.file] = stamp
    return True


def _stamp(status: os.stat_result, sha256: str) -> list[int | str]:
    return [status.st_size, status.st_mtime_ns, sha256]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read_verified(directory: Path) -> Stamps:
    try:
        stamps = json.loads((directory / VERIFIED_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # only a memory: without it files are read again
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _write_verified(directory: Path, stamps: Stamps) -> None:
    kept = {name: stamp for name, stamp in sorted(stamps.items()) if (directory / name).exists()}
    with suppress(OSError):  # a read-only directory can be checked, but not remember it
        replace_file(directory / VERIFIED_FILE, json.dumps(kept, indent=0))
