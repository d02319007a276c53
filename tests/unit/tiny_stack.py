"""Generations of the tiny stack for unit tests: real environments, made in a moment without an installer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

TINY = Path(__file__).resolve().parents[1] / "tiny"


def _build_module():
    spec = importlib.util.spec_from_file_location("tiny_build", TINY / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


build = _build_module()


def build_wheels(out: Path) -> Path:
    """Build the wheels and stubs under out, unlocked; return out."""
    build.build_wheels(out / "wheels", out / "stubs")
    return out


def make_generation(root: Path, tiny: Path, torch: str = "2.9.1+tiny", kernel: str = "0.3.21+tiny") -> Path:
    """Make a generation directory with its venv from the tiny wheels; torch or kernel may be empty."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "venv")], check=True)
    site = site_packages(root)
    for name, version in (("torch", torch), ("sgl_kernel", kernel)):
        if version:
            (wheel,) = (tiny / "wheels").glob(f"{name}-{version}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
    # Where the machine has no libnuma1, the stub does.
    (root / "environment").write_text(f"LD_LIBRARY_PATH={tiny / 'stubs'}\n", encoding="utf-8")
    return root


def take_nccl(generation: Path) -> Path:
    """Have the tiny torch of a generation take "nccl" for its transport, and say that it sees two GPUs; return it."""
    torch = site_packages(generation) / "torch"
    for name, old, new in (
        ("distributed.py", "    return False", "    return True"),
        ("distributed.py", 'if backend != "gloo"', 'if backend != "nccl"'),
        ("cuda.py", "    return 0", "    return 2"),
        ("__init__.py", 'if device != "cpu"', "if False"),
    ):
        text = (torch / name).read_text()
        assert old in text
        (torch / name).write_text(text.replace(old, new))
    with (torch / "cuda.py").open("a") as stream:
        stream.write("\n\ndef set_device(index):\n    pass\n\n\ndef synchronize():\n    pass\n")
    return generation


def site_packages(root: Path) -> Path:
    """Return the directory of the generation's packages."""
    (site,) = (root / "venv" / "lib").glob("python3*/site-packages")
    return site
