"""Build the tiny wheels and the profiles that use them; see README.md beside this file.

    python tests/tiny/build.py OUT [--no-lock]

writes OUT/wheels/*.whl, OUT/profiles/<name>/profile.yml with its lock (by `bedplate lock`), and OUT/stubs/.
The same sources, compiler and SOURCE_DATE_EPOCH give the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
NATIVE = HERE / "native"

# manylinux_2_17 promises glibc 2.17 or newer; check_glibc holds the files to it.
GLIBC_MINOR = 17
TAG = f"cp39-abi3-manylinux_2_{GLIBC_MINOR}_x86_64"
STAND_IN = "Bedplate test stand-in, not {}"

# 1980-01-01 is the first time a zip file can name.
EPOCH = max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315532800)


@dataclass(frozen=True)
class Torch:
    """One torch release: the signatures of its minor version, and the fault built into it."""

    version: str
    minor: int
    fault: str = ""


TORCHES = (
    Torch("2.9.1+tiny", 9),
    Torch("2.9.2+tiny", 9),
    Torch("2.10.0+tiny", 10),
    Torch("2.9.1+tiny.wrongsum", 9, "TINY_FAULT_WRONGSUM"),
    Torch("2.9.1+tiny.hang", 9, "TINY_FAULT_HANG"),
)
KERNELS = {"0.3.21+tiny": "", "0.3.21+tiny.crash": "TINY_FAULT_CRASH"}

# name: (torch, sgl-kernel, what it is for)
PROFILES = {
    "tiny-good": ("2.9.1+tiny", "0.3.21+tiny", "Tiny stand-ins that work"),
    "tiny-next": ("2.9.2+tiny", "0.3.21+tiny", "Tiny stand-ins that work, one torch release later"),
    "tiny-incident": ("2.10.0+tiny", "0.3.21+tiny", "Tiny stand-ins of the incident: an undefined symbol"),
    "tiny-wrongsum": ("2.9.1+tiny.wrongsum", "0.3.21+tiny", "Tiny stand-ins whose all-reduce is wrong"),
    "tiny-hang": ("2.9.1+tiny.hang", "0.3.21+tiny", "Tiny stand-ins whose all-reduce hangs"),
    "tiny-crash": ("2.9.1+tiny", "0.3.21+tiny.crash", "Tiny stand-ins whose import dies by a signal"),
}


def compile_library(output: Path, source: str, *options: str) -> None:
    """Compile one source file into a shared library that does not need libstdc++.

    The order of options matters to the linker: libraries after the source.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-shared", "-fPIC", "-O2", "-fno-exceptions", "-fno-rtti", "-Wall", "-Werror"]
    if source.endswith(".c"):
        command.remove("-fno-rtti")  # an option of C++ only
    command += [f"-ffile-prefix-map={HERE}=.", "-Wl,--build-id=none", "-Wl,--no-undefined-version"]
    command += ["-Wl,--no-as-needed", "-o", str(output), str(NATIVE / source), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"build.py: {' '.join(command)} failed:\n{result.stderr}")


def check_glibc(library: Path) -> None:
    """Refuse a library that needs a newer glibc than the wheel's tag says."""
    minors = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())]
    if max(minors, default=0) > GLIBC_MINOR:
        raise SystemExit(f"build.py: {library.name} needs glibc 2.{max(minors)}; the tag says 2.{GLIBC_MINOR}")


def build_torch(root: Path, torch: Torch) -> None:
    """Write the package torch of one release under root, laid out as the real one."""
    package = root / "torch"
    lib = package / "lib"
    defines = [f"-DTINY_TORCH_MINOR={torch.minor}"] + ([f"-D{torch.fault}"] if torch.fault else [])
    # Like the real files: DT_RPATH, not RUNPATH, to the siblings.
    here = ["-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN", f"-L{lib}"]
    compile_library(lib / "libc10.so", "c10.cpp", "-Wl,-soname,libc10.so", *defines)
    compile_library(lib / "libc10_cuda.so", "c10_cuda.cpp", "-Wl,-soname,libc10_cuda.so", *defines, *here, "-lc10")
    compile_library(
        lib / "libtorch_python.so",
        "torch_python.cpp",
        "-Wl,-soname,libtorch_python.so",
        *defines,
        *here,
        "-lc10_cuda",
        "-lc10",
    )
    here[1] += "/lib"
    compile_library(package / "_C.abi3.so", "torch_c.cpp", *here, "-ltorch_python")
    for source in sorted((HERE / "torch").glob("*.py")):
        shutil.copyfile(source, package / source.name)
    (package / "version.py").write_text(
        f'"""The version of this stand-in."""\n\n__version__ = "{torch.version}"\ncuda = "12.8"\n',
        encoding="utf-8",
    )


