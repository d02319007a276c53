"""Build a signed stand-in for NVIDIA's apt repository; see README.md beside this file.

    python tests/aptrepo/build.py OUT

writes OUT/<distro>/x86_64/ (flat repositories: *.deb, Packages, Packages.gz, Release, InRelease, <key>.pub), the same
under OUT/faults/<fault>/, and OUT/fingerprint: the fingerprint of the key that was made for this build.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).resolve().parent
EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", "1756684800"))
STAND_IN = "Bedplate test stand-in, not NVIDIA's software"

# NVIDIA's name of the key file in each distribution's directory.
KEYS = {
    "debian12": "3bf863cc.pub",
    "debian13": "8793F200.pub",
    "ubuntu2404": "3bf863cc.pub",
    "ubuntu2204": "3bf863cc.pub",
}
LIB = "/usr/lib/x86_64-linux-gnu"


@dataclass(frozen=True)
class Package:
    """One binary package. files: path to (mode, bytes), or to ("link", target). Other names as in deb-control(5)."""

    name: str
    version: str
    source: str = ""
    arch: str = "amd64"
    section: str = "non-free/libs"
    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    scripts: dict[str, str] = field(default_factory=dict)
    summary: str = STAND_IN

    def control(self) -> str:
        """Return the control file."""
        installed = sum(len(content) for _, content in self.files.values()) // 1024 + 1
        lines = {"Package": self.name, "Source": self.source, "Version": self.version, "Architecture": self.arch}
        lines |= {"Maintainer": "Bedplate tests <nobody@invalid>", "Installed-Size": str(installed)}
        lines |= {"Section": self.section, "Priority": "optional", "Multi-Arch": "foreign", **self.fields}
        lines["Description"] = f"{self.summary}\n {STAND_IN}."
        return "".join(f"{key}: {value}\n" for key, value in lines.items() if value)

    def file_name(self) -> str:
        """Return the name of the .deb, without the epoch, as dpkg-deb makes it."""
        return f"{self.name}_{self.version.split(':')[-1]}_{self.arch}.deb"

    @cached_property
    def deb(self) -> bytes:
        """Return the .deb (deb(5)): an ar archive of a version and two tars."""
        control = {"/control": ("0644", self.control().encode())}
        control |= {f"/{name}": ("0755", b"#!/bin/sh\nset -e\n" + text.encode()) for name, text in self.scripts.items()}
        conffiles = "".join(f"{path}\n" for path in sorted(self.files) if path.startswith("/etc/"))
        if conffiles:
            control["/conffiles"] = ("0644", conffiles.encode())
        members = {"debian-binary": b"2.0\n", "control.tar.gz": tar(control), "data.tar.gz": tar(self.files)}
        deb = b"!<arch>\n"
        for name, content in members.items():
            deb += f"{name:<16}{EPOCH:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
            deb += b"\n" * (len(content) % 2)
        return deb


def tar(files: dict[str, tuple[str, bytes]]) -> bytes:
    """Return a compressed tar of the files and their directories, all root's."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        folders = {str(parent) for path in files for parent in Path(path).parents}
        for folder in sorted(folders):
            info = tarfile.TarInfo(f".{folder}".rstrip("/") + "/")
            info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, EPOCH
            archive.addfile(info)
        for path, (mode, content) in sorted(files.items()):
            info = tarfile.TarInfo(f".{path}")
            info.mtime = EPOCH
            if mode == "link":
                info.type, info.linkname = tarfile.SYMTYPE, content.decode()
                archive.addfile(info)
            else:
                info.mode, info.size = int(mode, 8), len(content)
                archive.addfile(info, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), 1, mtime=0)


def library() -> bytes:
    """Return a shared object with nothing in it: ldconfig complains of files that are none."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "empty.so"
        command = [os.environ.get("CC", "cc"), "-shared", "-nostdlib", "-s", "-Wl,--build-id=none", "-o", str(output)]
        subprocess.run([*command, "-x", "c", "/dev/null"], check=True)
        return output.read_bytes()


EMPTY = library()

# ---- the driver ----


def virtual(*names: str) -> dict[str, str]:
    """Return the relations by which two branches' packages exclude each other."""
    text = ", ".join(names)
    return {"Provides": text, "Conflicts": text, "Replaces": text}


