"""A directory that plays a node: sysfs, procfs and kernel log of a healthy 8-GPU machine, and ways to break it.

The machine has two GPUs behind each of four PCIe switches. The bus ids of the GPUs are those that tests/fakegpu
presents, so that both can be used together:

    pci0000:00 ── 0000:00:01.1 (root port) ── 0000:02:00.0 (switch) ─┬─ 0000:03:00.0 ── 0000:01:00.0 (GPU 0)
                                                                     └─ 0000:03:10.0 ── 0000:11:00.0 (GPU 1)

    python tests/unit/host_tree.py DIRECTORY    writes the healthy one, to serve as ``bedplate_sysroot`` of a test node
"""

from __future__ import annotations

import shutil
import struct
import sys
from pathlib import Path
from typing import Any

GPUS = 8
DRIVER = "580.82.07"
VRAM_MIB = 97887
BAR1_MIB = 131072

# Control registers: what a BIOS with ACS off leaves, and what one with ACS on sets (lspci: ReqRedir+ CmpltRedir+).
ACS_OFF = 0x0000
ACS_REDIRECTING = 0x001D


def gpu_bus_id(index: int) -> str:
    return f"0000:{0x10 * index + 1:02x}:00.0"


def config_space(vendor: int, device: int, acs: int | None = None) -> bytes:
    """4096 bytes as the kernel's file ``config`` has them: AER at 0x100 and, for bridges, ACS after it."""
    space = bytearray(4096)
    struct.pack_into("<HH", space, 0, vendor, device)
    struct.pack_into("<I", space, 0x100, 0x0001 | 2 << 16 | (0x148 if acs is not None else 0) << 20)
    if acs is not None:
        struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x00FF, acs)
    return bytes(space)


def resource(bar1_mib: int) -> str:
    """The file ``resource``: BAR0 16 MiB of registers, BAR1 (64 bit, prefetchable) the memory, BAR3 32 MiB."""
    windows = [(0xB8000000, 16 << 20, 0x40200), (0x10000000000, bar1_mib << 20, 0x14220C), None]
    windows += [(0x38000000000, 32 << 20, 0x14220C), None, None, None]
    lines = [
        f"{w[0]:#018x} {w[0] + w[1] - 1:#018x} {w[2]:#018x}" if w else " ".join(["0x" + "0" * 16] * 3) for w in windows
    ]
    return "\n".join(lines) + "\n"


def aer(kind: str, **counts: int) -> str:
    """A file ``aer_dev_*``: named counters, and their sum."""
    names = {
        "fatal": ("Undefined", "DLP", "SDES", "TLP", "FCP", "CmpltTO", "MalfTLP", "UnsupReq"),
        "nonfatal": ("Undefined", "DLP", "SDES", "TLP", "FCP", "CmpltTO", "MalfTLP", "UnsupReq"),
        "correctable": ("RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr", "CorrIntErr", "HeaderOF"),
    }[kind]
    total = {"fatal": "TOTAL_ERR_FATAL", "nonfatal": "TOTAL_ERR_NONFATAL", "correctable": "TOTAL_ERR_COR"}[kind]
    lines = [f"{name} {counts.get(name, 0)}" for name in names]
    return "\n".join([*lines, f"{total} {sum(counts.values())}"]) + "\n"


