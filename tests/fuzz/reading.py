"""What the fuzzers and the unit tests do with every input: use the whole reader."""

from __future__ import annotations

from bedplate.node.abi.elf import ElfFile


def read_everything(data: bytes) -> None:
    """Use every reading method of the reader; only ElfError may come out."""
    file = ElfFile(data)
    _ = (file.needed, file.soname, file.rpath, file.runpath, file.interpreter, file.bind_now, file.nodeflib)
    _ = (file.tls_bytes, file.executable_stack, file.versions(), file.needed_versions(), file.defined_versions())
    file.relocated({symbol.number for symbol in file.undefined()})
    for symbol, _ in zip(file.exports(), range(200), strict=False):
        file.lookup(symbol.name, symbol.version.name if symbol.version else None)
    file.lookup(b"absent")
    file.lookup(b"puts", b"GLIBC_2.2.5")
