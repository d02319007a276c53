"""Building and finding the index of torch exports.

One compressed file with what every torch release exports.

The shipped file is `data/abi/torch-x86_64.idx`; beside it a private one may hold a user's own builds and
nightlies. Reading is `bedplate.node.abi.exports`, because nodes read it too. Building one release takes its
wheel: the shared objects are unpacked one at a time into a temporary file and read with `bedplate.node.abi.elf`,
and a small C++ program is compiled against the wheel's headers for the layout of the types that cross the
boundary.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from bedplate.node.abi.elf import ElfError, ElfFile
from bedplate.node.abi.exports import IndexFormatError, Release, TorchIndex, version_key

from .errors import BedplateError
from .files import replace_file, sha256_of
from .package_index import open_index
from .range_reader import read_bounded

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

MACHINE = "x86_64"
INDEX_FILE = f"torch-{MACHINE}.idx"
PRIVATE_FILE = f"torch-{MACHINE}.private.idx"
INDEX_VARIABLE = "BEDPLATE_ABI_INDEX"
FIRST_RELEASE = "2.4.0"
PYTHON_TAG_PREFERENCE = ("cp311", "cp312", "cp310", "cp313")

# The types that cross the boundary between torch and an extension by value, or that inline code constructs.
LAYOUT_TYPES = (
    "at::Tensor", "at::TensorBase", "c10::Argument", "c10::BoxedKernel", "c10::Device", "c10::DispatchKeySet",
    "c10::FunctionSchema", "c10::IValue", "c10::KernelFunction", "c10::OperatorHandle", "c10::OperatorName",
    "c10::Scalar", "c10::Storage", "c10::StorageImpl", "c10::Stream", "c10::SymInt", "c10::TensorImpl",
    "c10::TensorOptions", "torch::CppFunction", "torch::Library",
)  # fmt: skip

_LIBRARY = re.compile(r"torch/lib/(?P<name>[^/]+\.so(?:\.\d+)*)$")
_MAX_MEMBER = 8 << 30  # bytes of one unpacked library; libtorch_cuda.so has about 1.5 GB


def index_path() -> Path:
    """Return the path of the shipped index file: $BEDPLATE_ABI_INDEX, else the one in `data/abi/` of the checkout."""
    variable = os.environ.get(INDEX_VARIABLE, "")
    return Path(variable) if variable else Path(__file__).resolve().parents[3] / "data" / "abi" / INDEX_FILE


def load_index(path: Path | None = None, *, private: bool = True) -> TorchIndex:
    """Return the index, with the releases of the private file beside it merged in (they win).

    Errors: BedplateError when the file is missing or is not an index.
    """
    chosen = path or index_path()
    index = _read_index(chosen)
    own = chosen.parent / PRIVATE_FILE
    if private and own.is_file():
        extra = _read_index(own)
        for release in extra.releases:
            index.add(release, extra.exports_by_library(release.version))
    return index


def _read_index(path: Path) -> TorchIndex:
    try:
        return TorchIndex.load(str(path))
    except FileNotFoundError as error:
        raise BedplateError(
            f"there is no index of torch releases at {path}. Build it: `bedplate abi index add --since {FIRST_RELEASE}`"
        ) from error
    except (OSError, IndexFormatError) as error:
        raise BedplateError(f"{path} is not usable: {error}. Restore it, or build it again") from error


def index_files() -> list[Path]:
    """Return the files that `load_index` reads, those that there are."""
    shipped = index_path()
    return [path for path in (shipped, shipped.parent / PRIVATE_FILE) if path.is_file()]


def save_index(index: TorchIndex, path: Path) -> int:
    """Write the index by rename; return its size in bytes. Errors: OSError."""
    data = index.dump()
    replace_file(path, data)
    return len(data)


def add_wheel(index: TorchIndex, wheel: Path, wheels: list[dict[str, Any]] | None = None) -> Release:
    """Add the torch release of a wheel on disk to the index; return the release.

    Args: wheels: names, sha256 and sizes of all wheels of the release; by default this one alone.
    Errors: BedplateError when it is not a readable wheel of torch.
    """
    release, exports = read_torch_wheel(wheel)
    release.wheels = wheels or [{"file": wheel.name, "sha256": sha256_of(wheel), "size": wheel.stat().st_size}]
    index.add(release, exports)
    return release


def read_torch_wheel(wheel: Path, *, layout: bool = True) -> tuple[Release, dict[str, list[str]]]:
    """Return the release that a torch wheel holds, and library -> exported names.

    Args: layout: False leaves the layout fingerprint out, which takes a compiler and most of the time.

    Errors: BedplateError when it is no zip file, not torch, or holds a library that cannot be read.
    """
    try:
        name, version, _, _ = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise BedplateError(f"{wheel} is not a wheel by its name: {error}") from error
    if name != "torch":
        raise BedplateError(f"{wheel.name} is a wheel of {name}; the index holds torch releases")
    exports: dict[str, list[str]] = {}
    needed: set[str] = set()
    provides: set[str] = set()
    glibc = (0, 0)
    try:
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(prefix="bedplate-abi-") as place:
            text = read_bounded(archive, "torch/version.py", 65536).decode("utf-8", "replace")
            for member in archive.infolist():
                found = _LIBRARY.match(member.filename)
                if not found or member.file_size > _MAX_MEMBER:
                    continue
                file = Path(place) / "library.so"
                with archive.open(member) as source, file.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                elf = ElfFile.open(str(file))
                exports[found.group("name")] = sorted({os.fsdecode(s.name) for s in elf.exports()})
                needed.update(elf.needed)
                provides.update({found.group("name"), elf.soname or found.group("name")})
                for wanted in elf.needed_versions():
                    if wanted.name.startswith(b"GLIBC_2."):
                        glibc = max(glibc, (2, int(wanted.name.split(b".")[1])))
                file.unlink()
            old_abi = not any("__cxx11" in n for n in exports.get("libc10.so", ()))
            sizes = compile_layout(archive, Path(place), old_abi=old_abi) if layout else {}
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, KeyError, ElfError, EOFError) as error:
        # RuntimeError: an encrypted member, or a method of compression that is not known here
        raise BedplateError(f"{wheel} cannot be read as a wheel of torch: {error}. Get it again") from error
    cuda = re.search(r"^cuda\s*(?::[^=]+)?=\s*['\"]([\d.]+)", text, re.MULTILINE)
    return (
        Release(
            version=str(version),
            cuda=cuda.group(1) if cuda else "",
            glibc=f"{glibc[0]}.{glibc[1]}",
            needed=sorted(needed - provides),
            provides=sorted(provides),
            layout=sizes,
        ),
        exports,
    )


def compile_layout(archive: zipfile.ZipFile, place: Path, *, old_abi: bool) -> dict[str, list[int]]:
    """Return type -> [size, alignment] in bytes, compiled against the headers in a torch wheel.

    The program is compiled to assembly and the numbers are read from its data: nothing is linked or run.
    Types the release does not have are left out. Empty when there is no g++ or the headers do not compile.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return {}
    root = place / "include"
    for member in archive.infolist():
        path = PurePosixPath(member.filename)
        if path.parts[:2] == ("torch", "include") and ".." not in path.parts and not member.is_dir():
            target = root.joinpath(*path.parts[2:])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(read_bounded(archive, member.filename, 32 << 20))
    types = list(LAYOUT_TYPES)
    while types:
        source = place / "layout.cpp"
        source.write_text(_layout_program(types))
        command = [
            compiler, "-std=c++20", "-S", "-w", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={0 if old_abi else 1}",
            f"-I{root}", f"-I{root}/torch/csrc/api/include", "-o", str(place / "layout.s"), str(source),
        ]  # fmt: skip
        environment = {**os.environ, "LC_ALL": "C"}
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=environment)
        if result.returncode == 0:
            break
        # g++ quotes the name it does not know: 'Foo' is not a member of 'c10'
        unknown = [t for t in types if re.search(rf"\W{t.split('::')[-1]}\W+(?:is|has) not", result.stderr)]
        if not unknown:
            return {}
        types = [t for t in types if t not in unknown]
    else:
        return {}
    text = (place / "layout.s").read_text()
    block = text[text.index("bedplate_layout:") :]
    numbers = [int(n) for n in re.findall(r"^\s+\.quad\s+(\d+)", block, re.MULTILINE)[: 2 * len(types)]]
    return {name: numbers[2 * at : 2 * at + 2] for at, name in enumerate(types)}