class HostTree:
    """The tree under ``root``; every method changes one thing."""

    def __init__(self, root: Path, gpus: int = GPUS) -> None:
        self.root = root
        self.log_lines: list[str] = []
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        for index in range(gpus):
            self._add_gpu(index)
        self._device("sys/devices/pci0000:00/0000:00:14.0", 0x8086, 0x1234, class_="0x0c0330")
        self.module("nvidia", DRIVER)
        self.module("nvidia_uvm", DRIVER)
        self.hmm("Y")  # uvm_disable_hmm=1
        self.cmdline("BOOT_IMAGE=/vmlinuz-6.8.0 root=/dev/sda2 ro quiet iommu=pt")
        self.write("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
        self.write("etc/ld.so.conf.d/000_cuda.conf", "/usr/local/cuda/targets/x86_64-linux/lib\n")
        (root / "sys/class/iommu/dmar0").mkdir(parents=True)
        self.write("dev/shm/.keep", "")
        self.process(812, "nvidia-persiste", "/dev/nvidiactl", "/dev/nvidia0")
        self.process(1, "systemd", "/dev/null")
        self.log("Linux version 6.8.0", f"NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}")

    # ---- whole devices

    def _add_gpu(self, index: int) -> None:
        domain, pair = f"{0x20 * (index // 2):02x}", 0x20 * (index // 2)
        root_port = f"sys/devices/pci0000:{domain}/0000:{pair:02x}:01.1"
        switch = f"{root_port}/0000:{pair + 2:02x}:00.0"
        port = f"{switch}/0000:{pair + 3:02x}:{0x10 * (index % 2):02x}.0"
        for path in (root_port, switch, port):
            if not (self.root / path).exists():
                self._device(path, 0x1022, 0x14AB, class_="0x060400", acs=ACS_OFF)
        path = f"{port}/{gpu_bus_id(index)}"
        self._device(path, 0x10DE, 0x2BB5, class_="0x030200")
        self.gpu_file(index, "resource", resource(BAR1_MIB))
        self.bind(index, "nvidia")
        self.iommu_type(index, "identity")

    def _device(self, path: str, vendor: int, device: int, *, class_: str, acs: int | None = None) -> None:
        files: dict[str, str | bytes] = {
            "vendor": f"{vendor:#06x}\n",
            "device": f"{device:#06x}\n",
            "class": f"{class_}\n",
            "current_link_width": "16\n",
            "max_link_width": "16\n",
            "current_link_speed": "2.5 GT/s PCIe\n",  # at rest
            "max_link_speed": "32.0 GT/s PCIe\n",
            "numa_node": "0\n",
            "config": config_space(vendor, device, acs),
            **{f"aer_dev_{kind}": aer(kind) for kind in ("fatal", "nonfatal", "correctable")},
        }
        for name, content in files.items():
            self.write(f"{path}/{name}", content)
        link = self.root / "sys/bus/pci/devices" / Path(path).name
        link.symlink_to(Path("../../../..") / path)

    def remove_gpu(self, index: int) -> None:
        """The device is gone from the bus, as after a link that went down."""
        link = self.root / "sys/bus/pci/devices" / gpu_bus_id(index)
        shutil.rmtree(link.resolve())
        link.unlink()

    # ---- one thing of a device

    def path(self, bus_id: str) -> Path:
        return (self.root / "sys/bus/pci/devices" / bus_id).resolve()

    def gpu_file(self, index: int, name: str, content: str | bytes) -> None:
        (self.path(gpu_bus_id(index)) / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    def bind(self, index: int, driver: str | None) -> None:
        link = self.path(gpu_bus_id(index)) / "driver"
        link.unlink(missing_ok=True)
        if driver:
            link.symlink_to(f"../../../../bus/pci/drivers/{driver}")

    def iommu_type(self, index: int, type_: str | None) -> None:
        """The type of the GPU's IOMMU group; None: it is in no group."""
        link = self.path(gpu_bus_id(index)) / "iommu_group"
        link.unlink(missing_ok=True)
        if type_:
            group = self.root / f"sys/kernel/iommu_groups/{30 + index}"
            group.mkdir(parents=True, exist_ok=True)
            (group / "type").write_text(f"{type_}\n")
            link.symlink_to(group)

    def no_iommu(self) -> None:
        shutil.rmtree(self.root / "sys/class/iommu")
        for index in range(GPUS):
            self.iommu_type(index, None)

    def bridges_above(self, index: int) -> list[str]:
        return [part for part in self.path(gpu_bus_id(index)).parts if part.startswith("0000:")][:-1]

    def set_acs(self, bus_id: str, control: int) -> None:
        (self.path(bus_id) / "config").write_bytes(config_space(0x1022, 0x14AB, control))

    def unprivileged(self) -> None:
        """What a user who is not root reads: 64 bytes of each configuration space."""
        for config in self.root.glob("sys/devices/**/config"):
            config.write_bytes(config.read_bytes()[:64])

    # ---- the rest of the machine

    def write(self, path: str, content: str | bytes) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def module(self, name: str, version: str = "") -> None:
        (self.root / "sys/module" / name).mkdir(parents=True, exist_ok=True)
        if version:
            self.write(f"sys/module/{name}/version", f"{version}\n")

    def hmm(self, disabled: str) -> None:
        self.write("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", f"{disabled}\n")

    def cmdline(self, text: str) -> None:
        self.write("proc/cmdline", f"{text}\n")

    def process(self, pid: int, comm: str, *files: str) -> None:
        """A process with these files open."""
        self.write(f"proc/{pid}/comm", f"{comm}\n")
        (self.root / f"proc/{pid}/fd").mkdir(exist_ok=True)
        for number, file in enumerate(files):
            (self.root / f"proc/{pid}/fd/{number}").symlink_to(file)

    def log(self, *lines: str) -> None:
        """Add lines to the kernel log, a second after each other, as /dev/kmsg has them."""
        self.log_lines += lines
        records = [f"4,{n},{(n + 1) * 1000000},-;{line}\n" for n, line in enumerate(self.log_lines)]
        self.write("dev/kmsg", "".join(records))


def healthy_nvml(gpus: int = GPUS) -> dict[str, Any]:
    """What ``gpu.query`` returns for tests/fakegpu without a configuration; a test compares the two."""
    return {
        "error": None,
        "driver_version": DRIVER,
        "nvml_version": f"13.{DRIVER}",
        "cuda_version": "13000",
        "count": gpus,
        "gpus": [
            {
                "index": index,
                "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
                "uuid": f"GPU-fa4e0000-0000-4000-8000-{index:012x}",
                "bus_id": f"0000{gpu_bus_id(index).upper()}",
                "pci_id": "10de:2bb5",
                "compute_capability": "12.0",
                "vbios": "98.02.81.00.07",
                "memory_bytes": VRAM_MIB << 20,
                "memory_used_bytes": 0,
                "bar1_bytes": BAR1_MIB << 20,
                "ecc": True,
                "ecc_pending": True,
                "ecc_errors": {"corrected": 0, "uncorrected": 0, "corrected_total": 0, "uncorrected_total": 0},
                "remapped_rows": {"correctable": 0, "uncorrectable": 0, "pending": 0, "failed": 0},
                "retired_pages": None,
                "pcie_width": 16,
                "pcie_width_max": 16,
                "pcie_gen": 1,
                "pcie_gen_max": 5,
                "pcie_replays": 0,
                "persistence": True,
                "temperature_c": 34,
                "throttle": [],
                "processes": [],
                "utilization": 0,
                "recovery_action": "none",
                "unanswered": {},
            }
            for index in range(gpus)
        ],
    }


if __name__ == "__main__":
    HostTree(Path(sys.argv[1]))
