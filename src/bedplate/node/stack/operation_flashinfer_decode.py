"""flashinfer's attention of one new token over a cache, with four queries for each key (grouped queries).

Formula: softmax(q k^T / sqrt(head size)) v (Vaswani et al. 2017).
"""

from __future__ import annotations

import importlib
import math
from typing import Any

HEADS, GROUPS, SIZE, LENGTH = 32, 8, 128, 333  # a length that fills no page and no tile


def run(torch: Any, device: str, check: Any) -> None:
    """Attend in float16 and bfloat16."""
    flashinfer: Any = importlib.import_module("flashinfer")

    generator = torch.Generator().manual_seed(4)
    for name in ("float16", "bfloat16"):
        q, k, v = (
            torch.randn(shape, generator=generator).to(getattr(torch, name))
            for shape in ((HEADS, SIZE), (LENGTH, GROUPS, SIZE), (LENGTH, GROUPS, SIZE))
        )
        got = flashinfer.single_decode_with_kv_cache(q.to(device), k.to(device), v.to(device))
        keys, values = (cache.double().repeat_interleave(HEADS // GROUPS, 1).transpose(0, 1) for cache in (k, v))
        weights = (keys @ q.double().unsqueeze(-1) / math.sqrt(SIZE)).softmax(1)
        check(name, got, (weights * values).sum(1), 2**-6)
