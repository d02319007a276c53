"""GPUs that are not there."""

from __future__ import annotations

import os

current = None


def device_count():
    """Return the number that FAKE_GPUS says."""
    return int(os.environ.get("FAKE_GPUS", "0"))


def init():
    """Raise what the real one raises where there is no driver."""
    raise RuntimeError(
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed\na driver"
    )


def set_device(index):
    """Note which GPU is used."""
    global current
    current = index


def synchronize():
    """Return: nothing runs here."""
