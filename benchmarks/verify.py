"""What the collective check costs, against as many bare imports of torch started together, in one run.

PYTHONPATH=src python benchmarks/verify.py GENERATION... [--ranks 2 4 8] [--max-bytes N] [--runs 3]

GENERATION is a directory with venv/ that holds torch. For each number of ranks: "bare" is the wall time of that many
`python -I -c "import torch"` at once; "check" that of the whole check with gloo, from the call to its verdict; "import"
and "group" are its parts as the evidence tells them, and "transfers" is what of "group" the size of the messages
takes: (group at N bytes) - (group at 8 bytes). The aim: check <= 2 x bare + transfers. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from bedplate.node.stack.collective import check_collective


def bare(python: str, count: int) -> float:
    """Return the seconds that ``count`` imports of torch take, started together."""
    began = time.monotonic()
    children = [subprocess.Popen([python, "-I", "-B", "-c", "import torch"]) for _ in range(count)]
    for child in children:
        if child.wait():
            raise SystemExit(f"{python} does not import torch")
    return time.monotonic() - began


def check(python: str, ranks: int, max_bytes: int) -> dict[str, Any]:
    """Return the seconds of one check and of its parts, and the bandwidth that it measured."""
    began = time.monotonic()
    settings = {"backend": "gloo", "ranks": [ranks], "max_bytes": max_bytes, "timeout_s": 600}
    (verdict,) = check_collective(settings, python=python)
    seconds = time.monotonic() - began
    if verdict.code != "collective.ok":
        raise SystemExit(f"{verdict.code}: {verdict.message}")
    keys = ("import_seconds", "seconds", "algbw_gbps", "busbw_gbps", "spread_s", "bytes", "torch")
    return {"check": seconds, **{key: verdict.evidence[key] for key in keys}}


def main() -> None:
    """Print one line for each environment and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generations", type=Path, nargs="+", metavar="GENERATION")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--max-bytes", type=int, default=8 << 20)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    print(
        "torch          ranks    bare   check  import   group  transfers  check/(2 bare + transfers)     algbw", end=""
    )
    print("     busbw")
    for generation in arguments.generations:
        python = str(generation / "venv" / "bin" / "python")
        bare(python, 1)  # warms the page cache
        for ranks in arguments.ranks:
            imports, full, small = [], [], []
            for _ in range(arguments.runs):
                imports.append(bare(python, ranks))
                full.append(check(python, ranks, arguments.max_bytes))
                small.append(check(python, ranks, 8))

            def median(key: str, runs: list[dict[str, Any]]) -> float:
                return statistics.median(float(run[key]) for run in runs)

            alone, whole, group = statistics.median(imports), median("check", full), median("seconds", full)
            transfers = max(0.0, group - median("seconds", small))
            print(
                f"{full[0]['torch']:14} {ranks:5} {alone:7.2f} {whole:7.2f} {median('import_seconds', full):7.2f} "
                f"{group:7.2f} {transfers:10.2f}  {whole / (2 * alone + transfers):25.2f} "
                f"{median('algbw_gbps', full):9.3f} {median('busbw_gbps', full):9.3f}  GB/s at {full[0]['bytes']} bytes"
            )


if __name__ == "__main__":
    main()
