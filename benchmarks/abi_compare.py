"""Is the ABI engine right? Every shared object of an environment against ldd -r, LIEF and pyelftools.

PYTHONPATH=src python benchmarks/abi_compare.py ENVIRONMENT [--only TEXT]

Tables: needed libraries, SONAME, undefined symbols (name, weak) and exported names, as LIEF and pyelftools read them
(each where it can be imported). Loading: what `ldd -r FILE` says is not found or undefined, against what the simulated
loader says of the same file in a process of its own, both with the directories of torch and of the CUDA wheels as
LD_LIBRARY_PATH. Where a library is not found, only the libraries are compared: what its symbols are then blamed on is
not the loader's word. Ends with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from contextlib import suppress
from glob import glob

from bedplate.node.abi.elf import STB_WEAK, ElfError, ElfFile
from bedplate.node.abi.installed import shared_objects, site_packages_of
from bedplate.node.abi.loader import Loader

Tables = tuple[list[str], str, set[tuple[str, bool]], set[str]]


def ours(path: str) -> Tables:
    """Return the tables of a file as Bedplate reads them."""
    elf = ElfFile.open(path)
    undefined = {(os.fsdecode(s.name), s.bind == STB_WEAK) for s in elf.undefined()}
    return elf.needed, elf.soname or "", undefined, {os.fsdecode(s.name) for s in elf.exports()}


def with_pyelftools(path: str) -> Tables:
    """Return them as pyelftools reads them, through the section headers."""
    from elftools.elf.elffile import ELFFile

    with open(path, "rb") as file:
        elf = ELFFile(file)
        dynamic = list(elf.get_section_by_name(".dynamic").iter_tags())
        undefined, exports = set(), set()
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols():
            bind, kind = symbol["st_info"]["bind"], symbol["st_info"]["type"]
            if not symbol.name or bind == "STB_LOCAL" or kind in ("STT_SECTION", "STT_FILE"):
                continue
            if symbol["st_shndx"] == "SHN_UNDEF":
                undefined.add((symbol.name, bind == "STB_WEAK"))
            elif symbol["st_value"] or kind == "STT_TLS" or symbol["st_shndx"] == "SHN_ABS":
                exports.add(symbol.name)
        needed = [tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"]
        return needed, next((t.soname for t in dynamic if t.entry.d_tag == "DT_SONAME"), ""), undefined, exports


def with_lief(path: str) -> Tables:
    """Return them as LIEF reads them."""
    import lief

    elf = lief.ELF.parse(path)
    bindings, kinds = lief.ELF.Symbol.BINDING, lief.ELF.Symbol.TYPE
    undefined, exports = set(), set()
    for symbol in elf.dynamic_symbols:
        if not symbol.name or symbol.binding == bindings.LOCAL or symbol.type in (kinds.SECTION, kinds.FILE):
            continue
        if symbol.shndx == 0:
            undefined.add((str(symbol.name), symbol.binding == bindings.WEAK))
        elif symbol.value or symbol.type == kinds.TLS or symbol.shndx == 0xFFF1:
            exports.add(str(symbol.name))
    soname = elf.get(lief.ELF.DynamicEntry.TAG.SONAME)
    return [str(n) for n in elf.libraries], str(soname.name) if soname else "", undefined, exports


def with_ldd(path: str, directories: list[str]) -> tuple[set[str], set[str]]:
    """Return the libraries that ldd does not find, and the symbols it does not resolve."""
    environ = {**os.environ, "LC_ALL": "C", "LD_LIBRARY_PATH": ":".join(directories)}
    done = subprocess.run(
        ["/usr/bin/ldd", "-r", path], env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    text = done.stdout + done.stderr
    undefined = set(re.findall(r"undefined symbol: (\S+?),?\s", text))
    undefined |= set(re.findall(r"symbol (\S+), version \S+ not defined", text))
    return set(re.findall(r"^\s*(\S+) => not found", text, re.MULTILINE)), undefined


def simulated(path: str, directories: list[str]) -> tuple[set[str], set[str]]:
    """Return the same from the simulated loader."""
    loader = Loader(library_path=directories)
    root = loader.dlopen(path)
    missing, undefined = set(), set()
    for library in root.scope():
        missing.update(library.missing)
        lost = [s for s in library.elf.undefined() if s.bind != STB_WEAK and loader.provider(s, root) is None]
        referred = library.elf.relocated({s.number for s in lost}) if lost else set()
        undefined |= {os.fsdecode(s.name) for s in lost if s.number in referred}
    return missing, undefined


def main() -> int:
    """Compare and print counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment")
    parser.add_argument("--only", default="", help="files with this in their name")
    options = parser.parse_args()
    site = site_packages_of(options.environment)
    directories = [os.path.join(site, "torch", "lib"), *sorted(glob(os.path.join(site, "nvidia", "*", "lib")))]
    equal = {"ldd -r": 0, "ldd -r, with symbols": 0, "pyelftools": 0, "LIEF": 0}
    differing = 0
    files = [file for file in shared_objects(site) if options.only in file]
    for file in files:
        path = os.path.join(site, file)
        try:
            mine = ours(path)
        except ElfError as error:
            sys.stdout.write(f"{file}: not read: {error}\n")
            continue
        answers = {}
        for name, method in (("pyelftools", with_pyelftools), ("LIEF", with_lief)):
            with suppress(ImportError):  # a peer that is not installed is not compared
                answers[name] = method(path) == mine
        said, found = with_ldd(path, directories), simulated(path, directories)
        answers["ldd -r"] = said[0] == found[0]
        if not found[0]:
            answers["ldd -r, with symbols"] = said == found
        for name, same in answers.items():
            equal[name] += same
            differing += not same
            if not same:
                sys.stdout.write(f"{file}: {name} differs\n")
    counts = ", ".join(f"{name}: {count}" for name, count in equal.items())
    sys.stdout.write(f"{len(files)} files; equal to {counts}; differing: {differing}\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
