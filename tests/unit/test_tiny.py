from __future__ import annotations

import hashlib
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import tiny_stack
import yaml

OLD = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
NEW = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stack.build_wheels(tmp_path_factory.mktemp("tiny"))


def library(tiny: Path, wheel: str, name: str, to: Path) -> Path:
    (path,) = (tiny / "wheels").glob(wheel)
    with zipfile.ZipFile(path) as archive:
        return Path(archive.extract(name, to))


def symbols(path: Path, option: str) -> set[str]:
    text = subprocess.run(["nm", "-D", option, str(path)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in text.splitlines()}


def dynamic(path: Path) -> str:
    return subprocess.run(["readelf", "-d", str(path)], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(("version", "symbol"), [("2.9.1", OLD), ("2.9.2", OLD), ("2.10.0", NEW)])
def test_each_release_exports_the_signature_of_the_real_one(
    tiny: Path, tmp_path: Path, version: str, symbol: str
) -> None:
    path = library(tiny, f"torch-{version}+tiny-*.whl", "torch/lib/libc10_cuda.so", tmp_path)
    assert {name for name in symbols(path, "--defined-only") if "cuda_check" in name} == {symbol}


def test_the_extension_needs_the_old_symbol_and_has_no_rpath(tiny: Path, tmp_path: Path) -> None:
    path = library(tiny, "sgl_kernel-0.3.21+tiny-*.whl", "sgl_kernel/common_ops.abi3.so", tmp_path)
    assert OLD in symbols(path, "--undefined-only")
    assert "PyInit_common_ops" in symbols(path, "--defined-only")
    needed = dynamic(path)
    assert "PATH" not in needed
    for name in ("libc10_cuda.so", "libc10.so", "libnuma.so.1"):
        assert f"[{name}]" in needed


def test_the_wheels_say_that_they_are_stand_ins(tiny: Path) -> None:
    wheels = list((tiny / "wheels").glob("*.whl"))
    assert len(wheels) == 7
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
            assert "\nSummary: Bedplate test stand-in, not " in archive.read(metadata).decode()


def test_the_same_sources_give_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    def digests(directory: Path) -> dict[str, str]:
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.glob("*.whl")}

    assert digests(tiny_stack.build_wheels(tmp_path) / "wheels") == digests(tiny / "wheels")


def test_every_profile_pins_a_wheel_that_is_built(tiny: Path, tmp_path: Path) -> None:
    tiny_stack.build.write_profiles(tmp_path)
    for path in tmp_path.glob("*/profile.yml"):
        for pin in yaml.safe_load(path.read_text())["stack"]["requirements"]:
            name, version = re.fullmatch(r"(.+)==(.+)", pin).groups()
            assert list((tiny / "wheels").glob(f"{name.replace('-', '_')}-{version}-*.whl")), pin
    assert len(list(tmp_path.iterdir())) == 6


def test_a_library_that_needs_a_newer_glibc_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"...GLIBC_2.5...GLIBC_2.38...")
    with pytest.raises(SystemExit, match=r"needs glibc 2\.38; the tag says 2\.17"):
        tiny_stack.build.check_glibc(tmp_path / "x.so")


@pytest.mark.parametrize(
    ("torch", "kernel", "exit_code", "text"),
    [
        ("2.9.1+tiny", "0.3.21+tiny", 0, ""),
        ("2.10.0+tiny", "0.3.21+tiny", 1, f"undefined symbol: {OLD}"),
        ("2.9.1+tiny", "0.3.21+tiny.crash", -6, ""),
        ("", "0.3.21+tiny", 1, "No module named 'torch'"),
    ],
)
def test_the_import_ends_as_the_readme_says(
    tiny: Path, tmp_path: Path, torch: str, kernel: str, exit_code: int, text: str
) -> None:
    generation = tiny_stack.make_generation(tmp_path / "generation", tiny, torch, kernel)
    result = subprocess.run(
        [str(generation / "venv/bin/python"), "-I", "-c", "import sgl_kernel"],
        env={"LD_LIBRARY_PATH": str(tiny / "stubs")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == exit_code, result.stderr
    assert text in result.stderr
