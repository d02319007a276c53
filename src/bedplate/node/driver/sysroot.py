"""Read a node's files under a directory that stands for "/", so that a tree of broken files is a test.

Absolute links are followed inside the directory, as they would be on the node. Nothing here raises for a file
that is missing, unreadable or no file: what is missing reads as None or as nothing, and what could not be read
is kept in ``unreadable`` with the reason, because "cannot be read" must never be taken for "is not there".
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque

TEXT_LIMIT = 1 << 20  # bytes; no file of sysfs, procfs or /etc that is read here comes near it
MAX_PATH = 4096  # linux/limits.h
MAX_LINKS = 40  # as the kernel: path_resolution(7)

_ABSENT = (errno.ENOENT, errno.ENOTDIR)


class Sysroot:
    """The files below a root directory. ``unreadable``: path as on the node -> why it could not be read."""

    def __init__(self, root: str = "/") -> None:
        """Keep the root; nothing is read yet."""
        self.root = os.path.realpath(root)
        self.unreadable: dict[str, str] = {}

    def path(self, name: str) -> str:
        """Return where a path of the node lies on this machine, links followed inside the root.

        Raises OSError when there are too many links, or when it is no path at all.
        """
        if "\0" in name:  # file names come from files as well
            raise OSError(errno.EINVAL, "no file name", name)
        if len(name) > MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name)
        if self.root == "/":
            return name
        resolved: list[str] = []
        parts = deque(name.split("/"))
        links = 0
        while parts:
            part = parts.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                resolved = resolved[:-1]
                continue
            try:
                target = os.readlink(os.path.join(self.root, *resolved, part))
            except OSError:  # no link
                resolved.append(part)
                continue
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
            if target.startswith("/"):
                resolved = []
            parts.extendleft(reversed(target.split("/")))
        return os.path.join(self.root, *resolved)

    def read(self, name: str, limit: int = TEXT_LIMIT) -> bytes | None:
        """Return the first ``limit`` bytes of a regular file, None when there is none or it cannot be read."""
        try:
            # O_NONBLOCK: a FIFO in the place of a file must not hold up the caller.
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            self._note(name, error)
            return None
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                self.unreadable[name] = "not a regular file"
                return None
            chunks: list[bytes] = []
            while limit > 0:
                # One read for an ordinary file, so that a big one is in memory once; procfs says size 0.
                chunk = os.read(descriptor, min(limit, max(info.st_size, 1 << 16)))
                if not chunk:
                    break
                chunks.append(chunk)
                limit -= len(chunk)
            return b"".join(chunks)
        except OSError as error:
            self._note(name, error)
            return None
        finally:
            os.close(descriptor)

    def text(self, name: str, limit: int = TEXT_LIMIT) -> str | None:
        """Return the text of a file, as ``read``; bytes that are not UTF-8 are replaced."""
        data = self.read(name, limit)
        return None if data is None else data.decode("utf-8", "replace")

    def line(self, name: str) -> str | None:
        """Return the first line of a file without blanks around it; None when there is no file or no text."""
        text = self.text(name)
        return text.strip().split("\n")[0].strip() or None if text else None

    def names(self, name: str) -> list[str]:
        """Return the sorted names in a directory; none when there is no directory."""
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError as error:
            self._note(name, error)
            return []

    def target(self, name: str) -> str:
        """Return the last name of the path that a path leads to, links followed; its own where it leads nowhere."""
        try:
            return os.path.basename(os.path.realpath(self.path(name)))
        except OSError as error:
            self._note(name, error)
            return os.path.basename(name)

    def is_dir(self, name: str) -> bool:
        """Tell whether there is a directory at this path, links followed."""
        info = self._stat(name)
        return info is not None and stat.S_ISDIR(info.st_mode)

    def exists(self, name: str) -> bool:
        """Tell whether there is anything at this path, links followed."""
        return self._stat(name) is not None

    def mtime(self, name: str) -> float | None:
        """Return when a file was changed last, in seconds since the epoch; None when there is none."""
        info = self._stat(name)
        return None if info is None else info.st_mtime

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None when there is none."""
        info = self._stat(name)
        return None if info is None else info.st_size

    def free_bytes(self, name: str) -> int | None:
        """Return the bytes that root may still write to the file system of a directory; None when it is absent."""
        try:
            info = os.statvfs(self.path(name))
        except OSError as error:
            self._note(name, error)
            return None
        return info.f_bavail * info.f_frsize

    def _stat(self, name: str) -> os.stat_result | None:
        """Return the status of what is at a path, None when there is nothing."""
        try:
            return os.stat(self.path(name))
        except OSError as error:
            self._note(name, error)
            return None

    def _note(self, name: str, error: OSError) -> None:
        """Keep why something could not be read, unless it is simply not there."""
        if error.errno not in _ABSENT:
            self.unreadable[name] = error.strerror or str(error)
