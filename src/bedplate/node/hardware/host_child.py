"""The host probe: read sysfs, procfs and the kernel log. In a child, because a read may wait for a device.

It collects the texts and judges nothing; pci.py, xid.py and host.py make sense of them. Runs in the node's own Python
through child.py, uses the standard library only, and writes nowhere.
"""

from __future__ import annotations

import glob
import os
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable
from typing import Any

DEVICE_FILES = (
    "vendor",
    "device",
    "class",
    "current_link_width",
    "max_link_width",
    "current_link_speed",
    "max_link_speed",
    "numa_node",
    "resource",
    "aer_dev_fatal",
    "aer_dev_nonfatal",
    "aer_dev_correctable",
)
MODULES = ("nvidia", "nvidia_uvm", "nouveau", "vfio_pci")
BUS_ID = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")

# Of the kernel log only what the checks look at.
LOG_LINE = re.compile(rb"NVRM|Xid|pciehp|AER: ")
LOG_LINES = 2000  # kept: the first quarter, where it began, and the newest
JOURNAL_S = 10.0


def read(path: str, limit: int = 65536) -> str | None:
    """Return the beginning of a text file without the white space around it, or None."""
    try:
        with open(path, "rb") as stream:
            return stream.read(limit).decode("utf-8", "replace").strip()
    except OSError:
        return None


def link(path: str) -> str | None:
    """Return the last part of what a symbolic link points to, or None."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def device(path: str) -> dict[str, Any]:
    """Return the texts of one PCI device's directory; None for those that are not there or not readable.

    Keys: bus_id, the names of ``DEVICE_FILES``, driver, iommu_group, iommu_type, config (hexadecimal).
    """
    try:
        with open(os.path.join(path, "config"), "rb") as stream:
            config = stream.read(4096).hex()
    except OSError:
        config = ""
    return {
        "bus_id": os.path.basename(path),
        **{name: read(os.path.join(path, name)) for name in DEVICE_FILES},
        "driver": link(os.path.join(path, "driver")),
        "iommu_group": link(os.path.join(path, "iommu_group")),
        "iommu_type": read(os.path.join(path, "iommu_group", "type")),
        "config": config,
    }


def gpu_paths(root: str) -> list[str]:
    """Return the directories of NVIDIA's display devices, without virtual functions: the links of the bus."""
    return [
        path
        for path in sorted(glob.glob(os.path.join(glob.escape(root), "sys/bus/pci/devices/*")))
        if read(os.path.join(path, "vendor")) == "0x10de"
        and (read(os.path.join(path, "class")) or "").startswith("0x03")
        and not os.path.islink(os.path.join(path, "physfn"))
    ]


def bridge_paths(path: str) -> list[str]:
    """Return the directories of the bridges above a device, from the root port down."""
    found: list[str] = []
    parent = os.path.dirname(os.path.realpath(path))
    while BUS_ID.match(os.path.basename(parent)):
        found.insert(0, parent)
        parent = os.path.dirname(parent)
    return found


def shm(root: str) -> dict[str, int] | None:
    """Return size and free space of /dev/shm in bytes; None when it is not there."""
    try:
        found = os.statvfs(os.path.join(root, "dev/shm"))
    except OSError:
        return None
    return {"total_bytes": found.f_blocks * found.f_frsize, "free_bytes": found.f_bavail * found.f_frsize}


def loader_files(root: str) -> dict[str, str]:
    """Return the texts of the dynamic loader's configuration, by path as the node sees it."""
    paths = [os.path.join(root, "etc/ld.so.conf")]
    paths += sorted(glob.glob(os.path.join(glob.escape(root), "etc/ld.so.conf.d/*.conf")))
    texts = {"/" + os.path.relpath(path, root): read(path) for path in paths}
    return {path: text for path, text in texts.items() if text is not None}


def kernel_log(root: str) -> dict[str, Any]:
    """Return {source, complete, reason, lines}: what of the kernel log since boot concerns the GPUs.

    source: "kmsg", "journal" or None. complete: whether it reaches back to the boot. reason: why not, or why there is
    none. The ring buffer forgets old lines when it is full; the journal, where there is one, has them.
    """
    found = kmsg(os.path.join(root, "dev/kmsg"))
    if found["complete"] or os.path.realpath(root) != "/":
        return found
    lines = journal()
    if lines is None:
        return found
    return {"source": "journal", "complete": True, "reason": "", "lines": shorten(lines)}


