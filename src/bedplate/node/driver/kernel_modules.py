"""Kernels that can boot, and the NVIDIA modules that each of them would load.

Everything is read from files: /boot, /lib/modules, the DKMS tree, and the modules' own bytes. A module is an
ELF relocatable file whose section .modinfo holds "key=value" texts (linux/module.h, MODULE_INFO), optionally
followed by a signature (the kernel's scripts/sign-file.c and linux/module_signature.h).
"""

from __future__ import annotations

import lzma
import os
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from typing import Any

from .der import DerError, signer
from .sysroot import Sysroot

MAX_MODULE = 512 << 20  # bytes of a module, unpacked; nvidia.ko has about 100 MiB
MAX_MODINFO = 4 << 20  # bytes of .modinfo
MODINFO_TIMEOUT_S = 30.0
SIGNATURE_MAGIC = b"~Module signature appended~\n"
PKEY_ID_PKCS7 = 2

_SHDR = struct.Struct("<IIQQQQIIQQ")
_MODULE_SIGNATURE = struct.Struct(">BBBBB3xI")  # algorithm, hash, id type, signer's and key id's length, length

# Where packages put modules, in the order in which depmod prefers them (depmod.d(5), "search"): updates/dkms is
# DKMS's, extra and weak-updates are RHEL's, kernel/nvidia-* are Ubuntu's prebuilt ones. The rest of kernel/ has
# modules of the kernel's own whose names begin with nvidia as well.
PLACES = ("updates", "extra", "weak-updates")
MAX_DIRECTORIES = 2000

_MODULE_FILE = re.compile(r"(nvidia[\w-]*)\.ko(\.xz|\.zst|\.gz)?\Z")
_RELEASE = re.compile(r"[\w.+~-]{1,64}")  # what uname -r can say: 64 bytes (linux/utsname.h), no slashes
_DKMS_NAME = re.compile(r"nvidia")
# The first line of DKMS's log: "DKMS make.log for nvidia-580.82.07 for kernel 6.8.0-79-generic (x86_64)".
_LOG_KERNEL = re.compile(r"DKMS \(?make\.log\)? for \S+ for (?:kernel )?(\S+) \(")
# What the compiler, DKMS and the shell say: "nv-pci.c:223:9: error: too few arguments to function".
_LOG_ERROR = re.compile(r"\berror: |: not found$", re.IGNORECASE)
MAKE_LOG_LIMIT = 16 << 20


class ModuleError(ValueError):
    """The file is not a kernel module that can be read; the text says why."""


def modinfo(data: bytes) -> dict[str, str]:
    """Return the texts of .modinfo of a module in ELF64, little-endian, the first one of each key.

    Raises ModuleError for anything else.
    """
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        raise ModuleError("not a 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", data, 40)
    entry, count, names_at = struct.unpack_from("<HHH", data, 58)
    if entry != _SHDR.size or not count or names_at >= count or offset + entry * count > len(data):
        raise ModuleError("its section table lies outside the file")
    sections = [_SHDR.unpack_from(data, offset + entry * index) for index in range(count)]
    names_offset, names_size = sections[names_at][4:6]
    wanted = b".modinfo\0"
    for section in sections:
        start = names_offset + section[0]
        if section[0] + len(wanted) <= names_size and data[start : start + len(wanted)] == wanted:
            at, size = section[4:6]
            if size > MAX_MODINFO or at + size > len(data):
                raise ModuleError("its section .modinfo lies outside the file")
            return _modinfo_texts(data[at : at + size])
    raise ModuleError("it has no section .modinfo")


def _modinfo_texts(section: bytes) -> dict[str, str]:
    """Return the texts of a section .modinfo by key."""
    found: dict[str, str] = {}
    for text in section.decode("utf-8", "replace").split("\0"):
        key, separator, value = text.partition("=")
        if separator:
            found.setdefault(key, value.strip())
    return found


def signature(data: bytes) -> dict[str, Any]:
    """Return {"signed": bool, "signer": name, "serial": hex, "error": text} of a module's trailer.

    "signer" and "serial" are empty when the module is not signed, or when the signature cannot be read; then
    "error" says why. The private key "_signer" holds a der.Signer for comparisons.
    """
    found: dict[str, Any] = {"signed": False, "signer": "", "serial": "", "error": "", "_signer": None}
    end = len(data) - len(SIGNATURE_MAGIC)
    if end < 0 or data[end:] != SIGNATURE_MAGIC:
        return found
    found["signed"] = True
    header_at = end - _MODULE_SIGNATURE.size
    if header_at < 0:
        return {**found, "error": "the signature's header lies outside the file"}
    _, _, kind, signer_length, key_length, length = _MODULE_SIGNATURE.unpack_from(data, header_at)
    if kind != PKEY_ID_PKCS7 or signer_length or key_length or length > header_at:
        return {**found, "error": "the signature is not of a known kind"}
    try:
        who = signer(data[header_at - length : header_at])
    except DerError as error:
        return {**found, "error": str(error)}
    return {**found, "signer": who.name or who.key_id.hex(), "serial": who.serial, "_signer": who}


