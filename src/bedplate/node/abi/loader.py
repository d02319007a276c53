"""A process as the dynamic linker would build it, without loading anything.

``Loader`` follows glibc's rules for ``dlopen`` (``elf/dl-load.c``, ``elf/dl-deps.c``, ``elf/dl-lookup.c``,
and ld.so(8)): a needed name is first matched against what is already loaded (requested names and SONAMEs),
then searched in RPATH, LD_LIBRARY_PATH, RUNPATH, the ld.so cache and the default directories; symbols are
looked up in the global scope and then in the closure of the file that was opened. Files of another machine
are skipped in a search, as the loader skips them. Not modelled: LD_PRELOAD, audit modules, glibc-hwcaps
subdirectories, dlmopen namespaces.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from .elf import ElfError, ElfFile, Symbol, gnu_hash

CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_ENTRY = struct.Struct("<iIIIQ")
_LIB_DIRS = ("/lib/{}-linux-gnu", "/usr/lib/{}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


def read_ld_cache(data: bytes) -> dict[str, list[str]]:
    """Return name -> paths of an ld.so.cache in the format of glibc 2.2 and later; empty for anything else.

    Format: ``struct cache_file_new`` of glibc's ``sysdeps/generic/dl-cache.h``; offsets count from its start.
    """
    start = data.find(CACHE_MAGIC)
    if start < 0 or len(data) < start + 48:
        return {}
    count = struct.unpack_from("<I", data, start + 20)[0]
    end = start + 48 + count * _CACHE_ENTRY.size
    if end > len(data):
        return {}
    found: dict[str, list[str]] = {}
    for _, key, value, _, _ in _CACHE_ENTRY.iter_unpack(data[start + 48 : end]):
        name, path = (data[start + at : data.find(b"\0", start + at)] for at in (key, value))
        found.setdefault(os.fsdecode(name), []).append(os.fsdecode(path))
    return found


class SystemLibraries:
    """The libraries that the node's own loader finds: its cache and its default directories.

    Args: cache: path of ld.so.cache, or None to use directories alone; directories: the default directories,
    or None for those of the machine.
    """

    def __init__(self, cache: str | None = "/etc/ld.so.cache", directories: Iterable[str] | None = None) -> None:
        """Keep where to look; nothing is read yet."""
        self._cache_path = cache
        self._directories = None if directories is None else tuple(directories)
        self._cache: dict[str, list[str]] | None = None

    def candidates(self, name: str, machine: str, *, default_directories: bool = True) -> list[str]:
        """Return the paths the loader would try for ``name``, in order."""
        if self._cache is None:
            self._cache = {}
            if self._cache_path:
                try:
                    with open(self._cache_path, "rb") as file:
                        self._cache = read_ld_cache(file.read())
                except OSError:
                    self._cache = {}  # a container without ldconfig: the default directories still count
        if not default_directories:
            return []
        directories = self._directories
        if directories is None:
            directories = tuple(directory.format(machine) for directory in _LIB_DIRS)
        return self._cache.get(name, []) + [os.path.join(d, name) for d in directories]


@dataclass(eq=False)
class Library:
    """One file of the simulated process.

    needed: what its DT_NEEDED were met by, in order; missing: needed names that nothing met; broken: needed
    names that were found but are malformed, with the reason; borrowed: needed names the loader would not
    find, taken from ``Loader.elsewhere`` instead.
    """

    path: str
    elf: ElfFile
    loader: Library | None = None
    needed: list[Library] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    borrowed: dict[str, str] = field(default_factory=dict)
    _scope: list[Library] | None = None
    _members: frozenset[Library] = frozenset()

    @property
    def origin(self) -> str:
        """The directory that $ORIGIN stands for."""
        return os.path.dirname(self.path)

    def scope(self) -> list[Library]:
        """Return this library and everything it needs, breadth first, each once: its local symbol scope."""
        if self._scope is None:
            found = [self]
            seen = {id(self)}
            for library in found:  # grows while it is walked: breadth first
                for needed in library.needed:
                    if id(needed) not in seen:
                        seen.add(id(needed))
                        found.append(needed)
            self._scope = found
            self._members = frozenset(found)
        return self._scope

    def sees(self, library: Library) -> bool:
        """Tell whether ``library`` is in this one's scope."""
        self.scope()
        return library in self._members