def build_sgl_kernel(root: Path, fault: str, torch_lib: Path, stubs: Path) -> None:
    """Write the package sgl_kernel under root, linked against torch 2.9 and without an RPATH."""
    package = root / "sgl_kernel"
    compile_library(
        package / "common_ops.abi3.so",
        "common_ops.cpp",
        *([f"-D{fault}"] if fault else []),
        f"-L{torch_lib}",
        "-lc10_cuda",
        "-lc10",
        f"-L{stubs}",
        "-l:libnuma.so.1",
    )
    shutil.copyfile(HERE / "sgl_kernel" / "__init__.py", package / "__init__.py")


def write_wheel(output: Path, tree: Path, name: str, version: str, original: str) -> None:
    """Pack a tree as a wheel: sorted names, fixed times and modes, RECORD with hashes (PEP 427)."""
    escaped = name.replace("-", "_")
    info = f"{escaped}-{version}.dist-info"
    files = {path.relative_to(tree).as_posix(): path.read_bytes() for path in sorted(tree.rglob("*")) if path.is_file()}
    summary = STAND_IN.format(original)
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
        f"Requires-Python: >=3.9\n\n{summary}. Made by tests/tiny/build.py of Bedplate.\n"
    ).encode()
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: bedplate-tiny\nRoot-Is-Purelib: false\nTag: {TAG}\n"
    ).encode()
    record = ""
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(content)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    when = time.gmtime(EPOCH)[:6]
    with zipfile.ZipFile(output / f"{escaped}-{version}-{TAG}.whl", "w") as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, when)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if path.endswith(".so") else 0o644) << 16
            archive.writestr(entry, content)


def build_wheels(output: Path, stubs: Path) -> None:
    """Write every wheel into output, and the library to link against into stubs."""
    output.mkdir(parents=True, exist_ok=True)
    compile_library(stubs / "libnuma.so.1", "numa.c", "-Wl,-soname,libnuma.so.1")
    with tempfile.TemporaryDirectory(prefix="bedplate-tiny-") as directory:
        scratch = Path(directory)
        trees = []
        for torch in TORCHES:
            build_torch(scratch / torch.version, torch)
            trees.append((scratch / torch.version, "torch", torch.version, "PyTorch"))
        torch_lib = scratch / TORCHES[0].version / "torch" / "lib"
        for version, fault in KERNELS.items():
            build_sgl_kernel(scratch / version, fault, torch_lib, stubs)
            trees.append((scratch / version, "sgl-kernel", version, "sgl-kernel"))
        for tree, *about in trees:
            for library in tree.rglob("*.so"):
                check_glibc(library)
            write_wheel(output, tree, *about)


def write_profiles(output: Path) -> None:
    """Write profile.yml of every tiny profile under output."""
    for name, (torch, kernel, description) in PROFILES.items():
        profile = {
            "schema": 1,
            "description": description,
            "stack": {
                "targets": ["cp311-x86_64", "cp312-x86_64"],
                "glibc": "2.34",
                "requirements": [f"torch=={torch}", f"sgl-kernel=={kernel}"],
                # As the real sgl-kernel does, so that this path is walked on every test node.
                "system_packages": {"apt": ["libnuma1"], "dnf": ["numactl-libs"]},
            },
            "expect": {"gpus": 8, "gpu_ids": ["10de:2bb5"], "arch": "sm_120"},
            "verify": {
                "imports": ["torch", "sgl_kernel"],
                "import_timeout_s": 20,
                # 1 MiB: past the 512 KiB from which tiny-wrongsum is wrong.
                "collective": {
                    "backend": "gloo",
                    "ranks": [2, 4],
                    "max_bytes": 1048576,
                    "min_busbw_gbps": 0,
                    "timeout_s": 10,
                },
            },
        }
        path = output / name / "profile.yml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(profile, sort_keys=False), encoding="utf-8")


def lock_profiles(profiles: Path, wheels: Path) -> None:
    """Lock every profile against the wheels alone, as an operator would."""
    bedplate = Path(sys.executable).with_name("bedplate")
    for name in PROFILES:
        command = [str(bedplate), "lock", name, "--profiles", str(profiles), "--no-index"]
        subprocess.run([*command, "--find-links", str(wheels)], check=True)


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description="Build the tiny wheels and their locked profiles.")
    parser.add_argument("out", type=Path, help="directory to write; its wheels, profiles and stubs are replaced")
    parser.add_argument("--no-lock", action="store_true", help="leave the profiles unlocked")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    for part in ("wheels", "profiles", "stubs"):
        shutil.rmtree(out / part, ignore_errors=True)
    build_wheels(out / "wheels", out / "stubs")
    write_profiles(out / "profiles")
    if not arguments.no_lock:
        lock_profiles(out / "profiles", out / "wheels")


if __name__ == "__main__":
    main()