def depends(*relations: str) -> dict[str, str]:
    return {"Depends": ", ".join(relations)}


def dkms_files(version: str, licence: str) -> dict[str, tuple[str, bytes]]:
    """Return the sources of the module, where DKMS wants them."""
    files = {}
    for source in sorted((HERE / "module").iterdir()):
        text = source.read_text().replace("@VERSION@", version).replace("@LICENSE@", licence)
        files[f"/usr/src/nvidia-{version}/{source.name.removesuffix('.in')}"] = ("0644", text.encode())
    return files


def dkms_scripts(version: str) -> dict[str, str]:
    """Return what dh_dkms writes. Without headers for a kernel, DKMS says so and the package is still configured."""
    return {
        "postinst": f"""case "$1" in
configure)
  if [ -x /usr/lib/dkms/common.postinst ]; then
    /usr/lib/dkms/common.postinst nvidia {version} /usr/share/nvidia "" "$2"
  else
    echo "DKMS is not installed; no module was built." >&2
  fi ;;
esac
""",
        "prerm": f"""case "$1" in
remove|upgrade|deconfigure)
  if [ -x /usr/sbin/dkms ] && [ -n "$(dkms status -m nvidia -v {version})" ]; then
    dkms remove -m nvidia -v {version} --all
  fi ;;
esac
""",
    }


FLAVOURS = {"open": "Dual MIT/GPL", "proprietary": "NVIDIA"}

# The node's own stand-in for "the library on disk is now another one than the loaded module's" (node/simulated-nvidia).
LIBRARY_CHANGED = "[ ! -x /usr/local/sbin/simulated-nvidia ] || /usr/local/sbin/simulated-nvidia library\n"
BLACKLIST = b"blacklist nouveau\noptions nouveau modeset=0\n"
PERSISTENCED = f"""[Unit]
Description=NVIDIA Persistence Daemon ({STAND_IN})

[Service]
ExecStart=/usr/bin/nvidia-persistenced

[Install]
WantedBy=multi-user.target
""".encode()
DAEMON = f"#!/bin/sh\n# {STAND_IN}\nexec sleep infinity\n".encode()


def libraries(names: Iterable[str], version: str) -> dict[str, tuple[str, bytes]]:
    return {f"{LIB}/{name}.so.{version}": ("0644", EMPTY) for name in names}


def firmware(version: str) -> dict[str, tuple[str, bytes]]:
    text = STAND_IN.encode()
    return {f"/lib/firmware/nvidia/{version}/{name}.bin": ("0644", text) for name in ("gsp_ga10x", "gsp_tu10x")}


