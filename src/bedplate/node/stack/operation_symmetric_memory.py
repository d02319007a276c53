"""torch's symmetric memory: every GPU reads the others' memory itself, without NCCL. All GPUs at once."""

from __future__ import annotations

import importlib
from typing import Any

RANKS = True  # one process for each GPU, in a process group of nccl


def run(torch: Any, device: str, check: Any) -> None:
    """Add up by both of its all-reduces, in float32 and bfloat16; the sums are exact integers."""
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    group = torch.distributed.group.WORLD
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    position = torch.arange(8192) % 31
    want = sum((position * (other + 1)) % 16 for other in range(ranks))
    for name in ("float32", "bfloat16"):
        tensor = symmetric.empty(8192, dtype=getattr(torch, name), device=device)
        symmetric.rendezvous(tensor, group.group_name)
        for call in ("one_shot_all_reduce", "two_shot_all_reduce_"):
            tensor.copy_((position * (rank + 1)) % 16)
            torch.cuda.synchronize()
            torch.distributed.barrier()
            got = getattr(torch.ops.symm_mem, call)(tensor, "sum", group.group_name)
            check(f"{call} {name}", got, want)
            torch.distributed.barrier()