def kmsg(path: str) -> dict[str, Any]:
    """Read /dev/kmsg without waiting for more. Format: "priority,sequence,microseconds,flags;text" (dev-kmsg)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return {"source": None, "complete": False, "reason": f"{path}: {error.strerror}", "lines": []}
    kept, first = [], None
    try:
        for chunk in records(descriptor):
            for line in chunk.split(b"\n"):
                if first is None:
                    first = line
                if LOG_LINE.search(line):
                    kept.append(line.decode("utf-8", "replace"))
    finally:
        os.close(descriptor)
    complete = re.match(rb"^\d+,0,", first or b"") is not None
    reason = "" if complete else "The kernel's ring buffer no longer reaches back to the boot."
    return {"source": "kmsg", "complete": complete, "reason": reason, "lines": shorten(kept)}


def records(descriptor: int) -> Any:
    """Yield the records of /dev/kmsg that are there now, or the content of a plain file."""
    rest = b""
    while True:
        try:
            chunk = os.read(descriptor, 8192)
        except BlockingIOError:
            break  # no more for now
        except BrokenPipeError:
            continue  # some were overwritten while we read; go on with the oldest there is
        except OSError:
            break
        if not chunk:
            break
        whole, separator, rest = (rest + chunk).rpartition(b"\n")
        if separator:
            yield whole
    if rest:
        yield rest


def journal() -> list[str] | None:
    """Return the kernel's lines of the journal since boot; None when there is none, or it takes too long."""
    program = shutil.which("journalctl")
    if not program:
        return None
    process = subprocess.Popen(
        [program, "--dmesg", "--boot", "--output=short-monotonic", "--no-pager", "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    alarm = threading.Timer(JOURNAL_S, process.kill)
    alarm.start()
    kept, any_line = [], False
    assert process.stdout is not None  # noqa: S101  # it is a pipe
    for line in process.stdout:
        any_line = True
        if LOG_LINE.search(line):
            kept.append(line.decode("utf-8", "replace").rstrip("\n"))
    alarm.cancel()
    return kept if process.wait() == 0 and any_line else None


def shorten(lines: list[str]) -> list[str]:
    """Return at most ``LOG_LINES`` lines: the oldest and the newest of a flood."""
    if len(lines) <= LOG_LINES:
        return lines
    return lines[: LOG_LINES // 4] + lines[-(LOG_LINES - LOG_LINES // 4) :]


def main(config: dict[str, Any], answer: Callable[[Any], None], stage: Callable[[str, str], None]) -> None:
    """Answer {gpus, bridges, cmdline, iommu_units, modules, parameters, shm, memlock_bytes, loader_files, kernel_log}.

    config["root"]: the directory that stands for "/". gpus and bridges: of ``device``, a GPU with the key ``bridges``,
    the bus ids above it. modules: version of each loaded module of ``MODULES``, "" when it states none. parameters:
    uvm_disable_hmm as text. memlock_bytes: limit of locked memory of this process, None when there is none.
    """
    root = config["root"]
    gpus, bridges = [], {}
    for path in gpu_paths(root):
        stage("host", f"reading {path}")
        above = bridge_paths(path)
        gpus.append({**device(path), "bridges": [os.path.basename(bridge) for bridge in above]})
        for bridge in above:
            if os.path.basename(bridge) not in bridges:
                stage("host", f"reading {bridge}")
                bridges[os.path.basename(bridge)] = device(bridge)
    stage("host", "reading /sys and /proc")
    modules = {}
    for name in MODULES:
        directory = os.path.join(root, "sys/module", name)
        if os.path.isdir(directory):
            modules[name] = read(os.path.join(directory, "version")) or ""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    units = os.path.join(root, "sys/class/iommu")
    found = {
        "gpus": gpus,
        "bridges": list(bridges.values()),
        "cmdline": read(os.path.join(root, "proc/cmdline")),
        "iommu_units": sorted(os.listdir(units)) if os.path.isdir(units) else [],
        "modules": modules,
        "uvm_disable_hmm": read(os.path.join(root, "sys/module/nvidia_uvm/parameters/uvm_disable_hmm")),
        "shm": shm(root),
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "loader_files": loader_files(root),
    }
    answer(found)  # in case the log does not come back
    stage("host", "reading the kernel log")
    answer({**found, "kernel_log": kernel_log(root)})
