"""sgl_kernel's root mean square normalisation: the first kernel of every layer that SGLang runs."""

from __future__ import annotations

import importlib
from typing import Any


def run(torch: Any, device: str, check: Any) -> None:  # noqa: ARG001  the same for every operation
    """Normalise in bfloat16 and float16."""
    check.rms_norm(importlib.import_module("sgl_kernel").rmsnorm, device)