def suffixed(version: str, revision: str) -> list[Package]:
    """Return a branch as Ubuntu's packages name it up to 580, and without the suffix from 590 on.

    The relations are those of Canonical's control files, with `= V` instead of ranges, as NVIDIA's builds have.
    """
    branch = version.split(".")[0]
    b = f"-{branch}" if int(branch) < 590 else ""
    full = f"{version}-{revision}"
    source = f"nvidia-graphics-drivers-{branch}"

    def same(name: str) -> str:
        return f"{name} (= {full})"

    fw = f"nvidia-firmware-{branch}-{version}"
    made: list[Package] = []

    def add(name: str, *relations: str, excludes: tuple[str, ...] = (), **more: object) -> None:
        # A package without a suffix needs no virtual name: its own excludes other branches.
        names = tuple(n for n in excludes if n != name)
        fields = {**(depends(*relations) if relations else {}), **(virtual(*names) if names else {})}
        made.append(Package(name, full, source, fields=fields, **more))  # type: ignore[arg-type]

    compute = f"libnvidia-compute{b}"
    add(fw, files=firmware(version))
    add(f"nvidia-kernel-common{b}", same(fw), excludes=("nvidia-kernel-common",),
        files={f"/lib/modprobe.d/nvidia-graphics-drivers{b}.conf": ("0644", BLACKLIST)})  # fmt: skip
    add(compute, excludes=("libnvidia-compute", "libnvidia-ml1", "libcuda1"),
        files=libraries(("libnvidia-ml", "libcuda", "libnvidia-ptxjitcompiler"), version),
        scripts={"postinst": LIBRARY_CHANGED})  # fmt: skip
    for part, relations in {
        "common": (), "cfg1": (), "extra": (), "fbc1": (), "encode": (),
        "decode": (same(compute),), "gl": (same(f"libnvidia-common{b}"),),
    }.items():  # fmt: skip
        add(f"libnvidia-{part}{b}", *relations, excludes=(f"libnvidia-{part}" + ("-any" if part == "cfg1" else ""),))
    add(f"nvidia-utils{b}", same(compute), excludes=("nvidia-utils", "nvidia-smi"),
        files={"/usr/bin/nvidia-smi": ("0755", smi(version))})  # fmt: skip
    add(f"nvidia-compute-utils{b}", same(compute), excludes=("nvidia-compute-utils", "nvidia-persistenced"),
        files={"/usr/bin/nvidia-persistenced": ("0755", DAEMON),
               "/lib/systemd/system/nvidia-persistenced.service": ("0644", PERSISTENCED)})  # fmt: skip
    add(f"xserver-xorg-video-nvidia{b}", same(f"libnvidia-cfg1{b}"), excludes=("nvidia-driver-binary",))
    for flavour, licence in FLAVOURS.items():
        o = "-open" if flavour == "open" else ""
        add(f"nvidia-kernel-source{b}{o}", excludes=("nvidia-kernel-source",))
        add(f"nvidia-dkms{b}{o}", "dkms", same(f"nvidia-kernel-source{b}{o}"), same(f"nvidia-kernel-common{b}"),
            excludes=("nvidia-dkms-kernel",), files=dkms_files(version, licence),
            scripts=dkms_scripts(version))  # fmt: skip
        lower = ("nvidia-compute-utils", "nvidia-utils", "xserver-xorg-video-nvidia", "nvidia-kernel-common", *(
            f"libnvidia-{part}" for part in ("gl", "compute", "extra", "decode", "encode", "cfg1", "fbc1")
        ))  # fmt: skip
        add(f"nvidia-driver{b}{o}", *(same(f"{name}{b}") for name in lower), same(f"nvidia-kernel-source{b}{o}"),
            same(f"nvidia-dkms{b}{o}"), excludes=() if b else ("nvidia-driver-any",))  # fmt: skip
        headless = f"nvidia-headless-no-dkms{b}{o}"
        add(headless, same(f"nvidia-kernel-source{b}{o}"), *(same(f"{name}{b}") for name in (
            "libnvidia-compute", "nvidia-compute-utils", "libnvidia-cfg1", "nvidia-kernel-common")))  # fmt: skip
        add(f"nvidia-headless{b}{o}", same(headless), same(f"nvidia-dkms{b}{o}"))
    # The meta packages: no `=` here, which is how an exact meta brings inexact packages.
    add(f"nvidia-open{b}", f"nvidia-driver{b}-open (>= {version})", arch="all")
    add(f"cuda-drivers{b}", f"nvidia-driver{b} (>= {version})", arch="all")
    for name in ("nvidia-modprobe", "nvidia-settings"):
        add(name)
    return made


