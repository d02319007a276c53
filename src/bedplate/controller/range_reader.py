"""Reading parts of wheels.

By HTTP range from a package index, or from a file on disk, with every length checked.

A wheel is a zip file: its directory is at the end, each member is compressed by itself. So two reads find a
member and a third one inflates its beginning, where linkers put the symbol tables. A server that does not
answer ranges, or answers with other bytes than were asked for, is an error that the caller can fall back
from.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .errors import BedplateError

if TYPE_CHECKING:
    import requests

# requests is imported where it is used: it takes longer to import than a cached check takes.

TAIL = 64 << 10  # bytes of a wheel's end read first: the directory of most wheels
SMALL_READS = 12
LARGEST_READ = 16 << 20  # bytes
TRIES = 3
TIMEOUT_S = 60


class RangeError(BedplateError):
    """A part of a remote file could not be had.

    `unsupported` when the server does not answer ranges at all.
    """

    def __init__(self, message: str, *, unsupported: bool = False) -> None:
        """Keep whether a whole download may still work."""
        super().__init__(message)
        self.unsupported = unsupported


class Source(Protocol):
    """A file that can be read at any place. `size` is in bytes; `bytes_read` counts what was transferred."""

    name: str
    size: int
    bytes_read: int

    def read_at(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`, fewer only at the end of the file."""


class LocalSource:
    """A file on disk as a source."""

    def __init__(self, path: Path) -> None:
        """Open the file. Errors: OSError."""
        self._file = path.open("rb")
        self.name = str(path)
        self.size = os.fstat(self._file.fileno()).st_size
        self.bytes_read = 0

    def read_at(self, offset: int, size: int) -> bytes:
        """Return the bytes at `offset`. Errors: OSError."""
        data = os.pread(self._file.fileno(), size, offset)
        self.bytes_read += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RemoteSource:
    """A file behind a URL as a source.

    Args: url; size: in bytes where it is known, else it is learned from the first answer; session: to reuse
    connections. Errors of `read_at`: RangeError for 404 and other answers, missing range support, wrong
    lengths, cut transfers.
    """

    def __init__(self, url: str, size: int | None = None, session: requests.Session | None = None) -> None:
        """Ask for nothing yet, unless the size has to be learned."""
        import requests

        self.name = url
        self.bytes_read = 0
        self._session = session or requests.Session()
        self._tail = b""
        self.size = size if size is not None else 0
        if size is None:
            self._tail = self._fetch("bytes=-" + str(TAIL), None, TAIL)

    def read_at(self, offset: int, size: int) -> bytes:
        """Return the bytes at `offset`; what the first answer brought already is not asked for again."""
        size = max(0, min(size, self.size - offset))
        if not size:
            return b""
        start = self.size - len(self._tail)
        if offset >= start:
            return self._tail[offset - start : offset - start + size]
        return self._fetch(f"bytes={offset}-{offset + size - 1}", offset, size)

    def _fetch(self, wanted: str, offset: int | None, size: int) -> bytes:
        import requests

        problem = ""
        for _ in range(TRIES):
            try:
                return self._try(wanted, offset, size)
            except requests.RequestException as error:  # noqa: PERF203 - trying again is the point
                problem = f"{type(error).__name__}: {error}"
        raise RangeError(f"{self.name}: reading {wanted} failed {TRIES} times ({problem}). Try again later")

    def _try(self, wanted: str, offset: int | None, size: int) -> bytes:
        import requests

        headers = {"Range": wanted, "Accept-Encoding": "identity"}
        with self._session.get(self.name, headers=headers, stream=True, timeout=TIMEOUT_S) as answer:
            if answer.status_code == 200:
                raise RangeError(f"{self.name}: the server sends whole files only", unsupported=True)
            if answer.status_code != 206:
                raise RangeError(f"{self.name}: the server answers {answer.status_code} {answer.reason}")
            found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", ""))
            if not found:
                raise RangeError(f"{self.name}: an answer without a usable Content-Range", unsupported=True)
            first, last, total = (int(n) for n in found.groups())
            if offset is None:
                self.size = total
                offset, size = max(0, total - size), min(size, total)
            if (first, last) != (offset, offset + size - 1) or total != self.size:
                raise RangeError(
                    f"{self.name}: asked for bytes {offset}-{offset + size - 1} of {self.size}, got {found.group()}",
                    unsupported=True,
                )
            data = b"".join(_limited(answer, size + 1))
            self.bytes_read += len(data)
            if len(data) != size:
                raise requests.ConnectionError(f"{len(data)} bytes instead of {size}")
            return data


