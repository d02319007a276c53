"""What sysfs and a device's PCI configuration space say: parsers that judge nothing, and the GPUs on the bus.

Formats: Linux Documentation/ABI/testing/sysfs-bus-pci; the names and offsets of the configuration space are those of
include/uapi/linux/pci_regs.h.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NVIDIA = "10de"
BUS_ID = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")

# An unprivileged reader of ``config`` gets the first 64 bytes; the extended capabilities begin here.
EXTENDED = 0x100
CONFIG_BYTES = 4096
CAPABILITY_ACS = 0x000D
# Access control services, PCI_ACS_*: what the bits of the control register turn on. The two redirects send what one
# device wants from another below the same switch up to the root complex, where an IOMMU looks at it.
ACS_BITS = {
    0x01: "SrcValid",
    0x02: "TransBlk",
    0x04: "ReqRedir",
    0x08: "CmpltRedir",
    0x10: "UpstreamFwd",
    0x20: "EgressCtrl",
    0x40: "DirectTrans",
}
ACS_REDIRECT = 0x04 | 0x08

LINK_WIDTHS = (1, 2, 4, 8, 12, 16, 32)  # what a link can have; a device that is gone reads as 63
AER_FILES = {"fatal": "aer_dev_fatal", "nonfatal": "aer_dev_nonfatal", "correctable": "aer_dev_correctable"}


def gpus_on_bus(root: str = "/") -> list[dict[str, Any]]:
    """Return NVIDIA's display devices on the PCI bus; needs no driver, and reads only what the kernel keeps cached.

    Virtual functions (vGPU) are not counted: they are parts of a GPU that is.

    root: the directory that stands for ``/``.

    Keys: bus_id ("0000:01:00.0"), pci_id ("10de:2bb5"), class ("0x030200"), driver (the one bound, or None). The list
    is empty where there is no PCI bus.
    """
    found = []
    for path in sorted(Path(root, "sys/bus/pci/devices").glob("*")):
        texts = {name: read_text(path / name) for name in ("vendor", "device", "class")}
        if is_gpu(texts) and not (path / "physfn").is_symlink():
            found.append(
                {
                    "bus_id": path.name,
                    "pci_id": pci_id(texts),
                    "class": texts["class"],
                    "driver": link_name(path / "driver"),
                }
            )
    return found


def read_text(path: Path) -> str | None:
    """Return a small text file without the white space around it; None when it is not there or not readable."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip()
    except OSError:
        return None


def link_name(path: Path) -> str | None:
    """Return the last part of what a symbolic link points to; None when there is no such link."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def is_gpu(texts: Mapping[str, str | None]) -> bool:
    """Tell whether the files ``vendor`` and ``class`` are those of an NVIDIA display device (PCI class 03)."""
    return texts.get("vendor") == f"0x{NVIDIA}" and (texts.get("class") or "").startswith("0x03")


def pci_id(texts: Mapping[str, str | None]) -> str:
    """Return vendor and device as "10de:2bb5"; "?" for what is not known."""
    vendor, device = (str(texts.get(name) or "?").removeprefix("0x") for name in ("vendor", "device"))
    return f"{vendor}:{device}"


def short_bus_id(text: str) -> str:
    """Return a bus id as sysfs writes it: NVML has eight digits of domain, and capitals."""
    domain, separator, rest = text.lower().partition(":")
    return f"{domain[-4:] if domain[:-4].strip('0') == '' else domain}{separator}{rest}"


def number(text: str | None) -> int | None:
    """Return the number of a sysfs file, such as "16" or "0x10"; None for anything else."""
    try:
        return int((text or "").strip(), 0)
    except ValueError:
        return None


def link_width(text: str | None) -> int | None:
    """Return the number of lanes; None when the file does not tell one, as of a device that is gone."""
    lanes = number(text)
    return lanes if lanes in LINK_WIDTHS else None


def link_speed(text: str | None) -> float | None:
    """Return the speed in GT/s of a file such as "32.0 GT/s PCIe"; None for "Unknown"."""
    match = re.match(r"(\d{1,4}(?:\.\d{1,3})?) GT/s", text or "")
    return float(match.group(1)) if match else None


def bars(text: str | None) -> list[dict[str, int]]:
    """Return the memory windows (BARs) of the file ``resource``: {index, start, size}, sizes in bytes.

    Each line is "start end flags"; the first six are the BARs, an unused one is all zero.
    """
    found = []
    for index, line in enumerate((text or "").splitlines()[:6]):
        fields = [number(field) for field in line.split()]
        if len(fields) != 3 or None in fields:
            continue
        start, end, flags = (field or 0 for field in fields)
        if flags and end >= start:
            found.append({"index": index, "start": start, "size": end - start + 1})
    return found


def aer_total(text: str | None) -> int | None:
    """Return the number of errors of a file ``aer_dev_*``; None when the device has no such file.

    Lines are "<name> <count>", the last one TOTAL_ERR_*; it is taken alone, since the others add up to it.
    """
    counts = [int(line.split()[1]) for line in (text or "").splitlines() if re.match(r"^\S+ \d{1,19}$", line)]
    totals = [line for line in (text or "").splitlines() if re.match(r"^TOTAL_ERR_\S+ \d{1,19}$", line)]
    if totals:
        return int(totals[-1].split()[1])
    return sum(counts) if counts else None


def aer_named(text: str | None) -> dict[str, int]:
    """Return the counters of a file ``aer_dev_*`` that are not zero, without the total."""
    pairs = [line.split() for line in (text or "").splitlines() if re.match(r"^\S+ \d{1,19}$", line)]
    return {name: int(count) for name, count in pairs if int(count) and not name.startswith("TOTAL")}


def answers(config: bytes) -> bool | None:
    """Tell whether a device answers: reads of one that is gone give only ones. None when nothing was read."""
    return config[:2] != b"\xff\xff" if len(config) >= 2 else None


def acs(config: bytes) -> dict[str, Any]:
    """Return the access control services of a configuration space, as {readable, capable, control, redirect, on}.

    readable: whether the extended capabilities could be read at all; only root can. capable: whether there are such
    services. control: their control register. on: the names of its bits, as lspci writes them. redirect: whether
    peer-to-peer requests or completions are sent upstream.
    """
    nothing = {"readable": len(config) > EXTENDED, "capable": False, "control": 0, "redirect": False, "on": []}
    offset = extended_capability(config, CAPABILITY_ACS)
    if offset is None or offset + 8 > len(config):
        return nothing
    (control,) = struct.unpack_from("<H", config, offset + 6)
    return {
        "readable": True,
        "capable": True,
        "control": control,
        "redirect": bool(control & ACS_REDIRECT),
        "on": [name for bit, name in ACS_BITS.items() if control & bit],
    }


def extended_capability(config: bytes, wanted: int) -> int | None:
    """Return the offset of an extended capability, or None.

    The capabilities are a linked list from 0x100: 16 bits of id, 4 of version, 12 of the next one's offset. A list
    that runs in a circle or out of the space ends the search.
    """
    offset, seen = EXTENDED, set()
    while EXTENDED <= offset <= len(config) - 4 and offset not in seen:
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == wanted:
            return offset
        offset = header >> 20 & 0xFFC
    return None