def unsuffixed(version: str, revision: str) -> list[Package]:
    """Return a release as NVIDIA's Debian packages name it: no suffix, the branch only in the version."""
    full = f"{version}-{revision}"
    source = "nvidia-graphics-drivers"

    def same(name: str) -> str:
        return f"{name} (= {full})"

    made: list[Package] = []

    def add(name: str, *relations: str, **more: object) -> None:
        fields = {**(depends(*relations) if relations else {}), **more.pop("fields", {})}  # type: ignore[dict-item]
        made.append(Package(name, full, source, fields=fields, **more))  # type: ignore[arg-type]

    add("firmware-nvidia-gsp", files=firmware(version))
    add("nvidia-kernel-support", same("firmware-nvidia-gsp"),
        files={"/etc/modprobe.d/nvidia.conf": ("0644", BLACKLIST)})  # fmt: skip
    for flavour, licence in FLAVOURS.items():
        name = "nvidia-kernel-open-dkms" if flavour == "open" else "nvidia-kernel-dkms"
        add(name, "dkms", same("nvidia-kernel-support"), fields=virtual("nvidia-dkms-kernel"),
            files=dkms_files(version, licence), scripts=dkms_scripts(version))  # fmt: skip
    add("libnvidia-ml1", files=libraries(("libnvidia-ml",), version), scripts={"postinst": LIBRARY_CHANGED})
    add("libcuda1", same("libnvidia-ptxjitcompiler1"), files=libraries(("libcuda",), version))
    add("libnvidia-ptxjitcompiler1", files=libraries(("libnvidia-ptxjitcompiler",), version))
    add("libnvidia-cfg1", files=libraries(("libnvidia-cfg",), version))
    add("nvidia-smi", same("libnvidia-ml1"), files={"/usr/bin/nvidia-smi": ("0755", smi(version))})
    add("nvidia-persistenced", same("libnvidia-cfg1"),
        files={"/usr/bin/nvidia-persistenced": ("0755", DAEMON),
               "/lib/systemd/system/nvidia-persistenced.service": ("0644", PERSISTENCED)})  # fmt: skip
    for name in ("nvidia-modprobe", "nvidia-settings", "nvidia-xconfig"):
        add(name)
    kernel = f"nvidia-kernel-open-dkms (= {full}) | nvidia-kernel-dkms (= {full})"
    compute = ("libcuda1", "libnvidia-ml1", "libnvidia-cfg1", "nvidia-smi", "nvidia-persistenced", "nvidia-modprobe")
    add("nvidia-driver-cuda", *(same(name) for name in compute), kernel)
    add("nvidia-driver-libs")
    add("xserver-xorg-video-nvidia", same("nvidia-driver-libs"))
    graphics = ("nvidia-driver-cuda", "nvidia-driver-libs", "xserver-xorg-video-nvidia", "nvidia-settings")
    add("nvidia-driver", *(same(name) for name in graphics), kernel)
    meta = f"nvidia-driver (>= {version})"
    add("nvidia-open", meta, f"nvidia-kernel-open-dkms (>= {version})", arch="all", fields=virtual("nvidia-flavour"))
    add("cuda-drivers", meta, f"nvidia-kernel-dkms (>= {version})", arch="all", fields=virtual("nvidia-flavour"))
    return made


def smi(version: str) -> bytes:
    """Return a stand-in of nvidia-smi for humans and log files; Bedplate itself asks NVML."""
    text = f"NVIDIA-SMI {version} ({STAND_IN})"
    return f'#!/bin/sh\necho "{text}"\n'.encode()


# ---- the toolkit ----

