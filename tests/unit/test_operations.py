"""Operations made to fail in each way, run by the real probe in a real environment with a torch of a few lines."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_stack

from bedplate.node.stack import operations
from bedplate.node.stack.operations import OPERATIONS, check_operations
from bedplate.node.verdicts import Verdict

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generation")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    shutil.copytree(ROOT / "tests/unit/fake_torch", tiny_stack.site_packages(root), dirs_exist_ok=True)
    return root


Run = Any


@pytest.fixture
def run(generation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run an operation with the given body on that many GPUs: run(body, gpus=2, ranks=False, **environment)."""

    def module(body: str, ranks: bool) -> ModuleType:
        path = tmp_path / "operation.py"
        head = "import os, sys, time\n" + ("RANKS = True\n" if ranks else "")
        path.write_text(f"{head}\n\ndef run(torch, device, check):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n")
        spec = importlib.util.spec_from_file_location("operation_tried", path)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    def run(
        body: str, gpus: int = 2, ranks: bool = False, expected: int | None = None, **options: Any
    ) -> list[Verdict]:
        timeout_s = options.pop("timeout_s", 20.0)
        monkeypatch.setitem(operations._SOURCES, "tried", module(body, ranks))
        environment = {"FAKE_GPUS": str(gpus), **options}
        python = str(generation / "venv/bin/python")
        return check_operations(["tried"], python=python, timeout_s=timeout_s, environment=environment, gpus=expected)

    return run


RIGHT = "check('x', torch.tensor([1, 2]), torch.tensor([1, 2]))"


def found(verdicts: list[Verdict]) -> list[tuple[str, str, str]]:
    return [(v.code, v.status, v.subject) for v in verdicts]


def test_right_values_on_every_gpu_are_one_verdict(run: Run) -> None:
    (verdict,) = run(f"{RIGHT}\ncheck.skip('y', 'not here')\nassert device == f'cuda:{{torch.cuda.current}}'", gpus=3)
    assert (verdict.code, verdict.status, verdict.message) == ("operation.ok", "pass", "Right on 3 GPUs.")
    assert set(verdict.evidence["gpus"]) == {"0", "1", "2"}
    assert verdict.evidence["gpus"]["2"]["checked"] == ["x"]
    assert verdict.evidence["gpus"]["2"]["skipped"] == {"y": "not here"}


def test_without_a_gpu_it_is_skipped_with_the_word_of_cuda(run: Run) -> None:
    (verdict,) = run(RIGHT, gpus=0)
    assert (verdict.code, verdict.status) == ("operation.unavailable", "skipped")
    assert verdict.message.startswith("There is no GPU: Found no NVIDIA driver on your system.")


@pytest.mark.parametrize("gpus", [0, 7])
def test_fewer_gpus_than_expected_fail_and_are_not_skipped(run: Run, gpus: int) -> None:
    (verdict,) = run(RIGHT, gpus=gpus, expected=8)
    assert (verdict.code, verdict.status) == ("operation.unavailable", "fail")
    assert f"torch sees {gpus} GPUs, and 8 are expected" in verdict.message
    assert run(RIGHT, gpus=8, expected=8)[0].status == "pass"


@pytest.mark.parametrize(
    ("got", "tolerance", "words"),
    [
        ("[1, 2, 4]", 0, "1 of 3 values are wrong; number 2 is 4, and must be 3 within 0"),
        ("[1, 2, 3.5]", 0.1, "number 2 is 3.5, and must be 3 within 0.3"),
        ("[float('nan'), 2, 3]", 1, "number 0 is nan, and must be 1"),
        ("[1, 2, float('inf')]", 1, "number 2 is inf, and must be 3"),
        ("[0, 0, 0]", 0, "3 of 3 values are wrong"),
        ("[1, 2]", 1, "the result has the shape (2,), and must have (3,)"),
    ],
)
def test_a_wrong_value(run: Run, got: str, tolerance: float, words: str) -> None:
    (verdict,) = run(f"check('fp16', torch.tensor({got}), torch.tensor([1, 2, 3]), {tolerance})", gpus=1)
    assert found([verdict]) == [("operation.wrong_value", "fail", "tried GPU 0")]
    assert "fp16: " in verdict.message
    assert words in verdict.message
    assert verdict.evidence["error"]["found"]["what"] == "fp16"


