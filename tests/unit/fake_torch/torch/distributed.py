"""Ranks that know each other's number only."""

from __future__ import annotations

from torch import cuda


def init_process_group(backend, *, init_method, rank, world_size, timeout):
    """Check what a rank must say."""
    if (backend, rank) != ("nccl", cuda.current) or not init_method.startswith("file:///"):
        raise AssertionError((backend, rank, cuda.current, init_method))
    globals()["state"] = (rank, world_size)


def get_rank():
    """Return the rank."""
    return state[0]  # noqa: F821


def destroy_process_group():
    """Forget the group."""
    del globals()["state"]
