"""Generations that do not fit together: real directories, a real nvcc of a few lines, evidence as imports leave it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.stack.check import check_stack, nccl_text, runs_on
from bedplate.node.verdicts import Verdict

LOCK = "# by bedplate lock\ntorch==2.11.0 \\\n    --hash=sha256:00\nnvidia-nccl-cu13==2.28.9 \\\n    --hash=sha256:01\n"


def torch_verdict(**evidence: Any) -> Verdict:
    found = {
        "cuda": "13.0",
        "arch_list": ["sm_90", "sm_120"],
        "nccl": 22809,
        "libraries": {"libnccl.so.2": ["/g/nvidia/nccl/lib/libnccl.so.2"]},
        **evidence,
    }
    return Verdict("import.ok", "pass", "stack", "torch", "Imports.", found)


@pytest.fixture
def generation(tmp_path: Path) -> Path:
    site = tmp_path / "venv/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (tmp_path / "requirements.lock").write_text(LOCK)
    return tmp_path


def install(generation: Path, *packages: str) -> None:
    for package in packages:
        (generation / "venv/lib/python3.11/site-packages" / f"{package}.dist-info").mkdir()


def run(
    generation: Path, *imports: Verdict, environment: dict[str, str] | None = None, **kwargs: Any
) -> dict[str, Verdict]:
    found = check_stack(
        imports or [torch_verdict()], generation=str(generation), environment=environment or {}, **kwargs
    )
    verdicts = {verdict.code: verdict for verdict in found}
    assert len(verdicts) == len(found)
    return verdicts


def nvcc(root: Path, body: str) -> Path:
    path = root / "bin/nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return root


RELEASE = "echo 'Cuda compilation tools, release 13.0, V13.0.88'"


def test_a_stack_that_fits_together(generation: Path) -> None:
    install(generation, "flashinfer_python-0.6.11.post1", "flashinfer_cubin-0.6.11.post1", "sglang_kernel-0.4.2.post2")
    assert {code: v.status for code, v in run(generation, arch="sm_120").items()} == {
        "stack.nccl_version": "pass",
        "stack.arch": "pass",
        "stack.flashinfer_versions": "pass",
        "stack.cuda_home": "skipped",
    }


def test_where_torch_does_not_import_it_is_not_asked(generation: Path) -> None:
    broken = Verdict("import.crash", "fail", "stack", "torch", "It died.")
    verdicts = run(
        generation, broken, arch="sm_120", environment={"CUDA_HOME": str(nvcc(generation / "cuda", RELEASE))}
    )
    for code in ("stack.nccl_version", "stack.arch", "stack.cuda_home"):
        assert verdicts[code].status == "skipped", code
        assert re.search("torch (?:was not imported|does not say)", verdicts[code].message)


def test_a_package_that_brings_torch_along_tells_of_it(generation: Path) -> None:
    kernel = replace(torch_verdict(nccl=22705), subject="sgl_kernel")
    assert run(generation, kernel)["stack.nccl_version"].status == "fail"
    assert run(generation, torch_verdict(), kernel)["stack.nccl_version"].status == "pass"


def test_another_nccl_than_the_lock_pins(generation: Path) -> None:
    verdict = run(generation, torch_verdict(nccl=22705))["stack.nccl_version"]
    assert (verdict.status, verdict.evidence["loaded"], verdict.evidence["locked"]) == ("fail", "2.27.5", "2.28.9")
    assert "/g/nvidia/nccl/lib/libnccl.so.2" in verdict.message


def test_an_nccl_that_does_not_say_its_version(generation: Path) -> None:
    assert run(generation, torch_verdict(nccl=None))["stack.nccl_version"].status == "fail"


def test_no_nccl_to_compare(generation: Path) -> None:
    verdict = run(generation, torch_verdict(nccl=None, libraries={}))["stack.nccl_version"]
    assert (verdict.status, "loads none" in verdict.message) == ("skipped", True)
    (generation / "requirements.lock").unlink()
    verdict = run(generation)["stack.nccl_version"]
    assert (verdict.status, verdict.message) == ("skipped", "The lock pins no NCCL.")


@pytest.mark.parametrize(("locked", "status"), [("2.28.9.post1", "pass"), ("2.28.90", "fail"), ("2.28", "fail")])
def test_the_three_numbers_of_nccl_count(generation: Path, locked: str, status: str) -> None:
    (generation / "requirements.lock").write_text(f"nvidia-nccl-cu13=={locked}\n")
    assert run(generation)["stack.nccl_version"].status == status


@given(st.integers(2, 9), st.integers(9, 99), st.integers(0, 99))
def test_the_number_of_nccl_is_read_as_its_header_makes_it(major: int, minor: int, patch: int) -> None:
    assert nccl_text(major * 10000 + minor * 100 + patch) == f"{major}.{minor}.{patch}"


def test_a_torch_without_the_architecture(generation: Path) -> None:
    verdict = run(generation, torch_verdict(arch_list=["sm_80", "sm_90"]), arch="sm_120")["stack.arch_missing"]
    assert (verdict.status, verdict.message) == ("fail", "torch was built for sm_80, sm_90, and not for sm_120.")
    assert run(generation, torch_verdict(arch_list=[]), arch="sm_120")["stack.arch_missing"].status == "fail"
    assert run(generation, torch_verdict(arch_list=None), arch="sm_120")["stack.arch"].status == "skipped"
    assert not {"stack.arch", "stack.arch_missing"} & set(run(generation))  # nothing is expected


@pytest.mark.parametrize(
    ("built", "arch", "fits"),
    [
        ("sm_120", "sm_120", True),
        ("sm_120", "sm_121", True),
        ("sm_121", "sm_120", False),
        ("sm_100", "sm_120", False),
        ("compute_90", "sm_120", True),
        ("compute_121", "sm_120", False),
        ("sm_120a", "sm_120", True),
        ("sm_120a", "sm_121", False),
        ("sm_120f", "sm_121", True),
        ("compute_100f", "sm_120", False),
        ("compute_90a", "sm_100", False),
        ("gfx942", "sm_120", False),
    ],
)
def test_what_runs_on_what(built: str, arch: str, fits: bool) -> None:
    assert runs_on(built, arch) is fits


@pytest.mark.parametrize(
    "packages", [("sgl_kernel-0.3.21", "sglang_kernel-0.4.2"), ("nvidia_nccl_cu12-2.27.5", "nvidia_nccl_cu13-2.28.9")]
)
def test_two_packages_that_own_the_same_files(generation: Path, packages: tuple[str, str]) -> None:
    install(generation, packages[0])
    assert "stack.package_conflict" not in run(generation)
    install(generation, packages[1])
    verdict = run(generation)["stack.package_conflict"]
    assert verdict.status == "fail"
    assert all(package.rpartition("-")[2] in verdict.message for package in packages)


@pytest.mark.parametrize(
    ("packages", "status"),
    [
        (("flashinfer_python-0.6.3", "flashinfer_cubin-0.6.3", "flashinfer_jit_cache-0.6.3+cu130"), "pass"),
        (("flashinfer_python-0.6.3", "flashinfer_cubin-0.6.2"), "fail"),
        (("flashinfer_python-0.6.13", "flashinfer_jit_cache-0.6.130+cu130"), "fail"),
        (("flashinfer_python-0.6.3",), "pass"),
        (("flashinfer_cubin-0.6.3",), "skipped"),
        ((), "skipped"),
    ],
)
def test_the_three_packages_of_flashinfer(generation: Path, packages: tuple[str, ...], status: str) -> None:
    install(generation, *packages)
    assert run(generation)["stack.flashinfer_versions"].status == status


def test_the_check_of_flashinfer_must_not_be_switched_off(generation: Path) -> None:
    install(generation, "flashinfer_python-0.6.3")
    verdict = run(generation, environment={"FLASHINFER_DISABLE_VERSION_CHECK": "1"})["stack.flashinfer_versions"]
    assert (verdict.status, "hides a mismatch" in verdict.message) == ("fail", True)


@pytest.fixture
def tools(generation: Path) -> Path:
    """Programs of the generation that compile with nvcc, so that the machine's own do not matter."""
    for name in ("ninja", "c++"):
        path = generation / "venv/bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    return generation / "venv/bin"


