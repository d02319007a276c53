"""A matrix product per type, on integers so small that every type holds the result exactly.

One for each type because a cuBLAS that does not fit its toolkit fails in some types only, by an illegal access.
"""

from __future__ import annotations

from typing import Any

# type: greatest integer of the operands. With 256 products the sums stay below 2**8 in bfloat16 (8 bits of
# significand), 2**11 in float16 (11 bits) and 2**24 in float32; TF32 takes operands of 11 bits.
BOUNDS = {"float32": 100, "tf32": 100, "bfloat16": 1, "float16": 2, "float8_e4m3fn": 1}


def run(torch: Any, device: str, check: Any) -> None:
    """Multiply 512x256 by 256x384 in every type that the GPU has."""
    generator = torch.Generator().manual_seed(1)
    for name, bound in BOUNDS.items():
        a = torch.randint(-bound, bound + 1, (512, 256), generator=generator)
        b = torch.randint(-bound, bound + 1, (256, 384), generator=generator)
        want = a @ b  # int64, on the CPU
        if name.startswith("float8"):
            if device != "cpu" and torch.cuda.get_device_capability(device) < (8, 9):
                check.skip(name, "this GPU has no 8-bit floats")
                continue
            one = torch.ones((), device=device)
            # cuBLAS takes the second operand in columns.
            left, right = a.to(device, torch.float8_e4m3fn), b.t().contiguous().to(device, torch.float8_e4m3fn).t()
            got = torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        else:
            dtype = torch.float32 if name == "tf32" else getattr(torch, name)
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            got = a.to(device, dtype) @ b.to(device, dtype)
        check(name, got, want)
