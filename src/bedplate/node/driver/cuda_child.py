"""The CUDA probe: start CUDA through the driver's own library. In a child, because the call may never come back.

Runs in the node's own Python through child.py, with the standard library only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


def main(config: dict[str, Any], answer: Callable[[Any], None], stage: Callable[[str, str], None]) -> None:
    """Answer {"code": what cuInit returned, "version", "devices"} or {"error": text}.

    config["library"]: name or path of the driver's library. version and devices are what cuDriverGetVersion and
    cuDeviceGetCount gave (cuda.h), None where they failed.
    """
    try:
        library = ctypes.CDLL(config["library"])
        initialise, get_version, get_count = library.cuInit, library.cuDriverGetVersion, library.cuDeviceGetCount
    except (OSError, AttributeError) as error:
        answer({"error": str(error)})
        return
    stage("cuda", "cuInit")
    code = initialise(0)
    value = ctypes.c_int(0)
    stage("cuda", "cuDriverGetVersion")
    version = value.value if get_version(ctypes.byref(value)) == 0 else None
    stage("cuda", "cuDeviceGetCount")
    devices = value.value if code == 0 and get_count(ctypes.byref(value)) == 0 else None
    answer({"code": code, "version": version, "devices": devices})