# Component versions of a toolkit release, from NVIDIA's release notes where known and else from PyPI's `cuda-toolkit`.
COMPONENTS_13_0_1 = {
    "cuda-nvcc": "13.0.88", "cuda-crt": "13.0.88", "libnvvm": "13.0.88", "cuda-cudart": "13.0.88",
    "cuda-driver-dev": "13.0.88", "cuda-nvrtc": "13.0.88", "cuda-nvml-dev": "13.0.87", "cuda-cccl": "13.0.85",
    "cuda-cupti": "13.0.85", "cuda-nvtx": "13.0.85", "cuda-profiler-api": "13.0.85", "cuda-cuobjdump": "13.0.85",
    "cuda-nvdisasm": "13.0.85", "cuda-nvprune": "13.0.85", "cuda-cuxxfilt": "13.0.85", "cuda-gdb": "13.0.85",
    "cuda-sanitizer": "13.0.85", "cuda-culibos-dev": "13.0.85", "cuda-opencl": "13.0.85", "libcublas": "13.0.2.14",
    "libcufft": "12.0.0.61", "libcufile": "1.15.1.6", "libcurand": "10.4.0.35", "libcusolver": "12.0.4.66",
    "libcusparse": "12.6.3.3", "libnpp": "13.0.1.2", "libnvfatbin": "13.0.85", "libnvjitlink": "13.0.88",
    "libnvjpeg": "13.0.1.86", "libnvptxcompiler": "13.0.88",
}  # fmt: skip
COMPONENTS_12_8_1 = {
    "cuda-nvcc": "12.8.93", "cuda-crt": "12.8.93", "cuda-nvvm": "12.8.93", "cuda-cudart": "12.8.90",
    "cuda-driver-dev": "12.8.90", "cuda-nvrtc": "12.8.93", "cuda-nvml-dev": "12.8.90", "cuda-cccl": "12.8.90",
    "cuda-cupti": "12.8.90", "cuda-nvtx": "12.8.90", "cuda-profiler-api": "12.8.90", "cuda-cuobjdump": "12.8.90",
    "cuda-nvdisasm": "12.8.90", "cuda-nvprune": "12.8.90", "cuda-cuxxfilt": "12.8.90", "cuda-gdb": "12.8.90",
    "cuda-sanitizer": "12.8.93", "cuda-opencl": "12.8.90", "libcublas": "12.8.4.1", "libcufft": "11.3.3.83",
    "libcufile": "1.13.1.3", "libcurand": "10.3.9.90", "libcusolver": "11.7.3.90", "libcusparse": "12.5.8.93",
    "libnpp": "12.3.3.100", "libnvfatbin": "12.8.90", "libnvjitlink": "12.8.93", "libnvjpeg": "12.3.5.92",
}  # fmt: skip
TOOLKITS = {
    "12.8.1": COMPONENTS_12_8_1,
    "13.0.1": COMPONENTS_13_0_1,
    "13.0.2": {
        **COMPONENTS_13_0_1, "cuda-cudart": "13.0.96", "cuda-driver-dev": "13.0.96", "libcublas": "13.1.0.3",
    },
}  # fmt: skip
WITH_DEV = ("cuda-cudart", "cuda-nvrtc", "cuda-cupti", "cuda-opencl", "libcu", "libnpp", "libnvj", "libnvf")
GROUPS = {
    "cuda-compiler": ("cuda-nvcc", "cuda-cuobjdump", "cuda-nvprune", "cuda-cuxxfilt"),
    "cuda-libraries": (
        "cuda-cudart", "cuda-nvrtc", "cuda-opencl", "libcublas", "libcufft", "libcufile", "libcurand", "libcusolver",
        "libcusparse", "libnpp", "libnvfatbin", "libnvjitlink", "libnvjpeg",
    ),
    "cuda-command-line-tools": ("cuda-cupti", "cuda-gdb", "cuda-nvdisasm", "cuda-nvtx", "cuda-sanitizer"),
}  # fmt: skip