def test_values_within_the_tolerance_are_right(run: Run) -> None:
    assert run("check('x', torch.tensor([1, 2, 3.2]), torch.tensor([1, 2, 3]), 0.1)", gpus=1)[0].status == "pass"


def test_the_gpu_at_fault_is_named_and_the_others_are_still_tried(run: Run, tmp_path: Path) -> None:
    body = f"open({str(tmp_path)!r} + '/' + device, 'w')\nif device == 'cuda:1': raise RuntimeError('odd')\n{RIGHT}"
    assert found(run(body, gpus=3)) == [("operation.error", "fail", "tried GPU 1")]
    assert (tmp_path / "cuda:2").exists()


ILLEGAL = "CUDA error: an illegal memory access was encountered\\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize(
    ("body", "code", "status"),
    [
        (f"raise RuntimeError({ILLEGAL!r})", "operation.crash", "fail"),
        ("raise RuntimeError('CUDA error: misaligned address')", "operation.crash", "fail"),
        (
            "raise RuntimeError('CUDA error: no kernel image is available for execution on the device')",
            "operation.no_kernel_image",
            "fail",
        ),
        (
            "raise RuntimeError('CUDA error: the provided PTX was compiled with an unsupported toolchain.')",
            "operation.no_kernel_image",
            "fail",
        ),
        (
            "raise RuntimeError('No supported CUDA architectures found for major versions [9, 10].')",
            "operation.no_kernel_image",
            "fail",
        ),
        (
            "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB.')",
            "operation.no_memory",
            "inconclusive",
        ),
        ("import no_such_library", "operation.unavailable", "fail"),
        ("torch.no_such_function()", "operation.unavailable", "fail"),
        (
            "raise RuntimeError('Could not find nvcc and default cuda_home does not exist')",
            "operation.unavailable",
            "fail",
        ),
        ("raise RuntimeError('Ninja build failed. Ninja output: ...')", "operation.unavailable", "fail"),
        ("raise ValueError('odd')", "operation.error", "fail"),
        ("sys.exit(0)", "operation.error", "fail"),
    ],
)
def test_an_error_by_its_cause(run: Run, body: str, code: str, status: str) -> None:
    (verdict,) = run(body, gpus=1)
    assert found([verdict]) == [(code, status, "tried GPU 0")]
    assert verdict.action
    assert "in run" in verdict.evidence["stderr"]  # the traceback


def test_the_cause_may_stand_in_the_chain(run: Run) -> None:
    body = """
        try:
            raise RuntimeError('CUDA error: no kernel image is available for execution on the device')
        except RuntimeError as error:
            raise ValueError('warm-up failed') from error
        """
    assert run(body, gpus=1)[0].code == "operation.no_kernel_image"


def test_what_concerns_the_library_is_said_once(run: Run) -> None:
    assert found(run("torch.no_such_function()", gpus=8)) == [("operation.unavailable", "fail", "tried GPU 0")]


def test_a_process_that_dies_names_the_gpu_and_the_next_one_is_tried(run: Run) -> None:
    verdicts = run(f"if device == 'cuda:0': os.abort()\n{RIGHT}", gpus=2)
    assert found(verdicts) == [("operation.crash", "fail", "tried GPU 0")]
    assert "died by SIGABRT (on GPU 0)" in verdicts[0].message
    assert "Aborted" in verdicts[0].evidence["stderr"]  # the fault handler's traceback


def test_each_gpu_that_takes_the_process_along_is_named(run: Run) -> None:
    verdicts = run(f"if device != 'cuda:1': os.abort()\n{RIGHT}", gpus=3)
    assert found(verdicts) == [("operation.crash", "fail", "tried GPU 0"), ("operation.crash", "fail", "tried GPU 2")]


def test_a_hang_is_a_timeout_and_the_last_one_tried(run: Run) -> None:
    began = time.monotonic()
    verdicts = run("if device == 'cuda:1': time.sleep(60)", gpus=8, timeout_s=2.0)
    assert found(verdicts) == [("operation.timeout", "fail", "tried GPU 1")]
    assert time.monotonic() - began < 8


