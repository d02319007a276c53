"""How fast the ABI check is, against pyelftools and LIEF, in one run.

PYTHONPATH=src python benchmarks/abi.py ENVIRONMENT [--runs 5]

ENVIRONMENT is a virtual environment with torch and a kernel package (sgl_kernel); the peers are measured when they
can be imported. Each method answers the same question for the package's shared objects: which undefined symbols does
nothing provide? The peers read the symbol tables of the package and of torch's libraries; Bedplate also follows the
needed libraries, the interpreter, glibc and the CUDA wheels, and checks versions. Medians; "cold" drops the files
from the page cache before each run (posix_fadvise).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bedplate.node.abi.check import check_environment
from bedplate.node.abi.elf import STB_WEAK
from bedplate.node.abi.installed import find_environment, shared_objects, site_packages_of
from bedplate.node.abi.loader import Loader


def ours(python: str | None, torch: list[str], files: list[str]) -> set[str]:
    """Load torch, then each file, and return the symbols nothing provides, versions respected."""
    loader = Loader(python)
    for path in torch:
        loader.dlopen(path)
    missing = set()
    for path in files:
        root = loader.dlopen(path)
        for symbol in root.elf.undefined():
            if symbol.bind != STB_WEAK and loader.provider(symbol, root) is None:
                missing.add(symbol.name.decode())
    return missing


def with_pyelftools(torch: list[str], files: list[str]) -> set[str]:
    """Read whole symbol tables with pyelftools."""
    from elftools.elf.elffile import ELFFile

    exports: set[str] = set()
    wanted: set[str] = set()
    for path in [*torch, *files]:
        with open(path, "rb") as file:
            elf = ELFFile(file)
            versions = elf.get_section_by_name(".gnu.version")
            for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
                if symbol["st_shndx"] != "SHN_UNDEF":
                    exports.add(symbol.name)
                elif path in files and symbol["st_info"]["bind"] == "STB_GLOBAL":
                    plain = versions is None or versions.get_symbol(number)["ndx"] in (
                        "VER_NDX_LOCAL",
                        "VER_NDX_GLOBAL",
                    )
                    if plain:
                        wanted.add(symbol.name)
    return wanted - exports


def with_lief(torch: list[str], files: list[str]) -> set[str]:
    """Read whole files with LIEF."""
    import lief

    exports: set[str] = set()
    wanted: set[str] = set()
    for path in [*torch, *files]:
        binary = lief.ELF.parse(path)  # kept: its symbols die with it
        for symbol in binary.dynamic_symbols:
            if symbol.shndx != 0:
                exports.add(str(symbol.name))
            elif path in files and symbol.binding == lief.ELF.Symbol.BINDING.GLOBAL:
                version = symbol.symbol_version
                if not (version and version.has_auxiliary_version):
                    wanted.add(str(symbol.name))
    return wanted - exports


def drop(paths: list[str]) -> None:
    """Ask the kernel to forget the cached pages of the files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure(run: Callable[[], object], runs: int, before: Callable[[], None]) -> float:
    """Return the median wall time in seconds."""
    times = []
    for _ in range(runs):
        before()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment")
    parser.add_argument("--package", default="sgl_kernel")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    site = site_packages_of(options.environment)
    environment = find_environment(site)
    everything = shared_objects(site)
    torch = [os.path.join(site, f) for f in everything if f.startswith("torch/lib/")]
    files = [os.path.join(site, f) for f in everything if f.split("/")[0] in (options.package, "deep_gemm")]
    all_paths = [os.path.join(site, f) for f in everything]
    methods: list[tuple[str, Callable[[], object]]] = [
        ("bedplate", lambda: ours(environment.python, torch, files)),
    ]
    for name, function in (("pyelftools", with_pyelftools), ("LIEF", with_lief)):
        try:
            function([], files[:1])
        except ImportError:
            sys.stderr.write(f"{name} is not installed: not measured\n")
            continue
        methods.append((name, lambda function=function: function(torch, files)))  # type: ignore[misc]
    sys.stdout.write(f"{len(files)} files of {options.package} against {len(torch)} libraries of torch\n")
    warm, cold = {}, {}
    for name, run in methods:
        run()
        warm[name] = measure(run, options.runs, lambda: None)
        cold[name] = measure(run, options.runs, lambda: drop(torch + files))
    for name, _ in methods:
        sys.stdout.write(
            f"{name:<12} warm {warm[name]:8.4f} s ({warm[name] / warm['bedplate']:6.1f} x)   "
            f"cold {cold[name]:8.4f} s ({cold[name] / cold['bedplate']:6.1f} x)\n"
        )
    check_environment(site)
    whole = measure(lambda: check_environment(site), options.runs, lambda: None)
    whole_cold = measure(lambda: check_environment(site), options.runs, lambda: drop(all_paths))
    sys.stdout.write(f"whole environment, {len(everything)} files: warm {whole:.3f} s, cold {whole_cold:.3f} s\n")
    found = {name: run() for name, run in methods}
    for name, missing in found.items():
        sys.stdout.write(f"{name}: {len(missing)} symbols without a provider\n")  # type: ignore[arg-type]
    sys.stdout.write(f"{Path(site)}\n")


if __name__ == "__main__":
    main()
