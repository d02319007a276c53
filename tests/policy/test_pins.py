"""The pins that the roles carry are the files that the controller's lock installs."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from pathlib import Path

import uv
import yaml

ROOT = Path(__file__).resolve().parents[2]
PINS = yaml.safe_load((ROOT / "roles" / "node_tools" / "vars" / "main.yml").read_text())


def locked(name: str) -> str:
    match = re.search(rf"^{name}==(\S+)", (ROOT / "requirements" / "controller.lock").read_text(), re.MULTILINE)
    assert match, f"{name} is not in requirements/controller.lock"
    return match.group(1)


def sha256(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_uv() -> None:
    assert PINS["__node_tools_uv_version"] == locked("uv")
    assert PINS["__node_tools_uv_sha256"] == sha256(uv.find_uv_bin())


def test_pynvml() -> None:
    spec = importlib.util.find_spec("pynvml")
    assert spec is not None
    assert spec.origin is not None
    assert PINS["__node_tools_pynvml_version"] == locked("nvidia-ml-py")
    assert PINS["__node_tools_pynvml_sha256"] == sha256(spec.origin)


def test_locks_have_a_hash_for_every_package_and_no_address() -> None:
    for lock in sorted((ROOT / "requirements").glob("*.lock")):
        text = lock.read_text()
        packages = re.findall(r"^\S+==.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        assert packages
        assert all("--hash=sha256:" in package for package in packages), lock.name
        assert "://" not in text, lock.name
