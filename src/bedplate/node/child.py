"""Run a probe in a child process that can hang, crash, print, fork or eat memory without harm to the caller.

A probe is a module beside this one with ``main(config, answer, stage)``: ``answer(value)`` hands back its
result (the last call counts), ``stage(name, text)`` notes how far something has come, readable even when
the process is killed later. It runs in any interpreter, so it uses the standard library and imports nothing
of Bedplate.

What the child gets: an interpreter started with ``-I`` in a session of its own, a private directory as
working directory, home and place for every JIT cache, an environment built from nothing, another user when
the caller is root, no core dumps, limits of memory, and a time limit after which the whole session is killed.
Answers come through files in the private directory, so what a package prints cannot be taken for one, and a
process that keeps a pipe open holds nobody up.

Memory has two limits, both of the size that the caller names. RLIMIT_DATA stops one process at once; not
RLIMIT_AS, since CUDA reserves address space of the size of all GPUs and the host together, and would not start.
It counts neither shared memory nor children, so what all processes of the probe hold is added up twice a second
as well. Control groups are not used: making one needs root and a writable cgroup file system.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pwd
import re
import selectors
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from . import child_start
from .verdicts import Verdict

OUTPUT_LIMIT = 64 * 1024  # bytes kept of stdout and of stderr: the end, where the cause is
RESULT_LIMIT = 4 * 1024 * 1024  # bytes of an answer that are read
STAGE_LIMIT = 4096  # bytes of a stage that are read
STAGES_LIMIT = 1024  # stages that are read; the collective of 16 GPUs, pair by pair, has 271
TERM_GRACE_S = 2.0  # from SIGTERM to SIGKILL
KILL_GRACE_S = 5.0  # from SIGKILL to giving up on a process in uninterruptible sleep
POLL_S = 0.02
WATCH_S = 0.5  # from one look at the memory of all processes to the next
REMOVE_S = 60.0  # for the files of one probe
READ_S = 1.0  # for the environments of processes that may be the probe's
MARK = "BEDPLATE_PROBE"  # a variable whose value finds processes that left the session
PREFIX = "bedplate-probe-"  # of the private directories

# Every place where the packages of the stack keep compiled code. A probe must neither use what an earlier
# stack left there nor leave anything behind.
CACHE_VARIABLES = (
    "CUDA_CACHE_PATH",
    "FLASHINFER_WORKSPACE_BASE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
)


class ChildError(Exception):
    """The child could not be started; the text names the interpreter or the user, and the cause."""


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    exit_code: its exit code; None when a signal ended it or it could not be killed.
    signal: the name of the signal that ended it, such as "SIGSEGV"; None otherwise.
    timed_out: it was killed because its time was over.
    result: what the probe answered, or None: no answer, or one that is no JSON.
    stages: the last text of each stage.
    stdout, stderr: the last 64 KiB of each.
    elapsed_s: wall time in seconds.
    left_processes: how many of its processes were still there after it had ended, and were killed.
    memory_exceeded: it was killed because its processes together held more memory than they may.
    """

    exit_code: int | None
    signal: str | None
    timed_out: bool
    result: Any
    stages: dict[str, str]
    stdout: str
    stderr: str
    elapsed_s: float
    left_processes: int
    memory_exceeded: bool = False

    def ending(self) -> str:
        """Return how it ended as part of a sentence, such as "died by SIGSEGV"."""
        if self.memory_exceeded:
            return "used more memory than it may, and was killed"
        if self.timed_out:
            return f"did not end in time and was killed after {self.elapsed_s:.0f} s"
        if self.signal:
            return f"died by {self.signal}"
        return f"ended with exit code {self.exit_code}"


