"""Write expected.json: what each kernel wheel misses with each torch release, by binutils alone.

    python make_expected.py WORK --torch torch-2.9.1-....whl ... --kernel sgl_kernel-0.3.21-....whl ...

Nothing of Bedplate is used. Of every shared object `nm -D` lists the dynamic symbols and `readelf -d` the needed
libraries, over whole files unpacked from whole wheels. A file misses the C++ names that it wants without a version and
strongly (`U`, mangled, no `@`) and that neither a library of torch/lib nor another file of its wheel defines; and the
CUDA libraries that it needs and no library of torch needs. The lists of one wheel are kept in WORK
as `<wheel>.json`, so wheels can be given one by one and deleted; the result holds all that WORK has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CUDA = re.compile(r"lib(?!cuda\.so)(?:cu|nv|nccl)[\w-]*\.so\.\d+")
EXPECTED = Path(__file__).with_name("expected.json")


def tool(*command: str) -> list[str]:
    """Return the lines that a tool prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def tables(file: Path) -> dict[str, list[str]]:
    """Return defined names, strongly wanted C++ names without a version, and needed libraries of a shared object."""
    defined = [line.split(" ")[0].split("@")[0] for line in tool("nm", "-D", "-P", "--defined-only", str(file))]
    wanted = [line.split(" ") for line in tool("nm", "-D", "-P", "--undefined-only", str(file))]
    needed = [
        found[1] for line in tool("readelf", "-dW", str(file)) if (found := re.search(r"\(NEEDED\).*\[(.+)\]", line))
    ]
    return {
        "defined": sorted({name for name in defined if name.startswith("_Z")}),
        "wanted": sorted(w[0] for w in wanted if w[1] == "U" and w[0].startswith("_Z") and "@" not in w[0]),
        "needed": needed,
    }


def read(wheel: Path, pattern: str) -> dict[str, object]:
    """Return the sha256 of a wheel and the tables of its shared objects."""
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    files = {}
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=wheel.parent) as place:
        for member in archive.namelist():
            if re.fullmatch(pattern, member):
                files[member] = tables(Path(archive.extract(member, place)))
                (Path(place) / member).unlink()
    return {"sha256": digest, "files": files}


def missing(kernel: dict, torch: dict) -> dict[str, dict[str, list[str]]]:
    """Return file -> what it misses, for those that miss something."""
    exported = {name for file in torch["files"].values() for name in file["defined"]}
    libraries = {name for file in torch["files"].values() for name in file["needed"]}
    found = {}
    for name, file in kernel["files"].items():
        own = {n for other, tables in kernel["files"].items() if other != name for n in tables["defined"]}
        symbols = sorted(set(file["wanted"]) - exported - own)
        absent = sorted(n for n in file["needed"] if CUDA.fullmatch(n) and n not in libraries)
        if symbols or absent:
            found[name] = {"symbols": symbols, "libraries": absent}
    return found


def main() -> None:
    """Read the wheels given, and write what all wheels read so far give."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--torch", type=Path, nargs="*", default=[])
    parser.add_argument("--kernel", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    for kind, wheels, pattern in (
        ("torch", options.torch, r"torch/lib/[^/]+\.so(\.\d+)*"),
        ("kernel", options.kernel, r".+\.so(\.\d+)*"),
    ):
        for wheel in wheels:
            place = options.work / f"{kind}-{'-'.join(wheel.name.split('-')[:2])}.json"
            place.write_text(json.dumps({"wheel": wheel.name, **read(wheel, pattern)}))
            sys.stderr.write(f"{wheel.name}: {place}\n")
    known = {
        kind: {p.stem[len(kind) + 1 :]: json.loads(p.read_text()) for p in options.work.glob(f"{kind}-*.json")}
        for kind in ("torch", "kernel")
    }
    releases = {name.split("-")[1]: torch for name, torch in sorted(known["torch"].items())}
    result = {
        "made_by": "make_expected.py with " + tool("nm", "--version")[0],
        "torch": {version: {"wheel": t["wheel"], "sha256": t["sha256"]} for version, t in releases.items()},
        "kernels": {
            name: {
                "wheel": kernel["wheel"],
                "sha256": kernel["sha256"],
                "missing": {version: missing(kernel, torch) for version, torch in releases.items()},
            }
            for name, kernel in sorted(known["kernel"].items())
        },
    }
    EXPECTED.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
