"""Files and links that are either the old ones or the new ones, whenever the power goes.

Everything that Bedplate must not lose goes through here: write to a temporary name, fsync, rename(2) over the
final name, fsync of the directory. rename(2) is atomic for whoever looks (POSIX), the two fsyncs make it so
after a power loss as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import time

__all__ = [
    "StateError",
    "discard_tree",
    "fsync_dir",
    "is_real_dir",
    "make_dir",
    "read_text",
    "remove_link",
    "sweep",
    "switch_link",
    "sync_filesystem",
    "write_atomic",
]

TRASH = ".trash-"


class StateError(Exception):
    """A refusal or a failure in words for the operator, with a short stable code.

    ``code`` is one of: busy, locked, corrupt, no_space, io, refused, invalid, missing.
    ``str(error)`` names the object and the next action.
    """

    def __init__(self, code: str, message: str) -> None:
        """Keep the code beside the message."""
        super().__init__(message)
        self.code = code


def _failed(doing: str, exc: OSError, after: str) -> StateError:
    """Turn an OSError into the sentence an operator needs; ``after`` says what state things are in now."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return StateError(
            "no_space",
            f"cannot {doing}: the disk is full. {after} Free space on that file system and run again.",
        )
    return StateError("io", f"cannot {doing}: {exc.strerror or exc}. {after} Repair that and run again.")


def fsync_dir(path: str) -> None:
    """Make the names in directory ``path`` durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unlink_quietly(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def write_atomic(path: str, text: str, mode: int = 0o644) -> None:
    """Replace the file ``path`` by ``text`` (UTF-8) as one step, with ``mode`` from the first moment.

    Callers hold the node's lock, so the temporary name may be fixed: a killed writer leaves at most one
    ``<path>.tmp`` and the next one takes its place. A link at ``path`` is replaced, never followed.

    Raises:
        StateError: ``no_space`` or ``io``; the old file is then unchanged.
    """
    tmp = path + ".tmp"
    try:
        _unlink_quietly(tmp)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(tmp, flags, mode)
        try:
            os.fchmod(fd, mode)  # the umask must not narrow it: facts are for every user
            data = text.encode("utf-8")
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(tmp, path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            os.unlink(tmp)
        raise _failed(f"write {path}", exc, "What it held before is unchanged.") from exc
    try:
        fsync_dir(os.path.dirname(path))
    except OSError as exc:
        raise _failed(f"make {path} durable", exc, "It was written but may be lost with the power.") from exc


def read_text(path: str, limit: int = 64 << 20) -> str | None:
    """Return the text of the regular file ``path``, or None when there is none.

    Raises:
        StateError: ``corrupt`` when it is a link, no regular file, longer than ``limit`` bytes or not UTF-8;
            ``io`` when it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise StateError("corrupt", f"{path} is a symbolic link; put the file itself there.") from exc
        raise _failed(f"read {path}", exc, "Nothing was changed.") from exc
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
        os.close(fd)
        raise StateError("corrupt", f"{path} is not a file of at most {limit} bytes; move it away.")
    try:
        with os.fdopen(fd, "rb") as file:
            return file.read().decode("utf-8")
    except UnicodeDecodeError as exc:
        raise StateError("corrupt", f"{path} is not UTF-8 text ({exc.reason} at byte {exc.start}).") from exc
    except OSError as exc:
        raise _failed(f"read {path}", exc, "Nothing was changed.") from exc


def is_real_dir(path: str) -> bool:
    """Tell whether ``path`` is a directory itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def make_dir(path: str, mode: int = 0o755) -> None:
    """Make directory ``path`` and missing parents with ``mode``; an existing one is left as it is.

    Raises:
        StateError: ``no_space`` or ``io``.
    """
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_dir(parent, mode)
    try:
        os.mkdir(path, mode)
        os.chmod(path, mode)  # the umask must not narrow it: the probe user reads what is below
        fsync_dir(parent)
    except OSError as exc:
        raise _failed(f"make the directory {path}", exc, "Nothing else was changed.") from exc


def switch_link(link: str, target: str) -> float:
    """Point the symbolic link ``link`` at ``target`` by one rename(2); return the milliseconds it took.

    Whoever opens ``link`` sees the old target or the new one, never none. The time covers making the new
    link, the rename and the fsync of the directory.

    Raises:
        StateError: ``no_space`` or ``io``; the old link is then unchanged.
    """
    parent, name = os.path.split(link)
    tmp = os.path.join(parent, f".{name}.tmp")
    start = time.perf_counter()
    try:
        _unlink_quietly(tmp)
        os.symlink(target, tmp)
        os.rename(tmp, link)
    except OSError as exc:
        with contextlib.suppress(OSError):
            os.unlink(tmp)
        raise _failed(f"point {link} at {target}", exc, "It still names what it named before.") from exc
    try:
        fsync_dir(parent)
    except OSError as exc:
        raise _failed(f"make {link} durable", exc, f"It names {target} now.") from exc
    return (time.perf_counter() - start) * 1000.0


def remove_link(link: str) -> float:
    """Remove the symbolic link ``link``; return the milliseconds it took. Raises StateError as switch_link does."""
    start = time.perf_counter()
    try:
        _unlink_quietly(link)
        fsync_dir(os.path.dirname(link))
    except OSError as exc:
        raise _failed(f"remove {link}", exc, "Look at what is there.") from exc
    return (time.perf_counter() - start) * 1000.0


def discard_tree(path: str) -> bool:
    """Remove the directory tree ``path``; return whether there was one.

    It is renamed out of sight first, so a kill in the middle leaves a ``.trash-`` name that `sweep` ends, and
    never half a generation under its own name.

    Raises:
        StateError: ``io``; also when ``path`` is no directory (a link is never followed).
    """
    if not os.path.lexists(path):
        return False
    if not is_real_dir(path):
        raise StateError("io", f"{path} is not a directory; nothing was removed. Look at it and move it away.")
    parent, name = os.path.split(path)
    trash = os.path.join(parent, TRASH + name)
    try:
        if os.path.lexists(trash):
            shutil.rmtree(trash)
        os.rename(path, trash)
        shutil.rmtree(trash)
    except OSError as exc:
        raise _failed(f"remove {path}", exc, "What is left is swept by the next change.") from exc
    return True


def sweep(parent: str) -> list[str]:
    """End removals that were interrupted in directory ``parent``; return their names. Raises StateError."""
    swept = []
    try:
        names = sorted(name for name in os.listdir(parent) if name.startswith(TRASH))
        for name in names:
            shutil.rmtree(os.path.join(parent, name))
            swept.append(name[len(TRASH) :])
    except FileNotFoundError:
        return swept
    except OSError as exc:
        raise _failed(f"sweep {parent}", exc, "Nothing else was changed.") from exc
    return swept


def sync_filesystem(path: str) -> None:
    """Flush the file system that holds ``path`` (syncfs(2)), where the C library has it.

    Installers do not fsync what they unpack. Without this a power loss just after a commit could leave a
    verified generation full of empty files.
    """
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise _failed(f"flush {path}", OSError(code, os.strerror(code)), "Nothing was marked as built.")
    finally:
        os.close(fd)