def _layout_program(types: list[str]) -> str:
    rows = "".join(f"  sizeof({name}), alignof({name}),\n" for name in types)
    return (
        "#include <torch/library.h>\n#include <ATen/core/Tensor.h>\n#include <c10/core/Stream.h>\n"
        "#include <c10/core/SymInt.h>\n#include <c10/core/Scalar.h>\n#include <c10/core/StorageImpl.h>\n"
        'extern "C" { extern const unsigned long bedplate_layout[]; }\n'
        f"const unsigned long bedplate_layout[] = {{\n{rows}}};\n"
    )


def published_releases(since: str = FIRST_RELEASE) -> dict[str, list[DistributionPackage]]:
    """Return version -> its x86_64 Linux wheels, for the stable torch releases of the package index, oldest
    first.

    Errors: BedplateError when the index cannot be asked.
    """
    with open_index() as client:
        page = client.get_project_page("torch")
    found: dict[str, list[DistributionPackage]] = {}
    for package in page.packages:
        if package.package_type != "wheel" or package.is_yanked or not package.version:
            continue
        try:
            version = Version(package.version)
        except InvalidVersion:
            continue
        if version.is_prerelease or version.is_devrelease or version_key(package.version) < version_key(since):
            continue
        if "manylinux" in package.filename and package.filename.endswith(f"_{MACHINE}.whl"):
            found.setdefault(package.version, []).append(package)
    return dict(sorted(found.items(), key=lambda item: version_key(item[0])))