def unpack(data: bytes, suffix: str) -> bytes:
    """Return the module inside a file whose name ends so: "", ".gz" or ".xz". Raises ModuleError."""
    if not suffix:
        return data
    try:
        if suffix == ".xz":
            unpacked = lzma.LZMADecompressor().decompress(data, MAX_MODULE)
        else:
            unpacked = zlib.decompressobj(wbits=31).decompress(data, MAX_MODULE)
    except (lzma.LZMAError, zlib.error, EOFError) as error:
        raise ModuleError(f"it cannot be unpacked: {error}") from error
    return unpacked


def read_module(root: Sysroot, path: str) -> dict[str, Any]:
    """Return what a module's file says of itself; unknown things are None, and "error" says why.

    Keys: path, name, version, license, vermagic, signed, signer, serial, error, mtime (seconds since the epoch).
    """
    match = _MODULE_FILE.search(os.path.basename(path))
    suffix = (match and match.group(2)) or ""
    found: dict[str, Any] = {
        "path": path,
        "name": match.group(1).replace("-", "_") if match else "",
        "version": None,
        "license": None,
        "vermagic": None,
        "signed": None,
        "signer": "",
        "serial": "",
        "error": "",
        "mtime": root.mtime(path),
        "_signer": None,
    }
    if suffix == ".zst":
        return {**found, **_ask_modinfo(root, path)}
    data = root.read(path, MAX_MODULE)
    if data is None:
        return {**found, "error": f"it cannot be read: {root.unreadable.get(path, 'it is gone')}"}
    try:
        module = unpack(data, suffix)
        texts = modinfo(module)
    except ModuleError as error:
        return {**found, "error": str(error)}
    signed = signature(module)
    return {
        **found,
        "name": texts.get("name") or found["name"],
        "version": texts.get("version"),
        "license": texts.get("license"),
        "vermagic": texts.get("vermagic"),
        **signed,
    }


