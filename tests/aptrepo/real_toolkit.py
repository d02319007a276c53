"""Build NVIDIA's toolkit packages of a few components with what is really in them, from NVIDIA's wheels.

    python tests/aptrepo/real_toolkit.py OUT WHEELS

writes OUT like build.py, with debian12 and the toolkit only. Names, versions and relations are build.py's; the files of
nvcc, crt, nvvm, cudart and cccl are those of the wheels in WHEELS, so that a program can be compiled with the packages.
"""

from __future__ import annotations

import argparse
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

from build import KEYS, TOOLKITS, Package, Signer, toolkit, write_repository

# The wheel that a package's files come from.
WHEELS = {
    "cuda-cccl": "nvidia_cuda_cccl",
    "cuda-crt": "nvidia_cuda_crt",
    "cuda-cudart": "nvidia_cuda_runtime",
    "cuda-nvcc": "nvidia_cuda_nvcc",
    "libnvvm": "nvidia_nvvm",
}
NAME = re.compile(r"(?P<component>[a-z-]+?)(?P<dev>-dev)?-(?P<series>13-0)")
# nvidia/cu13/<place>/<path>
MEMBER = re.compile(r"nvidia/cu13/(?P<place>bin|include|lib|nvvm)/(?P<path>.+)")


def with_real_files(package: Package, wheels: Path) -> Package:
    """Return a package with the files of its wheel; another one as it is."""
    matched = NAME.fullmatch(package.name)
    if not matched or matched["component"] not in WHEELS:
        return package
    if matched["dev"]:  # the linker's name of the library; headers come with the library itself
        link = ("link", b"libcudart.so.13")
        return replace(package, files={"/usr/local/cuda-13.0/targets/x86_64-linux/lib/libcudart.so": link})
    version = package.version.removesuffix("-1")
    (wheel,) = wheels.glob(f"{WHEELS[matched['component']]}-{version}-*.whl")
    return replace(package, files=files_of(wheel))


def files_of(wheel: Path) -> dict[str, tuple[str, bytes]]:
    """Return the files of a wheel, where NVIDIA's packages have them."""
    prefix = "/usr/local/cuda-13.0"
    places = {"include": "targets/x86_64-linux/include", "lib": "targets/x86_64-linux/lib"}
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            matched = MEMBER.fullmatch(info.filename)
            if matched and not info.is_dir() and not info.filename.endswith("/__init__.py"):
                mode = "0755" if info.external_attr >> 16 & 0o111 else "0644"
                place = places.get(matched["place"], matched["place"])
                files[f"{prefix}/{place}/{matched['path']}"] = (mode, archive.read(info))
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path, help="the directory to write; an earlier build there is replaced")
    parser.add_argument("wheels", type=Path, help="directory with the wheels of 13.0.1 and 13.0.2")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    packages = {
        package.file_name(): with_real_files(package, arguments.wheels)
        for release in TOOLKITS
        for package in toolkit(release)
    }
    with Signer.made() as signer:
        write_repository(arguments.out / "debian12" / "x86_64", KEYS["debian12"], list(packages.values()), signer)
        (arguments.out / "fingerprint").write_text(signer.fingerprint() + "\n")


if __name__ == "__main__":
    main()
