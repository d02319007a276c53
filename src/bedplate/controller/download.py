"""Downloads one file, picks up where an earlier try stopped, and believes only its sha256."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import requests

from .errors import BedplateError

CHUNK = 1 << 17  # bytes; what a broken connection costs at most
ATTEMPTS = 5
LOCK_PAUSE = 0.2  # seconds between looks at a part that another fetch has
TIMEOUT = (10, 30)  # seconds to connect, seconds without a byte


class Stopped(Exception):  # noqa: N818  # not an error: the user asked for it
    """The download was told to stop; its part stays for the next time."""


@dataclass(frozen=True)
class Download:
    """One file to get: `url` of the source, path to write, sha256, size in bytes (None: not known)."""

    url: str
    path: Path
    sha256: str
    size: int | None

    @property
    def part(self) -> Path:
        """Where the bytes are while the file is not complete."""
        return self.path.with_name(self.path.name + ".part")

    def run(self, session: requests.Session, progress: Callable[[int], None], stop: threading.Event) -> os.stat_result:
        """Download to `path`, which appears complete and checked or not at all; return the status of that file.

        *progress* is called with the number of bytes that the part holds. Lost connections and busy servers are tried
        again, from where the part ends; another fetch of the same file is waited for. BedplateError: the source
        refuses, gives up, or has another file; the disk is full. Stopped: *stop* was set.
        """
        try:
            with self._locked_part(stop) as part:
                return self._arrived() or self._download(part, session, progress, stop)
        except OSError as error:
            raise BedplateError(f"{self.path.name}: cannot write {self.part}: {error.strerror or error}") from error

    @contextmanager
    def _locked_part(self, stop: threading.Event) -> Iterator[BinaryIO]:
        """Yield the part, which no other fetch touches meanwhile; an empty one is removed at the end."""
        while True:
            with self.part.open("a+b") as part:
                while not _try_lock(part):
                    if stop.wait(LOCK_PAUSE):
                        raise Stopped
                if not self._is_part(part):
                    continue  # who had the lock made the file of it, or gave it up
                try:
                    yield part
                finally:
                    if self._is_part(part) and not os.fstat(part.fileno()).st_size:
                        self.part.unlink()
                return

    def _is_part(self, part: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(part.fileno()), self.part.stat())
        except FileNotFoundError:
            return False

    def _arrived(self) -> os.stat_result | None:
        """Return the status of the file when another fetch has brought it."""
        try:
            with self.path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                return os.fstat(file.fileno()) if found == self.sha256 else None
        except FileNotFoundError:
            return None

    def _download(
        self, part: BinaryIO, session: requests.Session, progress: Callable[[int], None], stop: threading.Event
    ) -> os.stat_result:
        for attempt in range(1, ATTEMPTS + 1):
            resumed = part.seek(0, os.SEEK_END) > 0
            try:
                actual = self._receive(part, session, progress, stop)
            except requests.RequestException as error:
                if attempt == ATTEMPTS or not _may_pass(error):
                    raise BedplateError(f"{self.path.name}: cannot get {self.url}: {error}") from error
                stop.wait(min(2**attempt, 10) / 2)
                continue
            if actual == self.sha256:
                part.flush()
                self.part.replace(self.path)
                return os.fstat(part.fileno())
            part.truncate(0)
            if not resumed:  # a part of an earlier try may have been bad; a whole download was what the source has
                break
        raise BedplateError(
            f"{self.path.name}: {self.url} has another file than the lock: sha256 {actual}, locked {self.sha256}"
        )

    def _receive(
        self, part: BinaryIO, session: requests.Session, progress: Callable[[int], None], stop: threading.Event
    ) -> str:
        """Fetch what is missing and return the sha256 of the whole."""
        digest = hashlib.sha256()
        have = self._known_part(part, digest)
        if self.size is not None and have == self.size:
            return digest.hexdigest()
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with session.get(self.url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if response.status_code == 416:  # range not satisfiable
                part.truncate(0)
                raise requests.ConnectionError("the part does not fit the file; starting over")
            response.raise_for_status()
            if have and response.status_code != 206:  # a server without ranges sends all of it
                part.truncate(0)
                have, digest = 0, hashlib.sha256()
            for chunk in response.iter_content(CHUNK):
                if stop.is_set():
                    raise Stopped
                part.write(chunk)
                digest.update(chunk)
                have += len(chunk)
                progress(have)
        part.flush()
        if self.size is not None and have < self.size:
            raise requests.ConnectionError(f"the connection ended after {have} of {self.size} bytes")
        return digest.hexdigest()

    def _known_part(self, part: BinaryIO, digest: hashlib._Hash) -> int:
        """Feed the part of an earlier try to *digest* and return its length; a part that is too long is dropped."""
        have = part.seek(0, os.SEEK_END)
        if self.size is not None and have > self.size:
            part.truncate(0)
            return 0
        part.seek(0)
        for start in range(0, have, CHUNK):
            digest.update(part.read(min(CHUNK, have - start)))
        return have


def _try_lock(part: BinaryIO) -> bool:
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _may_pass(error: requests.RequestException) -> bool:
    """Return whether trying again can help: lost connections, timeouts, a server that is busy or broken."""
    if error.response is None:
        return isinstance(error, (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError))
    # 429: too many requests
    return error.response.status_code >= 500 or error.response.status_code == 429
