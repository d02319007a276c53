"""Coverage-guided fuzzing of the ELF reader: anything but ElfError is a finding.

Run it in an environment that has atheris (it is not in the project's lock, being a compiler-dependent tool):

    PYTHONPATH=src:tests/fuzz python tests/fuzz/fuzz_elf.py \\
        -runs=10000000 -rss_limit_mb=256 -timeout=5 -max_len=1536 CORPUS

The seeds are added to CORPUS when it is empty; reduced cases that once failed or reached new code are kept in
tests/fuzz/corpus and run by tests/unit/test_elf.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["bedplate.node.abi.elf"]):
    from reading import read_everything

    from bedplate.node.abi.elf import ElfError

from seeds import SEEDS


def one_input(data: bytes) -> None:
    """Read one input; ElfError is the expected answer to bad ones."""
    try:
        read_everything(data)
    except ElfError:
        return


def main() -> None:
    """Seed the corpus and fuzz."""
    directories = [a for a in sys.argv[1:] if not a.startswith("-")]
    if directories and not any(Path(directories[0]).iterdir()):
        for name, data in SEEDS.items():
            (Path(directories[0]) / name).write_bytes(data)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
