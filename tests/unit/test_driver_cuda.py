"""cuInit is asked of a small library in a real child: what it answers, and what becomes of one that hangs or dies."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bedplate.node.driver import cuda_start
from bedplate.node.verdicts import Verdict

# The library does what STUB says: answers a code, sleeps, or dies.
SOURCE = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) {
    const char *what = getenv("STUB");
    if (!strcmp(what, "hang")) sleep(600);
    if (!strcmp(what, "abort")) abort();
    return flags ? 1 : atoi(what);
}
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 8; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"], cwd=folder, check=True)
    return str(folder / "libcuda.so.1")


def ask(library: str, what: str, **options: Any) -> dict[str, Any]:
    return cuda_start.query(library=library, environment={"STUB": what}, **options)


def judge(found: dict[str, Any], hmm: str = "Y") -> Verdict:
    (verdict,) = cuda_start.judge(found, {"nvidia_uvm": {"uvm_disable_hmm": hmm}})
    assert verdict.status == "pass" or verdict.action
    return verdict


def test_cuda_starts(library: str) -> None:
    found = ask(library, "0")
    assert found == {"error": None, "timed_out": False, "code": 0, "version": 13000, "devices": 8}
    verdict = judge(found)
    assert (verdict.code, verdict.status, verdict.message) == (
        "driver.cuda_init",
        "pass",
        "CUDA starts, and sees 8 GPUs.",
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "dmesg"), (100, "gpu."), (802, "fabricmanager"), (803, "cuda-compat"), (804, "cuda-compat"), (1, "CUresult")],
)
def test_a_code_has_its_next_step(library: str, code: int, words: str) -> None:
    found = ask(library, str(code))
    assert (found["code"], found["devices"]) == (code, None)
    verdict = judge(found)
    assert (verdict.code, verdict.status, verdict.subject) == ("driver.cuda_init", "fail", "cuInit")
    assert f"It fails with {code} (" in verdict.message
    assert words in verdict.action


@pytest.mark.parametrize("hmm", ["N", "0"])
def test_code_3_while_hmm_is_on_is_a_fault_of_its_own(library: str, hmm: str) -> None:
    verdict = judge(ask(library, "3"), hmm)
    assert (verdict.code, verdict.status, verdict.subject) == ("driver.hmm", "fail", "nvidia_uvm")
    assert 'driver.parameters.nvidia_uvm.uvm_disable_hmm to "1"' in verdict.action


def test_a_call_that_does_not_come_back_is_killed(library: str) -> None:
    found = ask(library, "hang", timeout_s=1.0)
    assert found["timed_out"]
    verdict = judge(found)
    assert (verdict.code, verdict.status) == ("driver.cuda_init", "fail")
    assert "killed after" in verdict.message
    assert "in cuInit" in verdict.message
    assert "Xids" in verdict.action


def test_a_call_that_kills_the_process(library: str) -> None:
    verdict = judge(ask(library, "abort"))
    assert (verdict.status, "died by SIGABRT in cuInit" in verdict.message) == ("fail", True)


@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_library_that_is_not_there_or_is_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "libcuda.so.1").write_bytes(content)
    verdict = judge(ask(str(tmp_path / "libcuda.so.1"), "0"))
    assert (verdict.code, verdict.status) == ("driver.cuda_init", "fail")
    assert str(tmp_path) in verdict.message
    assert "libcuda" in verdict.action


def test_a_library_without_the_calls(tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int x;\n")
    subprocess.run(["cc", "-shared", "-o", "libcuda.so.1", "empty.c"], cwd=tmp_path, check=True)
    assert "cuInit" in judge(ask(str(tmp_path / "libcuda.so.1"), "0")).message