def choose_wheel(packages: list[DistributionPackage]) -> DistributionPackage:
    """Return the wheel to read of one release: of a preferred Python, and of those the one installers take."""

    def rank(package: DistributionPackage) -> tuple[int, tuple[int, str]]:
        _, _, build, tags = parse_wheel_filename(package.filename)
        pythons = {tag.interpreter for tag in tags if not tag.abi.endswith("t")}
        at = [n for n, python in enumerate(PYTHON_TAG_PREFERENCE) if python in pythons]
        number, text = build if build else (-1, "")
        return (-at[0] if at else -99, (number, text))

    return max(packages, key=rank)


def wheel_records(packages: list[DistributionPackage]) -> list[dict[str, Any]]:
    """Return file, sha256 and size of each wheel, by name."""
    return [
        {"file": p.filename, "sha256": p.digests.get("sha256", ""), "size": p.size or 0}
        for p in sorted(packages, key=lambda p: p.filename)
    ]


def add_published(
    index: TorchIndex,
    versions: list[str],
    *,
    since: str = FIRST_RELEASE,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Release]:
    """Add published releases one by one, each downloaded, read and deleted.

    Yield each when it is in the index.

    Args: versions: the wanted ones; all stable ones from `since` on, as far as they are not there yet, when
    empty. Errors: BedplateError for a version the package index does not have, a download that fails, a file
    whose sha256 differs.
    """
    published = published_releases("0" if versions else since)
    for version in versions or [v for v in published if index.release(v) is None]:
        if version not in published:
            raise BedplateError(f"the package index has no wheel of torch {version} for {MACHINE}")
        package = choose_wheel(published[version])
        with tempfile.TemporaryDirectory(prefix="bedplate-abi-") as place:
            wheel = Path(place) / package.filename
            say(f"torch {version}: {package.filename}, {(package.size or 0) / 1e6:.0f} MB")
            with open_index() as client:
                client.download_package(package, wheel, verify=True)
            yield add_wheel(index, wheel, wheel_records(published[version]))