def toolkit(release: str) -> list[Package]:
    """Return a toolkit release. Every relation between its packages is `>=`, as NVIDIA's: metas drift."""
    major, minor, _ = release.split(".")
    short, dash = f"{major}.{minor}", f"-{major}-{minor}"
    versions = TOOLKITS[release]
    prefix = f"/usr/local/cuda-{short}"
    target = f"{prefix}/targets/x86_64-linux"
    made: list[Package] = []

    def least(name: str) -> str:
        component = name.removesuffix("-dev") if name.removesuffix("-dev") in versions else name
        return f"{name}{dash} (>= {versions.get(component, release)})"

    def add(name: str, version: str, *relations: str, **more: object) -> None:
        fields = depends(*relations) if relations else {}
        made.append(Package(name, f"{version}-1", fields=fields, section="multiverse/devel", **more))  # type: ignore[arg-type]

    runtime = versions["cuda-cudart"]
    config = {
        f"cuda-toolkit{dash}-config-common": {
            f"{prefix}/version.json": ("0644", version_json(release, versions)),
            f"{prefix}/lib64": ("link", b"targets/x86_64-linux/lib"),
            f"{prefix}/include": ("link", b"targets/x86_64-linux/include"),
        },
        f"cuda-toolkit-{major}-config-common": {
            f"/etc/ld.so.conf.d/988_cuda-{major}.conf":
                ("0644", f"/usr/local/cuda-{major}/targets/x86_64-linux/lib\n".encode()),
        },
        "cuda-toolkit-config-common": {
            "/etc/ld.so.conf.d/000_cuda.conf": ("0644", b"/usr/local/cuda/targets/x86_64-linux/lib\n"),
        },
    }  # fmt: skip
    for name, files in config.items():
        own = f"cuda-toolkit{dash}-config-common" == name
        add(name, runtime, arch="all", files=files, scripts=alternatives(short) if own else {})
    for component, version in versions.items():
        relations = [f"cuda-toolkit{dash}-config-common"] if component == "cuda-cudart" else []
        if component == "cuda-cudart":
            relations += [f"cuda-toolkit-{major}-config-common", "cuda-toolkit-config-common"]
        if component == "cuda-nvcc":
            relations = [least(name) for name in ("cuda-crt", "libnvvm", "cuda-nvvm") if name in versions]
        files = {}
        if component == "cuda-nvcc":
            files = {f"{prefix}/bin/nvcc": ("0755", nvcc(short, version))}
        elif component.startswith(("libcu", "libnpp", "libnvj", "cuda-cudart", "cuda-nvrtc")):
            so = "lib" + component.removeprefix("cuda-").removeprefix("lib") + ".so"
            files = {
                f"{target}/lib/{so}.{version}": ("0644", EMPTY),
                f"{target}/lib/{so}.{version.split('.')[0]}": ("link", f"{so}.{version}".encode()),
            }
        add(component + dash, version, *relations, files=files)
        if component.startswith(WITH_DEV) and not component.endswith("-dev"):
            extra = [least("cuda-driver-dev")] if component == "cuda-cudart" else []
            add(f"{component}-dev{dash}", version, least(component), *extra, files=header(target, component, version))
    for group, members in GROUPS.items():
        add(group + dash, release, *(least(name) for name in members))
    developer = [f"{name}-dev" for name in GROUPS["cuda-libraries"] if name.startswith(WITH_DEV)]
    developer += ["cuda-cccl", "cuda-driver-dev", "cuda-profiler-api"]
    add(f"cuda-libraries-dev{dash}", release, *(least(name) for name in developer))
    add(f"cuda-tools{dash}", release, least("cuda-command-line-tools"))
    whole = ("cuda-compiler", "cuda-libraries", "cuda-libraries-dev", "cuda-tools", "cuda-nvml-dev")
    add(f"cuda-toolkit{dash}", release, *(least(name) for name in whole))
    add(f"cuda-toolkit-{major}", release, f"cuda-toolkit{dash} (>= {release})")
    add("cuda-toolkit", release, f"cuda-toolkit{dash} (>= {release})")
    return made


def version_json(release: str, versions: dict[str, str]) -> bytes:
    """Return a version.json in the shape of NVIDIA's."""
    entry = '   "{}" : {{\n      "name" : "{}",\n      "version" : "{}"\n   }}'
    entries = [entry.format("cuda", "CUDA SDK", release)]
    for name, version in sorted(versions.items()):
        key = name.replace("-", "_") if name.startswith("cuda-") else name
        entries.append(entry.format(key, name, version))
    return ("{\n" + ",\n".join(entries) + "\n}\n").encode()


def nvcc(short: str, version: str) -> bytes:
    """Return a script that answers `nvcc --version` in NVIDIA's words and compiles nothing."""
    return f"""#!/bin/sh
# {STAND_IN}
if [ "$1" = --version ] || [ "$1" = -V ]; then
  echo 'nvcc: NVIDIA (R) Cuda compiler driver'
  echo 'Copyright (c) 2005-2025 NVIDIA Corporation'
  echo 'Built on Wed_Aug_20_01:58:59_PM_PDT_2025'
  echo 'Cuda compilation tools, release {short}, V{version}'
  echo 'Build cuda_{short}.r{short}/compiler.00000000_0'
  exit 0
fi
echo 'nvcc: {STAND_IN}: it compiles nothing' >&2
exit 1
""".encode()


