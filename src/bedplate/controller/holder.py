"""Who is changing a node: the identity of the running ansible-playbook process, and whether it still lives.

The node stores a holder without understanding it. Only the controller that wrote it can tell whether it is
alive: a process is named by machine, boot, process id and start time, since process ids are used again
(proc(5), field 22).
"""

from __future__ import annotations

import getpass
import os
import platform
from pathlib import Path
from typing import Any

PROC = Path("/proc")
ANSIBLE_COMMANDS = ("ansible-playbook", "ansible", "ansible-console")


def current_run(proc: Path = PROC) -> dict[str, Any]:
    """Return {"run_id", "holder"} of the ansible-playbook process this code runs under.

    Every worker of one ansible-playbook process gets the same answer: the outermost of the nearest unbroken
    row of ancestors that run an ansible command (workers are forks of it and share its command line).
    Without such an ancestor it is the calling process. `holder` = {controller (host name), boot_id,
    pid_namespace, pid, pid_start (clock ticks since boot), user}; run_id = `<8 digits of
    boot_id>-<pid_start>-<pid>`, the same for the whole run and no other.
    """
    pid = _ansible_process(proc)
    start = _read_stat(proc, pid)[1]
    boot = _boot_id(proc)
    holder = {
        "controller": platform.node(),
        "boot_id": boot,
        "pid_namespace": _pid_namespace(proc),
        "pid": pid,
        "pid_start": start,
        "user": getpass.getuser(),
    }
    return {"run_id": f"{boot[:8]}-{start}-{pid}", "holder": holder}


def is_alive(holder: dict[str, Any], proc: Path = PROC) -> bool | None:
    """Return True (it runs here), False (it ran here and has ended) or None (not known here).

    A holder of an earlier boot of a machine with this name is None as well, for names are not unique; and
    so is anything that is not a holder.
    """
    try:
        where = (holder["controller"], holder["boot_id"], holder["pid_namespace"])
        pid, start = int(holder["pid"]), int(holder["pid_start"])
    except (KeyError, TypeError, ValueError):
        return None
    if where != (platform.node(), _boot_id(proc), _pid_namespace(proc)):
        return None
    try:
        state, actual_start, _ = _read_stat(proc, pid)
    except PermissionError:  # hidepid=1
        return None
    except (FileNotFoundError, ProcessLookupError):  # it has ended, or hidepid=2 hides it from this user
        return False if _has_ended(pid) else None
    return actual_start == start and state not in "ZX"


def _has_ended(pid: int) -> bool:
    """Return whether the kernel, asked past /proc, knows no such process."""
    if pid <= 0:  # would mean a group of processes
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _ansible_process(proc: Path) -> int:
    pid, found = os.getpid(), None
    while pid > 1:
        try:
            runs_ansible, parent = _runs_ansible(proc, pid), _read_stat(proc, pid)[2]
        except OSError:  # hidden from this user (hidepid), or ended this moment: the row ends here
            break
        if runs_ansible:
            found = pid
        elif found is not None:
            break
        pid = parent
    return found or os.getpid()


def _runs_ansible(proc: Path, pid: int) -> bool:
    # python /path/ansible-playbook site.yml, or python -m ansible playbook site.yml
    words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")[:4]
    names = [os.path.basename(os.fsdecode(word)) for word in words]
    return any(name in ANSIBLE_COMMANDS for name in names[:2]) or names[1:3] == ["-m", "ansible"]


def _read_stat(proc: Path, pid: int) -> tuple[str, int, int]:
    """Return (state, start time in clock ticks, parent) of a process."""
    # the command's name is in brackets and may itself hold spaces and brackets
    fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19]), int(fields[1])


def _boot_id(proc: Path) -> str:
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace(proc: Path) -> str:
    return os.readlink(proc / "self/ns/pid")
