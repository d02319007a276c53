"""flashinfer's all-reduce that adds a residual and normalises in one kernel, over peer-to-peer memory. All GPUs.

Formula: y = sum over ranks + residual; y / sqrt(mean(y^2) + eps) * weight.
"""

from __future__ import annotations

import importlib
from typing import Any

RANKS = True  # one process for each GPU, in a process group of nccl
EPS = 1e-6
TOKENS, HIDDEN = 16, 4096


def run(torch: Any, device: str, check: Any) -> None:
    """Fuse in bfloat16; sums and residual are integers, so that only the normalisation rounds."""
    comm: Any = importlib.import_module("flashinfer.comm")

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(5)  # the same numbers on every rank
    parts = torch.randint(-8, 9, (ranks, TOKENS, HIDDEN), generator=generator)
    residual = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=generator)
    weight = torch.randn((HIDDEN,), generator=generator).bfloat16()
    added, normed = (torch.empty((TOKENS, HIDDEN), dtype=torch.bfloat16, device=device) for _ in range(2))
    workspace = comm.create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=ranks,
        rank=rank,
        max_token_num=TOKENS,
        hidden_dim=HIDDEN,
        dtype=torch.bfloat16,
    )
    comm.allreduce_fusion(
        input=parts[rank].to(device, torch.bfloat16),
        workspace=workspace,
        pattern=comm.AllReduceFusionPattern.kARResidualRMSNorm,
        residual_in=residual.to(device, torch.bfloat16),
        residual_out=added,
        norm_out=normed,
        rms_gamma=weight.to(device),
        rms_eps=EPS,
    )
    want = (parts.sum(0) + residual).double()
    check("sum", added, want)
    check("norm", normed, want * (want.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double(), 2**-7)
    torch.distributed.barrier()
    workspace.destroy()