@dataclass
class _Output:
    """The last bytes that came through the pipes of a process."""

    process: subprocess.Popen[bytes]
    kept: dict[str, bytes] = field(default_factory=lambda: {"stdout": b"", "stderr": b""})

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        for name in self.kept:
            stream = getattr(self.process, name)
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, name)

    def read(self, timeout_s: float) -> bool:
        """Take what is there, waiting up to timeout_s for it; return whether there was anything."""
        found = False
        for key, _ in self._selector.select(timeout_s):
            chunk = os.read(key.fd, 65536)
            if chunk:
                found = True
                self.kept[key.data] = (self.kept[key.data] + chunk)[-OUTPUT_LIMIT:]
            else:
                self._selector.unregister(key.fileobj)
        return found

    def close(self) -> None:
        """Take what is left, but at most one limit's worth of a writer that does not stop, and close."""
        for _ in range(2 * OUTPUT_LIMIT // 65536 + 2):
            if not self.read(0):
                break
        self._selector.close()
        for name in self.kept:
            getattr(self.process, name).close()

    def text(self, name: str) -> str:
        """Return what was kept of "stdout" or "stderr"."""
        return self.kept[name].decode("utf-8", "replace")


def run_probe(
    probe: ModuleType,
    config: Mapping[str, Any],
    *,
    python: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    user: str = "",
    memory_bytes: int = 0,
) -> Outcome:
    """Run a probe module in a child of the given interpreter and return how it ended.

    probe: the module; its source is taken from its loader, so it may lie in a zip file.
    config: handed to the probe's main; JSON types only.
    python: path of the interpreter.
    timeout_s: seconds after which the whole session gets SIGTERM and, 2 s later, SIGKILL.
    environment: the variables of the child; the few it cannot do without and the caches are set here.
    user: the name of the user to run as; only root can, for everybody else it is ignored.
    memory_bytes: limit of the memory that it may hold, each process and all together; 0 for none.

    First removes what probes of dead processes left behind: their directories, and processes that lived on.

    Raises ChildError when the interpreter cannot be started, the user does not exist, or there is no room for
    the private directory.
    """
    account = _account(user)
    _remove_stale({os.geteuid(), account.pw_uid} if account else {os.geteuid()})
    try:
        directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{_owner()}-"))
    except OSError as error:
        raise ChildError(f"there is no place for a probe in {tempfile.gettempdir()}: {error}") from error
    mark = directory.name
    try:
        start = {
            "parent": os.getpid(),
            "memory_bytes": memory_bytes,
            "probe": dict(config, directory=str(directory)),
        }
        _write_files(directory, start, probe, account)
        owner: dict[str, Any] = {}
        if account:
            owner = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": _groups(account)}
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                [python, "-I", "-B", str(directory / "start.py")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=directory,
                env={**_environment(directory, environment or {}), MARK: mark},
                start_new_session=True,
                umask=0o077,
                **owner,
            )
        except OSError as error:
            raise ChildError(f"{python} cannot be started as {user or 'this user'}: {error}") from error
        output = _Output(process)
        why = _watch(process, output, began + timeout_s, memory_bytes)
        if why == "time":
            _signal_session(process.pid, signal.SIGTERM)
            _wait(process, output, time.monotonic() + TERM_GRACE_S)
        left = _kill_rest(process, output, mark, account.pw_uid if account else os.geteuid())
        elapsed = time.monotonic() - began
        output.close()
        code = process.returncode
        return Outcome(
            exit_code=code if code is not None and code >= 0 else None,
            signal=_signal_name(-code) if code is not None and code < 0 else None,
            timed_out=why == "time",
            result=_read_json(directory / "result.json"),
            stages=_stages(directory),
            stdout=output.text("stdout"),
            stderr=output.text("stderr"),
            elapsed_s=round(elapsed, 3),
            left_processes=left if not why else 0,
            memory_exceeded=why == "memory",
        )
    finally:
        _remove(directory)


def child_failed(error: ChildError, *, layer: str, subject: str) -> Verdict:
    """Return the verdict of a check whose child could not be started; the other checks go on."""
    message = f"It could not be checked: {error}."
    action = "Repair what the message names: the interpreter, the user, or the room in the temporary directory."
    return Verdict("node.child_failed", "fail", layer, subject, message, {"error": str(error)}, action)


def read_environment(path: Path) -> dict[str, str]:
    """Return the variables of a generation's ``environment`` file; none when there is no such file.

    The format is systemd's EnvironmentFile (systemd.exec(5)) without continuation lines: one KEY=VALUE a
    line, blank lines and lines that begin with # or ; are comments, a pair of quotes around a value is
    taken off.
    """
    variables: dict[str, str] = {}
    if not path.is_file():
        return variables
    for line in path.read_text(encoding="utf-8").splitlines():
        key, separator, value = line.strip().partition("=")
        if separator and key and key[0] not in "#;":
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
                value = value[1:-1]
            variables[key.strip()] = value
    return variables


def _write_files(directory: Path, start: Mapping[str, Any], probe: ModuleType, account: Any) -> None:
    """Write what the child reads into its private directory, and give that to the child's user.

    The directory goes last: as soon as it is the user's, another process of that user can put links in it.
    """
    texts = {"start.py": source_of(child_start), "probe.py": source_of(probe), "config.json": json.dumps(start)}
    try:
        for name, text in texts.items():
            with (directory / name).open("x", encoding="utf-8") as stream:
                stream.write(text)
                if account:  # under a umask of 077 it would be root's alone
                    os.fchown(stream.fileno(), account.pw_uid, account.pw_gid)
        if account:
            os.chown(directory, account.pw_uid, account.pw_gid, follow_symlinks=False)
    except OSError as error:
        raise ChildError(f"there is no place for a probe in {directory.parent}: {error}") from error


def _owner() -> str:
    """Return what no other process has, also when process ids are used again: namespace, id, start time."""
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{namespace}-{os.getpid()}-{_stat(os.getpid())[START_TIME]}"


def _remove_stale(owners: set[int]) -> None:
    """Remove what killed callers left behind: the processes of their probes, then the directories.

    owners: the ids of the users that a probe's directory may belong to. Anybody can make something of such a name, so
    what is not a directory of these users is left alone.
    """
    namespace = _owner().split("-")[0]
    name = re.compile(rf"{PREFIX}{namespace}-([0-9]+)-([0-9]+)-[^-]+")
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        parts = name.fullmatch(path.name)
        if not parts or _stat(int(parts[1]))[START_TIME] == parts[2]:
            continue
        try:
            found = path.lstat()
        except OSError:  # somebody else has just removed it
            continue
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
            continue
        for left in _marked(path.name, None, int(parts[2]), found.st_uid, set()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(left, signal.SIGKILL)
        _remove(path)


def _remove(directory: Path) -> None:
    """Remove a private directory, as far as that is possible.

    With rm and not with shutil.rmtree: that ends with an error in a tree deeper than Python's stack, and waits for ever
    for a FIFO that takes a directory's place.
    """
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["/bin/rm", "-rf", "--", directory],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=REMOVE_S,
            check=False,
        )


def source_of(module: ModuleType) -> str:
    """Return the source text of a module from its own loader, which may be the zip that Ansible sends.

    Not inspect.getsource: its cache is shared by threads, and imports are checked in several at once.
    """
    spec = module.__spec__
    get_source = getattr(spec and spec.loader, "get_source", None)  # zipimporter has it and is no InspectLoader
    source: str | None = get_source(spec.name) if spec and get_source else None
    if source is None:
        raise ChildError(f"the source of {module.__name__} cannot be had")
    return source


def _account(user: str) -> pwd.struct_passwd | None:
    """Return the account to change to, or None to stay. Raises ChildError when there is no such user."""
    if not user or os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise ChildError(f"the user {user} does not exist here; the role node_tools makes it") from None


def _groups(account: pwd.struct_passwd) -> list[int]:
    """Return the groups of an account; video and render guard the devices of some distributions."""
    return os.getgrouplist(account.pw_name, account.pw_gid)


def _environment(directory: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: nothing of the caller's, the generation's, private places."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        **extra,
        **{name: str(directory / "cache") for name in CACHE_VARIABLES},
        "HOME": str(directory),
        "TMPDIR": str(directory),
    }


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether a process has ended, and leave it a zombie, so that its id cannot be given to another."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait(process: subprocess.Popen[bytes], output: _Output, deadline: float) -> bool:
    """Read the output until the process has ended; return False when the deadline came first."""
    return not _watch(process, output, deadline, 0)


def _watch(process: subprocess.Popen[bytes], output: _Output, deadline: float, memory_bytes: int) -> str:
    """Read the output until the process has ended and return ""; else return what ran out, "time" or "memory"."""
    next_look = time.monotonic() + WATCH_S
    while not _has_ended(process):
        now = time.monotonic()
        if now > deadline:
            return "time"
        if memory_bytes and now > next_look:
            next_look = now + WATCH_S
            if _held_bytes(process.pid) > memory_bytes:
                return "memory"
        output.read(POLL_S)
    return ""


def _held_bytes(session: int) -> int:
    """Return the memory that the processes of a session hold, shared memory of each counted once per process.

    RssAnon and RssShmem of proc_pid_status(5): pages of files can be had back at any time and do not count.
    """
    total = 0
    for pid in _processes():
        if _stat(pid)[SESSION] == str(session):
            with contextlib.suppress(OSError):  # it ended in between
                for line in (
                    Path("/proc", str(pid), "status").read_text(encoding="utf-8", errors="replace").splitlines()
                ):
                    if line.startswith(("RssAnon:", "RssShmem:")):
                        total += int(line.split()[1]) << 10
    return total


def _kill_rest(process: subprocess.Popen[bytes], output: _Output, mark: str, user: int) -> int:
    """Kill what is left of the session and of its marked descendants, reap the process, count the others."""
    # It has not been reaped, so its id, which is the session's, is nobody else's yet.
    started, unread = int(_stat(process.pid)[START_TIME]), set[int]()

    def marked() -> set[int]:
        return _marked(mark, process.pid, started, user, unread)

    others = marked() - {process.pid}
    _signal_session(process.pid, signal.SIGKILL)
    # Whatever forks while it is being killed is found in the next round.
    for _ in range(10):
        running = marked()
        if not running:
            break
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        others |= running - {process.pid}
        output.read(POLL_S)
    _wait(process, output, time.monotonic() + KILL_GRACE_S)
    process.poll()  # reaps it; returncode stays None when even SIGKILL could not end it
    return len(others)


# Places in what _stat returns, which begins with the third field of proc_pid_stat(5).
STATE, SESSION, START_TIME = 0, 3, 19


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; empty texts when there is no such process."""
    try:
        text = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [""] * 50
    return text.rpartition(")")[2].split()


def _processes() -> list[int]:
    """Return the ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _marked(mark: str, session: int | None, since: int, user: int, unread: set[int]) -> set[int]:
    """Return the ids of the running processes of a probe: those in its session, and those that carry its mark.

    session: the probe's, None when that is not known. since: what started before cannot be the probe's; clock ticks
    since boot. user: the numeric id of its user. unread: processes that did not let themselves be read; they
    are not tried, and new ones are added.

    Only what left the session is asked for the mark. Reading an environment takes the lock of the process's memory,
    which one that is stuck in the driver may hold for ever: so nobody in uninterruptible sleep is read, and the
    others have ``READ_S`` together.
    """
    found: set[int] = set()
    others: list[int] = []
    for pid in _processes():
        fields = _stat(pid)
        if fields[STATE] in ("Z", "X", ""):
            continue
        if fields[SESSION] == str(session):
            found.add(pid)
        elif fields[STATE] != "D" and int(fields[START_TIME]) >= since and pid not in unread and _user(pid) == user:
            others.append(pid)
    return found | _carrying(mark, others, unread)


def _user(pid: int) -> int | None:
    """Return the effective user id of a process, None when it is gone. Source: proc_pid_status(5), Uid."""
    with contextlib.suppress(OSError):  # it ended before the file was opened, or after that
        for line in Path("/proc", str(pid), "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[2])
    return None


def _carrying(mark: str, pids: list[int], unread: set[int]) -> set[int]:
    """Return those of the processes that carry the mark; the arguments are as for ``_marked``."""
    wanted = f"{MARK}={mark}".encode()
    found: set[int] = set()

    def ask(pid: int) -> None:
        # Gone in between, or somebody else's and the caller is not root.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if wanted in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
                found.add(pid)

    # One thread each, so that one which does not come back hides no other, and none keeps this process from ending.
    threads = {pid: threading.Thread(target=ask, args=(pid,), daemon=True) for pid in pids}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + READ_S
    for pid, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            unread.add(pid)
    return found - unread


def _signal_session(leader: int, number: signal.Signals) -> None:
    """Send a signal to the process group that the child leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _stages(directory: Path) -> dict[str, str]:
    """Return the texts of the finished stages by name: a probe may have left any number of files, of any size."""
    try:
        with os.scandir(directory) as entries:
            names = (file.name for file in entries if file.name.startswith("stage-") and not file.name.endswith(".new"))
            found = sorted(itertools.islice(names, STAGES_LIMIT))
    except OSError:  # it removed its directory
        return {}
    return {name[len("stage-") :]: _read(directory / name, STAGE_LIMIT) for name in found}


def _read(path: Path, limit: int) -> str:
    """Return the beginning of a regular file, "" when there is none.

    The directory belongs to the probe's user, who may have put anything there: links are not followed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return os.read(descriptor, limit).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> Any:
    """Return the JSON value of a file, None when there is none or it is not JSON."""
    try:
        return json.loads(_read(path, RESULT_LIMIT))
    except (ValueError, RecursionError):
        return None