def header(target: str, component: str, version: str) -> dict[str, tuple[str, bytes]]:
    """Return the headers that tell a component's version, for the two that differ between 13.0.1 and 13.0.2."""
    numbers = version.split(".")
    if component == "cuda-cudart":
        value = int(numbers[0]) * 1000 + int(numbers[1]) * 10
        return {f"{target}/include/cuda_runtime_api.h": ("0644", f"#define CUDART_VERSION {value}\n".encode())}
    if component == "libcublas":
        names = ("MAJOR", "MINOR", "PATCH", "BUILD")
        text = "".join(f"#define CUBLAS_VER_{name} {number}\n" for name, number in zip(names, numbers))
        return {f"{target}/include/cublas_api.h": ("0644", text.encode())}
    return {}


def alternatives(short: str) -> dict[str, str]:
    """Return the scripts by which NVIDIA's package takes over /usr/local/cuda."""
    weight = short.replace(".", "")
    major = short.split(".")[0]
    links = {"cuda": "/usr/local/cuda", f"cuda-{major}": f"/usr/local/cuda-{major}"}
    prefix = f"/usr/local/cuda-{short}"
    install = "".join(f"update-alternatives --install {link} {n} {prefix} {weight}\n" for n, link in links.items())
    remove = "".join(f"update-alternatives --remove {n} {prefix}\n" for n in links)
    return {"postinst": install, "prerm": f'[ "$1" != remove ] || {{\n{remove}}}\n'}


# ---- faults ----

Fault = Callable[[list[Package]], list[Package]]


def with_relation(packages: list[Package], names: tuple[str, ...], key: str, value: str) -> list[Package]:
    """Return the packages, those named at 580.82.07 with one more relation."""
    changed = []
    for package in packages:
        if package.name in names and package.version.startswith("580.82.07"):
            old = package.fields.get(key)
            package = replace(package, fields={**package.fields, key: f"{old}, {value}" if old else value})
        changed.append(package)
    return changed


MODULES = ("nvidia-kernel-support", "nvidia-kernel-common-580")


def kernel(packages: list[Package]) -> list[Package]:
    """A driver that drags in a kernel image (stackhpc/ansible-slurm-appliance#428 is one of those)."""
    image = "linux-image-6.99.0-1-amd64"
    made = Package(image, "6.99.0-1", "linux", section="kernel")
    return [*with_relation(packages, MODULES, "Depends", f"{image} (= 6.99.0-1)"), made]


def foreign(packages: list[Package]) -> list[Package]:
    """A driver that removes a package of somebody else."""
    return [*with_relation(packages, MODULES, "Conflicts", "site-gpu-monitor"), Package("site-gpu-monitor", "1.0-1")]


def transitional(packages: list[Package]) -> list[Package]:
    """Names that hide another branch: asking for 575 brings 580, asking for 580.82.07 brings 590."""
    summary = "Transitional package for nvidia-driver-580-open"
    full = "580.95.05-0ubuntu1"
    changed = []
    for package in packages:
        if package.name == "nvidia-driver-cuda" and package.version == "580.82.07-1":
            package = replace(
                package, fields=depends("nvidia-driver-cuda-590 (= 590.44.01-1)"),
                summary="Transitional package for nvidia-driver-cuda-590",
            )  # fmt: skip
        changed.append(package)
    if any(package.name == "nvidia-driver-580-open" for package in packages):
        relation = depends(f"nvidia-driver-580-open (= {full})")
        source = "nvidia-graphics-drivers-580"
        changed.append(Package("nvidia-driver-575-open", full, source, fields=relation, summary=summary))
    else:
        changed.append(Package("nvidia-driver-cuda-590", "590.44.01-1", "nvidia-graphics-drivers"))
    return changed


FAULTY = ("debian12", "ubuntu2404")
FAULTS: dict[str, Fault] = {"kernel": kernel, "foreign": foreign, "transitional": transitional}

# ---- repositories ----