class Loader:
    """A simulated process.

    Args: executable: path of the program (its closure is the first part of the global scope), or None;
    machine: ``x86_64`` or ``aarch64``, used when there is no executable; library_path: directories of
    LD_LIBRARY_PATH; system: where system libraries are found. ``elsewhere`` may be set to name -> path of
    files a package may load by its own code: taken when the search finds nothing, and recorded as borrowed.
    """

    def __init__(
        self,
        executable: str | None = None,
        *,
        machine: str = "x86_64",
        library_path: Iterable[str] = (),
        system: SystemLibraries | None = None,
    ) -> None:
        """Start the process with its program, if one is given."""
        self.machine = machine
        self.library_path = [p for p in library_path if p]
        self.system = system or SystemLibraries()
        self.elsewhere: dict[str, str] = {}
        self.global_scope: list[Library] = []
        self._global: set[Library] = set()
        self.main: Library | None = None
        self._by_name: dict[str, Library] = {}
        self._by_file: dict[tuple[int, int], Library] = {}
        self._elves: dict[tuple[int, int], ElfFile] = {}
        self._hashes: dict[bytes, int] = {}
        self._providers: dict[tuple[bytes, bytes | None], Library] = {}
        if executable is not None:
            self.main = self.dlopen(executable, to_global=True)
            self.machine = self.main.elf.machine

    # -- loading

    def dlopen(self, path: str, *, to_global: bool = False) -> Library:
        """Load a file and its needs; return it. ``to_global`` is RTLD_GLOBAL.

        Errors: ElfError or OSError for the file itself; problems of its needs are recorded on the libraries.
        """
        library = self._map(os.path.abspath(path), None)
        self._complete(library)
        if to_global:
            self.global_scope += [new for new in library.scope() if new not in self._global]
            self._global.update(library.scope())
        return library

    def snapshot(self) -> tuple[dict[str, Library], dict[tuple[int, int], Library]]:
        """Return the state of what is loaded, for ``restore``: a trial load leaves no trace."""
        return dict(self._by_name), dict(self._by_file)

    def restore(self, state: tuple[dict[str, Library], dict[tuple[int, int], Library]]) -> None:
        """Forget everything loaded after the snapshot."""
        self._by_name, self._by_file = dict(state[0]), dict(state[1])

    def loaded(self, name: str) -> Library | None:
        """Return the loaded library that answers to ``name`` (a requested name, SONAME or path)."""
        return self._by_name.get(name)

    def open(self, path: str) -> ElfFile:
        """Return the ELF file at a path, mapped once however often it is asked for.

        Errors: ElfError, OSError.
        """
        return self._open(path)[1]

    def _open(self, path: str) -> tuple[tuple[int, int], ElfFile]:
        info = os.stat(path)
        identity = (info.st_dev, info.st_ino)
        elf = self._elves.get(identity)
        if elf is None:
            elf = self._elves[identity] = ElfFile.open(path)
        return identity, elf

    def _map(self, path: str, loader: Library | None) -> Library:
        identity, elf = self._open(path)
        known = self._by_file.get(identity)
        if known is not None:
            return known
        if self.main is not None and elf.machine != self.machine:
            raise ElfError(f"an ELF file for {elf.machine}", 18, foreign=True)
        # The kernel hands the loader the resolved path of the program; dlopen keeps the path it was given.
        library = Library(path, elf, loader)
        self._by_file[identity] = library
        self._by_name.setdefault(path, library)
        soname = elf.soname
        if soname:
            self._by_name.setdefault(soname, library)
        return library

    def _complete(self, root: Library) -> None:
        queue = [root]
        done = {id(root)}
        for library in queue:
            if library.needed or library.missing or library.broken:
                continue  # loaded earlier, complete already
            for name in library.elf.needed:
                found = self._find(name, library)
                if found is None:
                    continue
                library.needed.append(found)
                if id(found) not in done:
                    done.add(id(found))
                    queue.append(found)

    def _find(self, name: str, caller: Library) -> Library | None:
        known = self._by_name.get(name)
        if known is not None:
            return known
        for path in self._search(name, caller):
            try:
                library = self._map(path, caller)
            except FileNotFoundError:
                continue
            except ElfError as error:
                if error.foreign:
                    continue
                caller.broken[name] = f"{path}: {error}"
                return None
            except OSError:
                continue  # a directory in the way, no permission: the loader tries the next place as well
            self._by_name.setdefault(name, library)
            return library
        return self._borrow(name, caller)

    def _borrow(self, name: str, caller: Library) -> Library | None:
        path = self.elsewhere.get(name)
        if path is not None:
            try:
                library = self._map(path, caller)
            except (ElfError, OSError) as error:
                caller.broken[name] = f"{path}: {error}"
                return None
            caller.borrowed[name] = path
            self._by_name.setdefault(name, library)
            return library
        caller.missing.append(name)
        return None

    def _search(self, name: str, caller: Library) -> Iterable[str]:
        if "/" in name:
            yield self._expand(name, caller)
            return
        if not caller.elf.runpath:
            ancestor: Library | None = caller
            while ancestor is not None:
                yield from self._in(ancestor.elf.rpath, ancestor, name)
                ancestor = ancestor.loader
            if self.main is not None and caller is not self.main:
                yield from self._in(self.main.elf.rpath, self.main, name)
        yield from (os.path.join(directory, name) for directory in self.library_path)
        yield from self._in(caller.elf.runpath, caller, name)
        yield from self.system.candidates(name, self.machine, default_directories=not caller.elf.nodeflib)

    def _in(self, directories: Iterable[str], library: Library, name: str) -> Iterable[str]:
        for directory in directories:
            yield os.path.join(self._expand(directory, library), name)

    def _expand(self, text: str, library: Library) -> str:
        if "$" not in text:
            return text
        lib = "lib64" if os.path.isdir("/usr/lib64/gconv") else f"lib/{self.machine}-linux-gnu"
        for key, value in (("ORIGIN", library.origin), ("LIB", lib), ("PLATFORM", self.machine)):
            text = text.replace("${" + key + "}", value).replace("$" + key, value)
        return text

    # -- symbols

    def provider(self, symbol: Symbol, root: Library) -> Library | None:
        """Return the library that an undefined symbol of ``root``'s closure binds to, or None.

        The answer is exact on whether the symbol resolves. Which library is named may differ from the
        loader's choice when several in scope export the same name: a library asked before is asked first, for
        speed.
        """
        version = symbol.version.name if symbol.version is not None else None
        key = (symbol.name, version)
        known = self._providers.get(key)
        if known is not None and (known in self._global or root.sees(known)):
            return known
        hashed = self._hashes.get(symbol.name)
        if hashed is None:
            hashed = self._hashes[symbol.name] = gnu_hash(symbol.name)
        first = self._by_name.get(os.fsdecode(symbol.version.file)) if symbol.version is not None else None
        if first is not None and not (first in self._global or root.sees(first)):
            first = None
        if first is not None and first.elf.lookup(symbol.name, version, hashed):
            self._providers[key] = first
            return first
        for library in chain(self.global_scope, root.scope()):
            if library.elf.lookup(symbol.name, version, hashed):
                self._providers[key] = library
                return library
        return None
