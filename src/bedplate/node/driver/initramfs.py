"""What the initramfs of a kernel holds of the NVIDIA driver, from the listing that the distribution's tool prints."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Optional

from .sysroot import Sysroot

LIST_TIMEOUT_S = 120.0  # a big image, unpacked by a busy node

# Debian and Ubuntu, then dracut (RHEL).
IMAGES = ("/boot/initrd.img-{kernel}", "/boot/initramfs-{kernel}.img")
TOOLS = (("lsinitramfs",), ("lsinitrd",))

ListImage = Callable[[str], Optional[Sequence[str]]]

_FIRMWARE = re.compile(r"(?:^|/)lib/firmware/nvidia/(\d+\.\d+(?:\.\d+)?)/")
_MODULE = re.compile(r"(?:^|/)lib/modules/[^/]+/(.*/)?((?:nvidia|nouveau)[\w-]*)\.ko(?:\.\w+)?$")


def list_image(path: str) -> list[str] | None:
    """Return the names in an initramfs image as lsinitramfs or lsinitrd print them; None when neither can."""
    for tool in TOOLS:
        try:
            done = subprocess.run(
                [*tool, path],
                capture_output=True,
                timeout=LIST_TIMEOUT_S,
                check=True,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
            )
        except (OSError, subprocess.SubprocessError):  # not this distribution's tool, no image of its, or no answer
            continue
        return done.stdout.decode("utf-8", "replace").splitlines()
    return None


def inspect(root: Sysroot, kernel: str, list_of: ListImage) -> dict[str, Any] | None:
    """Return what the initramfs of a kernel holds, None when the kernel has no image.

    list_of: called with the path of the image, returns its names or None.

    Keys: path, bytes, mtime (seconds since the epoch), listed (whether it could be listed), nvidia (module names),
    nouveau (whether it has that module), firmware (driver versions whose firmware it holds).
    """
    for pattern in IMAGES:
        path = pattern.format(kernel=kernel)
        if root.exists(path):
            return {"path": path, "bytes": root.size(path), "mtime": root.mtime(path), **parse(list_of(path))}
    return None


def parse(names: Sequence[str] | None) -> dict[str, Any]:
    """Return the keys listed, nvidia, nouveau and firmware of ``inspect`` for the lines of a listing.

    A line may be a bare name or a line of `ls -l`, of which the last word is the name.
    """
    modules: set[str] = set()
    firmware: set[str] = set()
    for line in names or ():
        words = line.split(" -> ")[0].split()
        if not words:
            continue
        firmware.update(_FIRMWARE.findall(words[-1]))
        match = _MODULE.search(words[-1])
        # kernel/ has modules of the kernel's own that begin so, such as nvidiafb.
        if match and (match.group(2) == "nouveau" or not (match.group(1) or "").startswith("kernel/drivers")):
            modules.add(match.group(2).replace("-", "_"))
    return {
        "listed": names is not None,
        "nvidia": sorted(modules - {"nouveau"}),
        "nouveau": "nouveau" in modules,
        "firmware": sorted(firmware),
    }
