"""Downloads one file, picks up where an earlier try stopped, and believes only its sha256."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import requests

from .errors import BedplateError

CHUNK = 1 << 17  # bytes; what a broken connection costs at most
ATTEMPTS = 5
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

    def run(self, session: requests.Session, progress: Callable[[int], None], stop: threading.Event) -> None:
        """Download to `path`, which appears complete and checked or not at all.

        *progress* is called with the number of bytes that the part holds. Lost connections and busy servers are tried
        again, from where the part ends. BedplateError: the source refuses, gives up, or has another file; the
        disk is full. Stopped: *stop* was set.
        """
        for attempt in range(1, ATTEMPTS + 1):
            resumed = self.part.exists() and self.part.stat().st_size > 0
            try:
                actual = self._receive(session, progress, stop)
            except requests.RequestException as error:
                if attempt == ATTEMPTS or not _may_pass(error):
                    raise BedplateError(f"{self.path.name}: cannot get {self.url}: {error}") from error
                stop.wait(min(2**attempt, 10) / 2)
                continue
            except OSError as error:
                raise BedplateError(f"{self.path.name}: cannot write {self.part}: {error.strerror or error}") from error
            if actual == self.sha256:
                self.part.replace(self.path)
                return
            self.part.unlink()
            if not resumed:  # a part of an earlier try may have been bad; a whole download was what the source has
                break
        raise BedplateError(
            f"{self.path.name}: {self.url} has another file than the lock: sha256 {actual}, locked {self.sha256}"
        )

    def _receive(self, session: requests.Session, progress: Callable[[int], None], stop: threading.Event) -> str:
        """Fetch what is missing and return the sha256 of the whole."""
        digest = hashlib.sha256()
        have = self._known_part(digest)
        if self.size is not None and have == self.size:
            return digest.hexdigest()
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with session.get(self.url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if response.status_code == 416:  # range not satisfiable
                self.part.unlink()
                raise requests.ConnectionError("the part does not fit the file; starting over")
            response.raise_for_status()
            if have and response.status_code != 206:  # a server without ranges sends all of it
                have, digest = 0, hashlib.sha256()
            with self.part.open("ab" if have else "wb") as stream:
                for chunk in response.iter_content(CHUNK):
                    if stop.is_set():
                        raise Stopped
                    stream.write(chunk)
                    digest.update(chunk)
                    have += len(chunk)
                    progress(have)
        if self.size is not None and have < self.size:
            raise requests.ConnectionError(f"the connection ended after {have} of {self.size} bytes")
        return digest.hexdigest()

    def _known_part(self, digest: hashlib._Hash) -> int:
        """Feed the part of an earlier try to *digest* and return its length; a part that is too long is dropped."""
        if not self.part.exists():
            return 0
        if self.size is not None and self.part.stat().st_size > self.size:
            self.part.unlink()
            return 0
        with self.part.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
            return stream.tell()


def _may_pass(error: requests.RequestException) -> bool:
    """Return whether trying again can help: lost connections, timeouts, a server that is busy or broken."""
    if error.response is None:
        return isinstance(error, (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError))
    # 429: too many requests
    return error.response.status_code >= 500 or error.response.status_code == 429
