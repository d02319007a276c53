"""The nvcc probe: what does the compiler say that the stack would compile kernels with?

Runs through child.py, with the generation's environment; uses the standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any


def main(config: dict[str, Any], answer: Callable[[Any], None], stage: Callable[[str, str], None]) -> None:
    """Answer {"text": what `nvcc --version` printed, "error": text or None, "tools": {name: path or None}}.

    config: nvcc (its path), bin (the generation's directory of programs). tools: what torch and flashinfer start
    besides nvcc to compile a kernel.
    """
    stage("nvcc", f"running {config['nvcc']} --version")
    path = os.pathsep.join((config["bin"], os.environ["PATH"]))
    tools = {name: shutil.which(name, path=path) for name in ("ninja", "c++")}
    try:
        done = subprocess.run([config["nvcc"], "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        answer({"text": "", "error": str(error), "tools": tools})
        return
    error_text = None if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"
    answer({"text": done.stdout[-2000:], "error": error_text, "tools": tools})
