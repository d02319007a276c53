"""What every probe runs first, in its own process: limits, fault handler, and then the probe's ``main``.

This file runs as a script in the interpreter that is probed, from the private directory that child.py made,
and imports nothing of Bedplate. The directory holds ``config.json``, the probe (``probe.py``), and takes
the answer (``result.json``) and the stages (``stage-<name>``).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import runpy
import signal
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, so that no probe outlives a killed module."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def replace_file(path: str, text: str) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part."""
    with open(path + ".new", "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(path + ".new", path)


def main() -> None:
    """Set the process up and run the probe in this directory."""
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "config.json"), encoding="utf-8") as stream:
        config = json.load(stream)
    die_with(config["parent"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if config["memory_bytes"]:
        # RLIMIT_DATA and not RLIMIT_AS: CUDA reserves address space far beyond any memory it uses.
        resource.setrlimit(resource.RLIMIT_DATA, (config["memory_bytes"], config["memory_bytes"]))
    # Where memory runs out, the probe goes and not the node's work. Some containers do not let it choose.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as stream:
        stream.write("1000")
    # On SIGTERM, which is how a timeout begins: print where every thread is, then die of it.
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)

    def answer(result: Any) -> None:
        replace_file(os.path.join(here, "result.json"), json.dumps(result))

    def stage(name: str, text: str) -> None:
        replace_file(os.path.join(here, f"stage-{name}"), text)

    runpy.run_path(os.path.join(here, "probe.py"))["main"](config["probe"], answer, stage)
    # No interpreter shutdown: what counts has been answered, and a package that hangs or crashes at exit
    # would make it look otherwise.
    os._exit(0)


if __name__ == "__main__":
    main()
