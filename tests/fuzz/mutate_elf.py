"""Blind mutation of the ELF reader's inputs: many cheap executions over the corpus that fuzz_elf.py grew.

    PYTHONPATH=src:tests/fuzz python tests/fuzz/mutate_elf.py CORPUS EXECUTIONS [SEED]

Anything but ElfError stops the run and leaves the input as crash-<sha>. The address space is limited
to 512 MB (Python included; the peak is printed), and 256 executions to 30 seconds.
"""

from __future__ import annotations

import hashlib
import random
import resource
import signal
import struct
import sys
import time
from pathlib import Path

from reading import read_everything
from seeds import SEEDS

from bedplate.node.abi.elf import ElfError

INTERESTING = (
    0,
    1,
    2,
    3,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 62,
    2**64 - 1,
)


def mutate(data: bytearray, dice: random.Random) -> None:
    """Change one to six places: bytes, bits, or aligned integers with values that tend to hurt; sometimes cut."""
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(data))
        kind = dice.random()
        if kind < 0.3:
            data[at] = dice.randrange(256)
        elif kind < 0.5:
            data[at] ^= 1 << dice.randrange(8)
        elif kind < 0.95:
            size, code = dice.choice(((2, "<H"), (4, "<I"), (8, "<Q")))
            at -= at % size
            value = (
                dice.choice(INTERESTING) + dice.randint(-2, 2)
                if dice.random() < 0.6
                else dice.randrange(len(data) + 64)
            )
            if at + size <= len(data):
                struct.pack_into(code, data, at, value & (1 << 8 * size) - 1)
        else:
            del data[at + 1 :]


def main() -> None:
    """Run."""
    place, executions = Path(sys.argv[1]), int(sys.argv[2])
    dice = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 1)  # noqa: S311 - reproducible on purpose
    corpus = [*SEEDS.values(), *(p.read_bytes() for p in sorted(place.iterdir()) if p.stat().st_size)]
    limit = (512 << 20, 512 << 20)
    resource.setrlimit(resource.RLIMIT_AS, limit)
    started = time.monotonic()
    for number in range(executions):
        data = bytearray(dice.choice(corpus))
        mutate(data, dice)
        if number % 256 == 0:
            signal.alarm(30)  # 256 executions that take longer have one that hangs; the default action ends the run
        try:
            read_everything(bytes(data))
        except ElfError:
            continue
        except BaseException:
            Path(f"crash-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)
            raise
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    sys.stdout.write(f"{executions} executions in {time.monotonic() - started:.0f} s, peak {peak} MB, no finding\n")


if __name__ == "__main__":
    main()