def cuda_home(generation: Path, home: Path | str) -> Verdict:
    return run(generation, environment={"CUDA_HOME": str(home)})["stack.cuda_home"]


@pytest.mark.usefixtures("tools")
def test_an_nvcc_of_the_release_that_torch_was_built_with(generation: Path) -> None:
    verdict = cuda_home(generation, nvcc(generation / "cuda-13.0", RELEASE))
    assert (verdict.status, verdict.message) == ("pass", "nvcc is of CUDA 13.0, as torch is.")
    assert verdict.evidence["tools"]["ninja"] == str(generation / "venv/bin/ninja")


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'release 12.8, V12.8.93'", "Its nvcc is of CUDA 12.8, and torch was built with 13.0."),
        ("echo 'release 13.1, V13.1.80'", "Its nvcc is of CUDA 13.1, and torch was built with 13.0."),
        ("echo nothing", "Its nvcc is of CUDA an unknown release"),
        ("echo broken >&2; exit 3", "exit code 3: broken"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_an_nvcc_that_is_another_or_does_not_work(generation: Path, body: str, words: str) -> None:
    verdict = cuda_home(generation, nvcc(generation / "cuda", body))
    assert verdict.status == "fail"
    assert words in verdict.message


@pytest.mark.usefixtures("tools")
def test_an_nvcc_that_hangs_is_killed(generation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedplate.node.stack.check.NVCC_TIMEOUT_S", 0.5)
    verdict = cuda_home(generation, nvcc(generation / "cuda", "sleep 60"))
    assert (verdict.status, "did not end in time" in verdict.message) == ("fail", True)


def test_a_cuda_home_that_is_not_there(generation: Path) -> None:
    verdict = cuda_home(generation, "/nonexistent/cuda-13.0")
    assert (verdict.status, verdict.message) == ("fail", "There is no /nonexistent/cuda-13.0/bin/nvcc.")


@pytest.mark.usefixtures("tools")
def test_a_cuda_home_that_is_a_link_warns(generation: Path) -> None:
    home = nvcc(generation / "cuda-13.0", RELEASE)
    (generation / "cuda").symlink_to(home)
    verdict = cuda_home(generation, generation / "cuda")
    assert (verdict.status, str(home) in verdict.message) == ("warn", True)


def test_a_missing_ninja_warns(generation: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools / "ninja").unlink()
    home = nvcc(generation / "cuda-13.0", RELEASE)
    environment = {"CUDA_HOME": str(home), "PATH": str(generation)}
    verdict = run(generation, environment=environment)["stack.cuda_home"]
    assert (verdict.status, "ninja cannot be found" in verdict.message) == ("warn", True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a probe as another user")
def test_a_user_that_does_not_exist_is_a_verdict(generation: Path) -> None:
    home = nvcc(generation / "cuda-13.0", RELEASE)
    verdicts = run(generation, environment={"CUDA_HOME": str(home)}, user="nosuchuser")
    assert "nosuchuser" in verdicts["node.child_failed"].message