BRANCHES = ("575.57.08", "580.82.07", "580.95.05")


def contents(distro: str) -> list[Package]:
    """Return the packages of one distribution's directory. NVIDIA's for Debian 13 begins with branch 590."""
    packages: list[Package] = []
    if distro.startswith("ubuntu"):
        for version in BRANCHES:
            packages += suffixed(version, "0ubuntu1")
        packages += suffixed("590.44.01", "1ubuntu1")
    else:
        for version in (*(BRANCHES if distro == "debian12" else ()), "590.44.01"):
            packages += unsuffixed(version, "1")
    if distro != "debian13":
        for release in TOOLKITS:
            packages += toolkit(release)
    # Releases of the toolkit share components.
    return list({package.file_name(): package for package in reversed(packages)}.values())[::-1]


@dataclass(frozen=True)
class Signer:
    """A key made for this build, in a GnuPG home of its own."""

    home: Path

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[Signer]:
        """Make the key, and end its agent at the end."""
        with tempfile.TemporaryDirectory(prefix="aptrepo-", dir="/tmp") as home:  # a short path: it holds a socket
            signer = cls(Path(home))
            signer.gpg("--quick-gen-key", f"{STAND_IN} <nobody@invalid>", "ed25519", "sign", "never")
            try:
                yield signer
            finally:
                subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=True)

    def gpg(self, *arguments: str, text: bytes = b"") -> bytes:
        command = ["gpg", "--homedir", str(self.home), "--batch", "--quiet", "--pinentry-mode", "loopback"]
        command += ["--passphrase", "", *arguments]
        return subprocess.run(command, input=text, check=True, stdout=subprocess.PIPE).stdout

    def fingerprint(self) -> str:
        listed = self.gpg("--with-colons", "--list-keys").decode()
        return next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))


def write_repository(folder: Path, key_name: str, packages: list[Package], signer: Signer) -> None:
    """Write one flat repository."""
    folder.mkdir(parents=True)
    index = ""
    for package in packages:
        path = folder / package.file_name()
        if path.exists():
            raise SystemExit(f"build.py: {path} would be written twice")
        path.write_bytes(package.deb)
        control, _, description = package.control().partition("Description: ")
        sums = f"Size: {len(package.deb)}\nSHA256: {hashlib.sha256(package.deb).hexdigest()}\n"
        index += f"{control}Filename: ./{path.name}\n{sums}Description: {description}\n"
    files = {"Packages": index.encode(), "Packages.gz": gzip.compress(index.encode(), mtime=0)}
    release = (
        "Origin: NVIDIA\nLabel: NVIDIA CUDA\nArchitectures: amd64\n"
        f"Date: {time.strftime('%a, %d %b %Y %H:%M:%S UTC', time.gmtime(EPOCH))}\nSHA256:\n"
    )
    for name, content in files.items():
        (folder / name).write_bytes(content)
        release += f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}\n"
    (folder / "Release").write_text(release)
    (folder / "InRelease").write_bytes(signer.gpg("--clearsign", text=release.encode()))
    (folder / key_name).write_bytes(signer.gpg("--armor", "--export"))


def build(out: Path) -> None:
    """Write everything under out, which must not exist."""
    with Signer.made() as signer:
        for distro, key_name in KEYS.items():
            packages = contents(distro)
            write_repository(out / distro / "x86_64", key_name, packages, signer)
            if distro in FAULTY:
                for fault, change in FAULTS.items():
                    folder = out / "faults" / fault / distro / "x86_64"
                    write_repository(folder, key_name, change(packages), signer)
        (out / "fingerprint").write_text(signer.fingerprint() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path, help="the directory to write; an earlier build there is replaced")
    out = parser.parse_args().out.resolve()
    started = time.monotonic()
    if out.exists():
        if not (out / "fingerprint").exists():
            sys.exit(f"build.py: {out} exists and is no earlier build")
        shutil.rmtree(out)
    building = out.with_name(out.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    build(building)
    building.rename(out)
    debs = len(list(out.rglob("*.deb")))
    print(f"{debs} packages in {out}, {time.monotonic() - started:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
