"""flashinfer's root mean square normalisation; without flashinfer-jit-cache it is compiled here, by nvcc.

Formula: x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019).
"""

from __future__ import annotations

import importlib
from typing import Any

EPS = 1e-6


def run(torch: Any, device: str, check: Any) -> None:
    """Normalise 64 rows of 4096 numbers in bfloat16 and float16."""
    flashinfer: Any = importlib.import_module("flashinfer")

    generator = torch.Generator().manual_seed(3)
    for name in ("bfloat16", "float16"):
        x = torch.randn((64, 4096), generator=generator).to(getattr(torch, name))
        weight = torch.randn((4096,), generator=generator).to(x.dtype)
        got = flashinfer.norm.rmsnorm(x.to(device), weight.to(device), EPS)
        wide = x.double()
        check(name, got, wide * (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double(), 2**-7)