def _ask_modinfo(root: Sysroot, path: str) -> dict[str, Any]:
    """Return what the command modinfo says of a module that Python cannot unpack (Zstandard)."""
    try:
        done = subprocess.run(
            ["modinfo", "-0", root.path(path)],  # noqa: S607  # kmod is in /sbin or /usr/sbin
            capture_output=True,
            timeout=MODINFO_TIMEOUT_S,
            check=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        )
    except FileNotFoundError:
        return {"error": "it is compressed with Zstandard, and there is no command modinfo to read it"}
    except subprocess.TimeoutExpired:
        return {"error": f"modinfo did not answer within {MODINFO_TIMEOUT_S:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"error": f"modinfo failed: {error.stderr.decode('utf-8', 'replace').strip()[:200]}"}
    except OSError as error:
        return {"error": f"modinfo cannot be run: {error}"}
    return parse_modinfo_output(done.stdout)


def parse_modinfo_output(output: bytes) -> dict[str, Any]:
    """Return the keys of ``read_module`` in the output of ``modinfo -0``: "key=value" or "key: value", ended by NUL."""
    texts: dict[str, str] = {}
    for text in output.decode("utf-8", "replace").split("\0"):
        match = re.match(r"(\w+)\s*[:=]\s*(.*)", text.strip(), re.DOTALL)
        if match:
            texts.setdefault(match.group(1), match.group(2))
    found: dict[str, Any] = {key: texts[key] for key in ("version", "license", "vermagic", "name") if texts.get(key)}
    found["signed"] = "sig_id" in texts or "signer" in texts
    found["signer"] = texts.get("signer", "")
    found["serial"] = texts.get("sig_key", "").replace(":", "").lower().lstrip("0")
    return found


def module_files(root: Sysroot, kernel: str) -> list[str]:
    """Return the paths of the NVIDIA module files of a kernel, in the order in which modprobe prefers them.

    Where modules.dep names one, that one is first: it is what modprobe loads.
    """
    base = f"/lib/modules/{kernel}"
    prebuilt = [f"kernel/{name}" for name in root.names(f"{base}/kernel") if name.startswith("nvidia")]
    found = [path for place in (*PLACES, *prebuilt) for path in sorted(_walk(root, f"{base}/{place}"))]
    video = f"{base}/kernel/drivers/video"  # NVIDIA's own installer; its subdirectories are the kernel's
    found += [f"{video}/{name}" for name in root.names(video) if _MODULE_FILE.match(name)]
    listed = set(re.findall(r"^(\S+?):", root.text(f"{base}/modules.dep", 64 << 20) or "", re.MULTILINE))
    return sorted(found, key=lambda path: path[len(base) + 1 :] not in listed)


def _walk(root: Sysroot, top: str) -> Iterator[str]:
    """Yield the NVIDIA module files below a directory; links to directories are not followed."""
    left = [top]
    seen = 0
    while left and seen < MAX_DIRECTORIES:
        directory = left.pop()
        seen += 1
        try:
            entries = list(os.scandir(root.path(directory)))
        except OSError:  # not there, or not a directory
            continue
        for entry in entries:
            path = f"{directory}/{entry.name}"
            if _MODULE_FILE.match(entry.name):
                yield path
            elif entry.is_dir(follow_symlinks=False):
                left.append(path)


def dkms_states(root: Sysroot) -> list[dict[str, str]]:
    """Return the states of DKMS's NVIDIA modules as {module, version, kernel, state, error, log}.

    state: "added" (no kernel), "built", or "installed" (DKMS keeps a link kernel-<kernel>-<arch> beside the
    versions for what is installed; dkms(8) and its source, function module_status), as `dkms status` derives them; and
    "failed", which it does not show: the last build for this kernel left its log, and nothing else. error: the first
    error in that log.
    """
    tree = "/var/lib/dkms"
    states: list[dict[str, str]] = []
    for module in root.names(tree):
        if not _DKMS_NAME.match(module):
            continue
        names = root.names(f"{tree}/{module}")
        for version in names:
            place = f"{tree}/{module}/{version}"
            if version.startswith("kernel-") or not root.is_dir(place):
                continue
            built = list(_built(root, place))
            for kernel, arch in built:
                link = f"kernel-{kernel}-{arch}"
                installed = link in names and root.is_dir(f"{place}/{kernel}/{arch}")
                installed = installed and _same(root, f"{tree}/{module}/{link}", f"{place}/{kernel}/{arch}")
                state = "installed" if installed else "built"
                states.append(_state(module, version, kernel, state))
            failed = _failed(root, module, version)
            if failed and failed["kernel"] not in [kernel for kernel, _ in built]:
                states.append(failed)
            elif not built:
                states.append(_state(module, version, "", "added"))
    return states


def _state(module: str, version: str, kernel: str, state: str, *, error: str = "", log: str = "") -> dict[str, str]:
    """Return one state."""
    return {"module": module, "version": version, "kernel": kernel, "state": state, "error": error, "log": log}


def _failed(root: Sysroot, module: str, version: str) -> dict[str, str] | None:
    """Return the state of a build that failed: DKMS leaves the build directory then, with its log."""
    path = f"/var/lib/dkms/{module}/{version}/build/make.log"
    lines = (root.text(path, MAKE_LOG_LIMIT) or "").splitlines()
    match = _LOG_KERNEL.match(lines[0][:500]) if lines else None
    if not match:
        return None
    # Command lines are longer than messages, and have -Werror in them.
    error = next((line for line in lines if len(line) < 1000 and _LOG_ERROR.search(line)), "")
    error = re.sub(r"^\S*/(?=[^/\s]+:)", "", error)[:300]  # the path of the build directory says nothing
    return _state(module, version, match.group(1), "failed", error=error, log=path)


def _built(root: Sysroot, place: str) -> Iterator[tuple[str, str]]:
    """Yield kernel and architecture of each finished build of a module's version."""
    for kernel in root.names(place):
        if kernel in ("build", "source"):
            continue
        for arch in root.names(f"{place}/{kernel}"):
            if root.is_dir(f"{place}/{kernel}/{arch}/module"):
                yield kernel, arch


def _same(root: Sysroot, first: str, second: str) -> bool:
    """Tell whether two paths are the same directory."""
    try:
        return os.path.samefile(root.path(first), root.path(second))
    except OSError:  # a link that leads nowhere
        return False


def kernels(root: Sysroot) -> dict[str, Any]:
    """Return {"running": release or None, "bootable": sorted releases, "images": whether /boot has any}.

    A kernel can boot when /boot or its module directory holds its image. Where there is no image at all, as in a
    container, every directory of modules counts, so that what DKMS built can be checked there as well.
    """
    modules = [name for name in root.names("/lib/modules") if root.is_dir(f"/lib/modules/{name}")]
    images = {name[len("vmlinuz-") :] for name in root.names("/boot") if name.startswith("vmlinuz-")}
    images = {name for name in images if "rescue" not in name and not name.endswith((".old", ".bak", ".dpkg-bak"))}
    images |= {name for name in modules if root.exists(f"/lib/modules/{name}/vmlinuz")}
    release = root.line("/proc/sys/kernel/osrelease") or (os.uname().release if root.root == "/" else "")
    running = release if _RELEASE.fullmatch(release) else None
    return {"running": running, "bootable": sorted(images or modules, key=natural), "images": bool(images)}


def natural(release: str) -> list[Any]:
    """Return a key that sorts kernel releases by their numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", release) if part]


def headers(root: Sysroot, kernel: str) -> bool:
    """Tell whether the headers of a kernel are there: /lib/modules/<kernel>/build leads to a Makefile."""
    return root.exists(f"/lib/modules/{kernel}/build/Makefile")
