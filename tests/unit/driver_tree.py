"""Build the files of a node with an NVIDIA driver under a directory, and break them one at a time.

``healthy(path)`` is a node with two kernels and driver 580.82.07, open modules, loaded; each test changes what its
fault changes on a real node. Kernel modules are small real ELF files with a .modinfo section, signed as the kernel's
sign-file does it (CMS without certificates and attributes).
"""

from __future__ import annotations

import datetime
import functools
import gzip
import lzma
import os
import struct
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs7
from cryptography.x509.oid import NameOID

from bedplate.node.driver import check as driver

VERSION = "580.82.07"
OLD = "575.57.08"
REVISION = "-0ubuntu1"
KERNEL = "6.8.0-79-generic"
NEXT_KERNEL = "6.8.0-84-generic"
BOOT = 1_760_000_000  # seconds since the epoch
OPEN, PROPRIETARY = "Dual MIT/GPL", "NVIDIA"
SERVER_EDITION = "10de:2bb5"
MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem")
GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
SHIM = "605dab50-e046-4300-abb6-3dd810dd8b23"


@dataclass(frozen=True)
class Key:
    """A key with its self-signed certificate, as `openssl req -x509` makes it for DKMS."""

    name: str
    private: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.DER)


@functools.lru_cache
def key(name: str) -> Key:
    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)
    builder = x509.CertificateBuilder(subject, subject, private.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(start).not_valid_after(start + datetime.timedelta(days=36500))
    return Key(name, private, builder.sign(private, hashes.SHA256()))


def elf_module(texts: dict[str, str]) -> bytes:
    """Return an ELF relocatable file for x86_64 with these texts in .modinfo and nothing else."""
    modinfo = b"".join(f"{name}={value}".encode() + b"\0" for name, value in texts.items())
    names = b"\0.modinfo\0.shstrtab\0"
    body = modinfo + names
    body += b"\0" * (-len(body) % 8)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, 3, 2)
    section = struct.Struct("<IIQQQQIIQQ")
    table = section.pack(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    table += section.pack(1, 1, 2, 0, 64, len(modinfo), 0, 0, 1, 0)
    table += section.pack(10, 3, 0, 0, 64 + len(modinfo), len(names), 0, 0, 1, 0)
    return header + body + table


def signed(module: bytes, by: Key) -> bytes:
    """Return a module with the trailer that sign-file appends."""
    options = [pkcs7.PKCS7Options.DetachedSignature, pkcs7.PKCS7Options.Binary, pkcs7.PKCS7Options.NoAttributes]
    builder = pkcs7.PKCS7SignatureBuilder().set_data(module)
    builder = builder.add_signer(by.certificate, by.private, hashes.SHA256())
    signature = builder.sign(serialization.Encoding.DER, [*options, pkcs7.PKCS7Options.NoCerts])
    header = struct.pack(">BBBBB3xI", 0, 0, 2, 0, 0, len(signature))
    return module + signature + header + b"~Module signature appended~\n"


def signature_list(*certificates: bytes) -> bytes:
    """Return EFI signature lists, one certificate in each, as shim writes them."""
    kind, owner = uuid.UUID("a5c059a1-94e4-4aa7-87b5-ab155c2bf072").bytes_le, uuid.UUID(SHIM).bytes_le
    lists = [
        struct.pack("<16sIII", kind, 28 + 16 + len(data), 0, 16 + len(data)) + owner + data for data in certificates
    ]
    return b"".join(lists)


@dataclass
class Tree:
    """A node's files under ``root``. Every path is as on the node."""

    root: Path
    images: dict[str, list[str] | None] = field(default_factory=dict)

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, content: str | bytes, *, mtime: float = BOOT - 7200) -> None:
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
        os.utime(place, (mtime, mtime))

    def link(self, path: str, target: str) -> None:
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)

    def remove(self, pattern: str) -> None:
        """Remove what a glob pattern matches; it must match something."""
        found = sorted(self.root.glob(pattern.lstrip("/")), reverse=True)
        assert found, pattern
        for place in found:
            for child in sorted(place.rglob("*"), reverse=True) if place.is_dir() and not place.is_symlink() else []:
                child.rmdir() if child.is_dir() and not child.is_symlink() else child.unlink()
            place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()

    # kernels and modules

    def kernel(self, release: str, *, headers: bool = True) -> None:
        self.write(f"/boot/vmlinuz-{release}", "")
        self.write(f"/lib/modules/{release}/modules.order", "")
        if headers:
            self.write(f"/usr/src/linux-headers-{release}/Makefile", "")
            self.link(f"/lib/modules/{release}/build", f"/usr/src/linux-headers-{release}")

    def module(
        self,
        release: str,
        version: str,
        name: str = "nvidia",
        *,
        license: str = OPEN,  # noqa: A002  # the key in .modinfo
        by: Key | None = None,
        place: str = "updates/dkms",
        suffix: str = "",
        vermagic: str = "",
        mtime: float = BOOT - 3600,
    ) -> str:
        """Write one module; return its path on the node."""
        texts = {"version": version, "license": license, "name": name.replace("-", "_")}
        content = elf_module({**texts, "vermagic": f"{vermagic or release} SMP preempt mod_unload modversions "})
        content = signed(content, by) if by else content
        pack: dict[str, Any] = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress, ".zst": bytes}
        path = f"/lib/modules/{release}/{place}/{name}.ko{suffix}"
        self.write(path, pack[suffix](content), mtime=mtime)
        return path

    def modules(self, release: str, version: str, **options: Any) -> None:
        """Write all modules of a driver for a kernel, and what DKMS has on record of them."""
        for name in MODULES:
            self.module(release, version, name, **options)
        self.dkms(version, release)

    def dkms(self, version: str, release: str, *, installed: bool = True) -> None:
        base = "/var/lib/dkms/nvidia"
        self.write(f"{base}/{version}/{release}/x86_64/module/nvidia.ko", "")
        self.link(f"{base}/{version}/source", f"/usr/src/nvidia-{version}")
        if installed:
            self.link(f"{base}/kernel-{release}-x86_64", f"{version}/{release}/x86_64")

    def failed_build(self, version: str, release: str) -> None:
        """Leave what DKMS leaves when the compiler refuses the module's source; the text is a real one."""
        base = f"/var/lib/dkms/nvidia/{version}"
        log = (
            f"DKMS make.log for nvidia-{version} for kernel {release} (x86_64)\n"
            "Wed Dec  2 01:57:43 UTC 2026\n"
            "   gcc-12 -Wp,-MMD -Werror=date-time -c -o nv-pci.o nv-pci.c\n"
            f"{base}/build/nvidia/nv-pci.c:223:9: error: too few arguments to function 'pci_resize_resource'\n"
            f"make[3]: *** [scripts/Makefile.build:255: {base}/build/nvidia/nv-pci.o] Error 1\n"
        )
        self.write(f"{base}/build/make.log", log)

    def initramfs(self, release: str, names: list[str] | None, *, mtime: float = BOOT - 1800) -> None:
        """Write an image whose listing is these names; None stands for a tool that does not answer."""
        path = f"/boot/initrd.img-{release}"
        self.write(path, b"x" * 1024, mtime=mtime)
        self.images[path] = names

    # what runs

    def loaded(self, version: str, *, proprietary: bool = False) -> None:
        name = "UNIX x86_64 Kernel Module" if proprietary else "UNIX Open Kernel Module for x86_64"
        line = (
            f"NVRM version: NVIDIA {name}  {version}  Release Build  (dvs-builder@U22)  Tue Sep 23 09:55:41 UTC 2025\n"
        )
        self.write("/proc/driver/nvidia/version", f"{line}GCC version:  \n")
        self.write("/proc/driver/nvidia/params", 'EnableMSI: 1\nRegistryDwords: ""\n')
        self.write("/proc/modules", "nvidia_uvm 2076672 0 - Live 0x0\nnvidia 14340096 1 nvidia_uvm, Live 0x0\n")
        self.write("/sys/module/nvidia/version", f"{version}\n")
        self.write("/sys/module/nvidia/initstate", "live\n")
        self.write("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n")

    def unloaded(self) -> None:
        self.write("/proc/modules", "ext4 1146880 1 - Live 0x0\n")
        self.remove("/proc/driver/nvidia")
        self.remove("/sys/module/nvidia*")

    def nouveau(self) -> None:
        self.write("/proc/modules", "nouveau 2957312 0 - Live 0x0\n")
        self.write("/sys/module/nouveau/initstate", "live\n")

    def gpu(self, bus: str, pci_id: str = SERVER_EDITION) -> None:
        base = f"/sys/bus/pci/devices/{bus}"
        vendor, device = pci_id.split(":")
        self.write(f"{base}/vendor", f"0x{vendor}\n")
        self.write(f"{base}/device", f"0x{device}\n")
        self.write(f"{base}/class", "0x030200\n")

    # what is installed

    def libraries(self, version: str) -> None:
        base = "/usr/lib/x86_64-linux-gnu"
        for name in ("libnvidia-ml.so", "libcuda.so"):
            for old in self.at(base).glob(f"{name}.*"):
                old.unlink()
            self.write(f"{base}/{name}.{version}", "")
            self.link(f"{base}/{name}.1", f"{name}.{version}")

    def firmware(self, version: str) -> None:
        self.write(f"/lib/firmware/nvidia/{version}/gsp_ga10x.bin", "")

    def packages(self, version: str, *, status: str = "install ok installed", revision: str = REVISION) -> None:
        """Write dpkg's record of the driver's packages, all of one version."""
        names = ["nvidia-utils-580", "libnvidia-compute-580", "nvidia-dkms-580-open", "nvidia-firmware-580-580.82.07"]
        stanzas = ["Package: bash\nStatus: install ok installed\nVersion: 5.2.15-2\nDescription: shell\n Version: 1\n"]
        stanzas += [
            f"Package: {name}\nStatus: {status}\nSource: nvidia-graphics-drivers-580\nVersion: {version}{revision}\n"
            for name in names
        ]
        self.write("/var/lib/dpkg/status", "\n".join(stanzas))

    def history(self, *stanzas: str) -> None:
        self.write("/var/log/apt/history.log", "\n" + "\n".join(stanzas))

    def unattended_upgrades(self, blacklist: str) -> None:
        self.write("/usr/bin/unattended-upgrade", "#!/usr/bin/python3\n")
        self.write("/etc/apt/apt.conf.d/20auto-upgrades", 'APT::Periodic::Unattended-Upgrade "1";\n')
        self.write("/etc/apt/apt.conf.d/50unattended-upgrades", blacklist)

    def efi(self, *, secure_boot: bool, enrolled: tuple[Key, ...] = (), validation: bool = True) -> None:
        base = "/sys/firmware/efi/efivars"
        attributes = struct.pack("<I", 6)
        self.write(f"{base}/SecureBoot-{GLOBAL}", attributes + bytes([secure_boot]))
        self.write(f"{base}/SetupMode-{GLOBAL}", attributes + b"\0")
        self.write(f"{base}/MokListRT-{SHIM}", attributes + signature_list(*(item.der for item in enrolled)))
        if not validation:
            self.write(f"{base}/MokSBStateRT-{SHIM}", attributes + b"\1")

    # the checks

    def inspect(self) -> dict[str, Any]:
        return driver.inspect(str(self.root), list_image=self.images.get)


def healthy(root: Path) -> Tree:
    """Return a node as the role leaves it: two kernels, driver 580.82.07 loaded, no Secure Boot."""
    tree = Tree(root)
    tree.write("/etc/os-release", 'ID=ubuntu\nVERSION_ID="24.04"\n')
    tree.write("/proc/sys/kernel/osrelease", f"{KERNEL}\n")
    tree.write("/proc/stat", f"cpu 1 2 3\nbtime {BOOT}\n")
    tree.write("/proc/cmdline", "BOOT_IMAGE=/boot/vmlinuz root=/dev/sda1 ro quiet\n")
    for release in (KERNEL, NEXT_KERNEL):
        tree.kernel(release)
        tree.modules(release, VERSION)
        tree.initramfs(release, ["bin/sh", "usr/lib/modules/x/kernel/fs/ext4/ext4.ko"])
    for index in range(8):
        tree.gpu(f"0000:{index + 1:02x}:00.0")
    tree.loaded(VERSION)
    tree.libraries(VERSION)
    tree.firmware(VERSION)
    tree.packages(VERSION)
    tree.write("/etc/modprobe.d/nvidia-graphics-drivers.conf", "blacklist nouveau\nalias nouveau off\n")
    return tree