def _limited(answer: requests.Response, limit: int) -> Iterator[bytes]:
    seen = 0
    for chunk in answer.iter_content(64 << 10):
        yield chunk
        seen += len(chunk)
        if seen >= limit:
            return


class _Window(io.RawIOBase):
    """A source as a seekable file for zipfile, which reads the directory with it; reads ahead in one go."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0
        self._start = max(0, source.size - TAIL)
        self._data = source.read_at(self._start, TAIL)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        base = {0: 0, 1: self._at, 2: self._source.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = self._source.size - self._at if size < 0 else min(size, self._source.size - self._at)
        inside = self._at - self._start
        if inside >= 0 and inside + size <= len(self._data):
            data = self._data[inside : inside + size]
        else:
            data = self._source.read_at(self._at, size)
        self._at += len(data)
        return data


class RemoteWheel:
    """The members of a wheel behind a source.

    Errors: BedplateError when it is no zip file. Members with `..`, absolute or non-UTF-8 names are still
    listed under the name they have; nothing is ever written to a path taken from a member.
    """

    def __init__(self, source: Source) -> None:
        """Read the directory."""
        self.source = source
        try:
            with zipfile.ZipFile(_Window(source)) as archive:
                self.members = {m.filename: m for m in archive.infolist() if not m.is_dir()}
        except (zipfile.BadZipFile, ValueError, UnicodeDecodeError, NotImplementedError, OverflowError) as error:
            raise BedplateError(f"{source.name} is not a wheel: {error}") from error

    def inflate(self, name: str, *, chunk: int = 256 << 10) -> Iterator[bytes]:
        """Yield the content of a member, piece by piece, reading `chunk` compressed bytes at a time, later more.

        The caller stops when it has enough. Errors: RangeError, BedplateError for a damaged member or one
        that is larger than the directory says.
        """
        member = self.members[name]
        if not 0 <= member.header_offset < self.source.size:  # 64 bits may hold more than a system call takes
            raise BedplateError(f"{self.source.name}: the member {name!r} is not where the directory says")
        head = self.source.read_at(member.header_offset, 30 + len(name.encode()) + 1024 + chunk)
        if head[:4] != b"PK\3\4" or len(head) < 30:
            raise BedplateError(f"{self.source.name}: the member {name!r} is not where the directory says")
        skip = 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        offset = member.header_offset + skip
        left = member.compress_size
        decoder = zlib.decompressobj(-15) if member.compress_type == zipfile.ZIP_DEFLATED else None
        if decoder is None and member.compress_type != zipfile.ZIP_STORED:
            raise BedplateError(f"{self.source.name}: {name!r} is compressed by method {member.compress_type}")
        produced = reads = 0
        data = head[skip : skip + left]
        while True:
            left -= len(data)
            offset += len(data)
            pending = data
            while pending:
                try:
                    piece = decoder.decompress(pending, 4 << 20) if decoder else pending
                except zlib.error as error:
                    raise BedplateError(f"{self.source.name}: {name!r} is damaged: {error}") from error
                pending = decoder.unconsumed_tail if decoder else b""
                produced += len(piece)
                if produced > member.file_size:
                    raise BedplateError(f"{self.source.name}: {name!r} is larger than its directory entry says")
                if piece:
                    yield piece
            if left <= 0:
                break
            # The beginning in small steps; who reads on wants it all, and one request per step would take for ever.
            reads += 1
            if reads > SMALL_READS:
                chunk = min(2 * chunk, LARGEST_READ)
            data = self.source.read_at(offset, min(chunk, left))
            if not data:
                raise BedplateError(f"{self.source.name} ends inside {name!r}")
        if produced != member.file_size:
            raise BedplateError(f"{self.source.name}: {name!r} ends early")

    def read(self, name: str, limit: int) -> bytes:
        """Return a whole small member. Errors: as `inflate`.

        BedplateError when it is longer than `limit` bytes.
        """
        if self.members[name].file_size > limit:
            raise BedplateError(f"{self.source.name}: {name!r} has {self.members[name].file_size} bytes")
        return b"".join(self.inflate(name, chunk=64 << 10))


def read_bounded(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """Return a member of an open zip file. Errors: KeyError.

    BedplateError when it has more than `limit` bytes.
    """
    with archive.open(name) as member:
        data = member.read(limit + 1)
    if len(data) > limit:
        raise BedplateError(f"{archive.filename}: {name!r} has more than {limit} bytes")
    return data
