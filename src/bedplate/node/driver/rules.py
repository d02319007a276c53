"""What is known about driver versions: which GPUs, systems and toolkits they work with. Tables with their sources."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Device ids are given out in the order of the chips: the list of supported GPUs in the README of
# NVIDIA/open-gpu-kernel-modules ends for Ada at 28f8 and begins for Blackwell at 2901 (B200). "Blackwell and later
# are only supported by the open kernel modules" (the same README).
FIRST_OPEN_ONLY_DEVICE = 0x2900

# First driver whose open modules list the GPU (the same README at the tags): other 570 releases do not know 2bb5.
FIRST_DRIVER_OF_GPU = {"10de:2bb1": "570.133.07", "10de:2bb4": "570.133.07", "10de:2bb5": "575.57.08"}

# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1, by CUDA's major.
MINIMUM_DRIVER_OF_CUDA = {11: "450", 12: "525", 13: "580"}

# Systems for which NVIDIA's network repository has the driver: id and version of /etc/os-release -> first branch.
# Debian 13's began with 590 (NVIDIA/cuda-repo-management#38).
NVIDIA_REPOSITORY = {
    ("ubuntu", "22.04"): 0,
    ("ubuntu", "24.04"): 0,
    ("debian", "12"): 0,
    ("debian", "13"): 590,
    ("rhel", "9"): 0,
}
RHEL_LIKE = ("rhel", "rocky", "almalinux", "centos", "ol")


def numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers that can be compared; what is no number ends it."""
    parts: list[int] = []
    for part in version.split("."):
        if not re.fullmatch(r"\d{1,9}", part):
            break
        parts.append(int(part))
    return tuple(parts)


def branch(version: str) -> int:
    """Return the branch of a driver version, such as 580; 0 when it has none."""
    return (numbers(version) or (0,))[0]


def open_only(pci_ids: Iterable[str]) -> list[str]:
    """Return those ids ("10de:2bb5") of GPUs that work with the open kernel modules only."""
    return sorted({text.lower() for text in pci_ids if _device(text) >= FIRST_OPEN_ONLY_DEVICE})


def _device(pci_id: str) -> int:
    """Return the device of an NVIDIA PCI id, -1 for anything else."""
    match = re.fullmatch(r"10de:([0-9a-f]{4})", pci_id.lower())
    return int(match.group(1), 16) if match else -1


def too_old_for(pci_ids: Iterable[str], version: str) -> tuple[str, str] | None:
    """Return (id, first driver) of a GPU that this driver is too old for, None when there is none."""
    for pci_id in sorted({text.lower() for text in pci_ids}):
        first = FIRST_DRIVER_OF_GPU.get(pci_id)
        if first and numbers(version) < numbers(first):
            return pci_id, first
    return None


def minimum_for_cuda(cuda: str) -> str | None:
    """Return the least driver for a CUDA version such as "13.0.1", None when the table does not say."""
    major = numbers(cuda)[:1]
    return MINIMUM_DRIVER_OF_CUDA.get(major[0]) if major else None


def first_branch(system: str, version: str) -> int | None:
    """Return the first branch that NVIDIA's repository has for a system, None when it has nothing for it."""
    if system in RHEL_LIKE:
        system, version = "rhel", version.split(".")[0]
    return NVIDIA_REPOSITORY.get((system, version))
