"""One change at a time on a node: an flock(2) whose holder can be named."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from .durable import StateError, make_dir

__all__ = ["locked"]


def _holders(path: str) -> list[str]:
    """Name the processes that hold the flock on file ``path``: "pid 12 (uv sync)".

    A lock belongs to the open file, and children inherit that: when flock(1) is killed, the build it started
    still holds it. So ask each process for its open files (proc(5): fd, and fdinfo which lists locks) and
    trust no note in the file.
    """
    found = []
    for pid in sorted((name for name in os.listdir("/proc") if name.isdigit()), key=int):
        base = f"/proc/{pid}"
        try:
            for fd in os.listdir(f"{base}/fd"):
                if os.readlink(f"{base}/fd/{fd}") != path:
                    continue
                with open(f"{base}/fdinfo/{fd}", encoding="ascii", errors="replace") as info:
                    if "FLOCK" not in info.read():
                        continue
                with open(f"{base}/cmdline", "rb") as file:
                    command = file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                found.append(f"pid {pid} ({command[:200] or 'no command line'})")
                break
        except OSError:
            continue  # it ended meanwhile, or is another user's
    return found


@contextlib.contextmanager
def locked(path: str, timeout_s: float) -> Iterator[None]:
    """Hold the exclusive flock(2) on file ``path``, waiting at most ``timeout_s`` seconds.

    The file is for root alone: whoever can open it could hold it.

    Raises:
        StateError: ``locked``, naming the processes that hold it; ``io``.
    """
    make_dir(os.path.dirname(path))
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise StateError("io", f"cannot open the lock {path}: {exc.strerror}. Repair that and run again.") from exc
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    who = ", ".join(_holders(path)[:4]) or "a process that this user may not see"
                    raise StateError(
                        "locked",
                        f"{os.uname().nodename} is being changed: {path} is held by {who} and was not free "
                        f"within {timeout_s:g} s. Wait until that ends, or end it, and run again.",
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)