def test_a_torch_that_does_not_import(run: Run) -> None:
    (verdict,) = run(RIGHT, FAKE_IMPORT="libcudart.so.13: cannot open shared object file")
    assert found([verdict]) == [("operation.unavailable", "fail", "tried")]
    assert "libcudart.so.13" in verdict.message
    (verdict,) = run(RIGHT, FAKE_IMPORT_ABORTS="1")
    assert found([verdict]) == [("operation.crash", "fail", "tried")]
    assert "importing torch" in verdict.message


RANKED = "assert torch.distributed.get_rank() == torch.cuda.current\n"


def test_all_gpus_at_once(run: Run) -> None:
    (verdict,) = run(RANKED + RIGHT, gpus=3, ranks=True)
    assert (verdict.code, verdict.message) == ("operation.ok", "Right on 3 GPUs at once."), verdict
    assert set(verdict.evidence["gpus"]) == {"0", "1", "2"}


def test_one_gpu_is_too_few_for_all_at_once(run: Run) -> None:
    (verdict,) = run(RIGHT, gpus=1, ranks=True)
    assert found([verdict]) == [("operation.unavailable", "skipped", "tried")]
    assert "takes two GPUs" in verdict.message


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("os.abort()", "crash", "Its process on GPU 1 died by SIGABRT."),
        ("os._exit(0)", "crash", "Its process on GPU 1 ended without a result."),
        ("raise RuntimeError('peer access is not supported between these two devices')", "unavailable", "peer access"),
        ("check('sum', torch.tensor([1]), torch.tensor([2]))", "wrong_value", "number 0 is 1, and must be 2"),
    ],
)
def test_one_of_all_gpus_fails_while_the_others_wait(run: Run, what: str, code: str, words: str) -> None:
    (verdict,) = run(
        f"if torch.distributed.get_rank() == 1:\n    {what}\nelse:\n    time.sleep(60)", gpus=3, ranks=True
    )
    assert found([verdict]) == [(f"operation.{code}", "fail", "tried GPU 1")]
    assert words in verdict.message


def test_a_hang_of_all_gpus_tells_the_stage_of_each(run: Run) -> None:
    (verdict,) = run("time.sleep(60)", gpus=2, ranks=True, timeout_s=2.0)
    assert found([verdict]) == [("operation.timeout", "fail", "tried")]
    assert "rank 0: running; rank 1: running" in verdict.message


def test_each_operation_has_a_verdict_in_the_order_asked_for(generation: Path) -> None:
    verdicts = check_operations(list(OPERATIONS), python=str(generation / "venv/bin/python"), timeout_s=20)
    assert found(verdicts) == [("operation.unavailable", "skipped", name) for name in OPERATIONS]


def test_an_unknown_name_is_refused_with_the_nearest(generation: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no operation gem, did you mean gemm\? Known: gemm, sgl_rmsnorm"):
        check_operations(["gem"], python="/no/python", timeout_s=1)


def test_an_interpreter_that_is_not_there_is_a_verdict_for_each() -> None:
    verdicts = check_operations(["gemm", "sgl_rmsnorm"], python="/no/such/python", timeout_s=1)
    assert found(verdicts) == [("node.child_failed", "fail", "gemm"), ("node.child_failed", "fail", "sgl_rmsnorm")]


def test_every_operation_file_is_registered_documented_and_short() -> None:
    folder = Path(operations.__file__).parent
    files = {path.stem[len("operation_") :] for path in folder.glob("operation_*.py")} - {"child"}
    assert files == set(OPERATIONS)
    manual = (ROOT / "docs" / "verification.md").read_text()
    for name in OPERATIONS:
        assert f"`{name}`" in manual
        text = (folder / f"operation_{name}.py").read_text()
        assert not re.search(r"^(?:import|from) (?:torch|sgl_kernel|flashinfer)", text, re.M)  # the node has none


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a probe as another user")
def test_a_missing_user_is_a_verdict(generation: Path) -> None:
    (verdict,) = check_operations(["gemm"], python=sys.executable, timeout_s=1, user="nosuchuser")
    assert verdict.code == "node.child_failed"
