"""flashinfer's root mean square normalisation; without flashinfer-jit-cache it is compiled here, by nvcc."""

from __future__ import annotations

import importlib
from typing import Any


def run(torch: Any, device: str, check: Any) -> None:  # noqa: ARG001  the same for every operation
    """Normalise in bfloat16 and float16."""
    check.rms_norm(importlib.import_module("flashinfer").norm.rmsnorm, device)
