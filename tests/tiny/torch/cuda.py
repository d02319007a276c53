"""Bedplate test stand-in, not PyTorch: there is no GPU behind it."""

from __future__ import annotations


def is_available() -> bool:
    """Return False."""
    return False


def device_count() -> int:
    """Return 0."""
    return 0


def get_arch_list() -> list[str]:
    """Return architectures: what the real one of CUDA 12.8 is built for, in short."""
    return ["sm_90", "sm_120"]
