"""The modules bedplate_verify and bedplate_gpu_info, run as Ansible runs them."""

from __future__ import annotations

import importlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
import tiny_stack
import yaml
from host_tree import HostTree

import bedplate_gpu_info
import bedplate_verify

ROOT = Path(__file__).resolve().parents[2]
STACK = {
    "layers": ["stack"],
    "imports": ["torch", "sgl_kernel"],
    "collective": {"backend": "gloo", "max_bytes": 4096},
}

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stack.build_wheels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def good(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stack.make_generation(tmp_path_factory.mktemp("generations") / "good", tiny)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tools = tmp_path_factory.mktemp("tools")
    (tools / "lib").mkdir()
    shutil.copy(pynvml.__file__, tools / "lib" / "pynvml.py")
    return tools


@pytest.fixture
def verify(run_module: Run, tools: Path) -> Run:
    def run(**options: Any) -> dict[str, Any]:
        return run_module("bedplate_verify", **{"tools": str(tools), "user": "", "simulated": True, **options})

    return run


def codes(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(verdict["code"], verdict["status"]) for verdict in result["verdicts"]]


def ran(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what was not skipped; the tiny stack has neither NCCL nor flashinfer to judge."""
    return [pair for pair in codes(result) if pair[1] != "skipped"]


def test_a_bare_node_skips_every_layer_with_a_reason(verify: Run) -> None:
    result = verify(generation="/nonexistent/generation")
    assert codes(result) == [
        ("driver.not_managed", "skipped"),
        ("gpu.count", "skipped"),
        ("gpu.pci_count", "skipped"),
        ("toolkit.not_managed", "skipped"),
        ("stack.absent", "skipped"),
    ]
    assert (result["status"], result["changed"], result["msg"]) == ("skipped", False, "5 checks: 5 skipped")
    assert all(verdict["message"] for verdict in result["verdicts"])
    assert "/nonexistent/generation" in result["verdicts"][4]["message"]


def test_a_good_stack_passes_in_check_mode_too_and_says_simulated(verify: Run, good: Path) -> None:
    result = verify(generation=str(good), check=True, **STACK)
    assert ran(result) == [("import.ok", "pass"), ("import.ok", "pass"), ("collective.ok", "pass")]
    assert (result["status"], result["simulated"]) == ("pass", True)
    assert all(verdict["simulated"] for verdict in result["verdicts"])
    assert "simulated" not in verify(generation=str(good), simulated=False, **STACK)["verdicts"][0]


def test_strict_fails_with_the_first_failing_sentence_and_all_verdicts(verify: Run, tiny: Path, tmp_path: Path) -> None:
    generation = tiny_stack.make_generation(tmp_path / "g", tiny, torch="2.10.0+tiny")
    result = verify(generation=str(generation), **STACK)
    assert result["failed"]
    assert result["msg"].startswith("sgl_kernel: common_ops.abi3.so needs c10::cuda::c10_cuda_check_implementation(")
    assert ran(result) == [("import.ok", "pass"), ("import.undefined_symbol", "fail"), ("collective.ok", "pass")]
    lenient = verify(generation=str(generation), strict=False, **STACK)
    assert not lenient.get("failed")
    assert (lenient["status"], lenient["msg"]) == ("fail", result["msg"])


def test_what_failed_before_the_change_is_told_and_fails_nothing(verify: Run, tmp_path: Path) -> None:
    options = {"layers": ["driver"], "checks": ["gpus"], "tools": str(tmp_path), "expect": {"gpus": 8}}
    before = verify(**options)
    assert before["failed"]
    after = verify(**options, baseline=before["verdicts"])
    assert not after.get("failed")
    assert [(v["code"], v["status"], v["preexisting"]) for v in after["verdicts"]] == [
        ("gpu.nvml_error", "fail", True),
    ]


def test_without_torch_the_collective_is_skipped(verify: Run, tiny: Path, tmp_path: Path) -> None:
    generation = tiny_stack.make_generation(tmp_path / "g", tiny, torch="")
    result = verify(generation=str(generation), strict=False, **STACK)
    assert codes(result)[0] == ("import.missing_module", "fail")
    assert ("collective.unavailable", "skipped") in codes(result)


def test_a_busy_node_is_left_in_peace(verify: Run, good: Path, tmp_path: Path) -> None:
    descriptors = tmp_path / "proc" / "4711" / "fd"
    descriptors.mkdir(parents=True)
    (descriptors / "3").symlink_to("/dev/nvidia0")
    (descriptors.parent / "comm").write_text("vllm\n")
    options = {**STACK, "generation": str(good), "operations": ["gemm"], "sysroot": str(tmp_path)}
    result = verify(**options, collective_when="idle")
    skipped = {code: v["message"] for v in result["verdicts"] if (code := v["code"]).endswith(".unavailable")}
    assert skipped.keys() == {"operation.unavailable", "collective.unavailable"}
    assert all("vllm (pid 4711" in message for message in skipped.values())
    assert ("collective.ok", "pass") in codes(verify(**{**options, "operations": []}, collective_when="always"))
    (descriptors / "3").unlink()
    assert ("collective.ok", "pass") in codes(verify(**{**options, "operations": []}, collective_when="idle"))


@pytest.fixture(scope="module")
def fakegpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fakegpu")
    subprocess.run(["make", "-s", "-C", str(ROOT / "tests" / "fakegpu"), f"OUT={out}"], check=True)
    return out


@pytest.fixture
def gpus(fakegpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NVML is the fake of tests/fakegpu; return its configuration file, which may be changed while a check runs."""
    module = importlib.import_module("ansible.module_utils.bedplate.hardware.gpu")
    config, real = tmp_path / "fakegpu.conf", module.query
    config.write_text("count=8\n")
    environment = {"LD_LIBRARY_PATH": str(fakegpu), "FAKEGPU_CONF": str(config)}
    monkeypatch.setattr(module, "query", lambda tools: real(tools, environment=environment))
    return config


NCCL = {**STACK, "collective": {"backend": "nccl", "max_bytes": 64, "ranks": [2]}, "imports": []}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("\n".join(f"error.nvmlDeviceGet{kind}RunningProcesses=3" for kind in ("Compute", "Graphics")), "not tell"),
        ("gpu.3.process=4242", "a process (pid 4242) uses GPU 3"),
    ],
    ids=["unknown", "a process out of sight"],
)
def test_gpus_that_may_be_in_use_are_left_in_peace(
    verify: Run, good: Path, gpus: Path, tmp_path: Path, config: str, words: str
) -> None:
    gpus.write_text(f"count=8\n{config}\n")
    options = {**STACK, "generation": str(good), "operations": ["gemm"], "sysroot": str(tmp_path)}
    result = verify(**options, collective_when="idle")
    skipped = {code: v["message"] for v in result["verdicts"] if (code := v["code"]).endswith(".unavailable")}
    assert skipped.keys() == {"operation.unavailable", "collective.unavailable"}
    assert all(words in message and "bedplate_verify_collective=true" in message for message in skipped.values())
    # Asked for by name, it runs.
    assert ("collective.ok", "pass") in codes(verify(**{**options, "operations": []}, collective_when="always"))


def test_gpus_whose_driver_does_not_answer_are_left_in_peace(
    verify: Run, good: Path, tools: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It hung: the GPUs that had answered by then, none here, say nothing about the others."""
    module = importlib.import_module("ansible.module_utils.bedplate.hardware.gpu")
    text = "The process that asks NVML did not end in time and was killed after 30 s in nvmlInit"
    hung = {"error": {"code": None, "name": "TIMEOUT", "text": text}, "gpus": [], "count": None}
    monkeypatch.setattr(module, "query", {str(tools): hung}.__getitem__)
    options = {**STACK, "generation": str(good), "operations": ["gemm"], "sysroot": str(tmp_path), "imports": []}
    result = verify(**options, collective_when="idle", expect={"gpus": 8})
    skipped = {code: v["message"] for v in result["verdicts"] if (code := v["code"]).endswith(".unavailable")}
    assert skipped.keys() == {"operation.unavailable", "collective.unavailable"}
    assert all("because NVML does not answer: The process that asks" in message for message in skipped.values())
    # Where no GPU is expected, there need not be an NVML.
    options["operations"] = []
    assert ("collective.ok", "pass") in codes(verify(**options, collective_when="idle", expect={"gpus": 0}))
    assert ("collective.ok", "pass") in codes(verify(**options, collective_when="always", expect={"gpus": 8}))


def test_the_gpus_are_counted_again_after_they_had_work(verify: Run, tiny: Path, gpus: Path, tmp_path: Path) -> None:
    """GPU 3 falls off the bus in the first all-reduce, as one whose power does not suffice, and leaves its Xid."""
    generation = tiny_stack.take_nccl(tiny_stack.make_generation(tmp_path / "g", tiny))
    tree = HostTree(tmp_path / "root")
    options = {**NCCL, "generation": str(generation), "sysroot": str(tree.root)}
    assert ("gpu.after_load", "pass") in codes(verify(**options))
    path = tiny_stack.site_packages(generation) / "torch" / "distributed.py"
    text, mark = path.read_text(), '    """Replace the elements on every rank by the sum over all ranks."""\n'
    assert mark in text
    kmsg = "2,9,99000000,-;NVRM: Xid (PCI:0000:31:00): 79, GPU has fallen off the bus.\n"
    fault = f"    open({str(gpus)!r}, 'w').write('gpu.3.error=15\\n')\n"
    fault += f"    open({str(tree.root / 'dev/kmsg')!r}, 'w').write({kmsg!r})\n"
    path.write_text(text.replace(mark, mark + fault))
    gpus.write_text("count=8\n")
    result = verify(**options)
    (verdict,) = [v for v in result["verdicts"] if v["code"] == "gpu.after_load"]
    assert result["msg"].startswith("GPU 0000:31:00.0: It answered before it had work, and now it answers NVML_ERR")
    assert (verdict["status"], verdict["layer"]) == ("needs-reboot", "node")
    assert [entry["xid"] for entry in verdict["evidence"]["xids"]] == [79]
    assert ("collective.ok", "pass") in codes(result)


def test_gpus_that_had_no_work_are_not_counted_again(verify: Run, good: Path, gpus: Path) -> None:
    """Sums over gloo are the CPU's, and an operation that finds no GPU was none."""
    assert gpus.exists()
    result = verify(generation=str(good), operations=["gemm"], **{**STACK, "imports": []})
    assert ("collective.ok", "pass") in codes(result)
    assert "gpu.after_load" not in {code for code, _ in codes(result)}


def test_nvml_is_asked_once_by_all_checks(verify: Run, good: Path, gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("ansible.module_utils.bedplate.hardware.gpu")
    asked: list[str] = []
    real = module.query
    monkeypatch.setattr(module, "query", lambda tools: (asked.append(tools), real(tools))[1])
    assert gpus.exists()
    options = {**STACK, "layers": ["driver", "stack"], "expect": {"gpus": 8}, "imports": []}
    result = verify(generation=str(good), collective_when="idle", **options)
    assert {("gpu.count", "pass"), ("collective.ok", "pass")} <= set(codes(result))
    assert len(asked) == 1


def test_a_generation_without_an_interpreter_is_broken_and_not_absent(verify: Run, tmp_path: Path) -> None:
    result = verify(generation=str(tmp_path), **STACK)
    assert codes(result) == [("stack.drift", "fail")]
    assert str(tmp_path / "venv/bin/python") in result["msg"]


def test_only_the_checks_that_are_asked_for(verify: Run, good: Path) -> None:
    assert ran(verify(generation=str(good), checks=["imports"], **{**STACK, "imports": ["torch"]})) == [
        ("import.ok", "pass")
    ]
    assert codes(verify(layers=["driver"], checks=["driver"])) == [("driver.not_managed", "skipped")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a probe as another user")
def test_a_missing_probe_user_is_a_failure_with_its_name(verify: Run, good: Path) -> None:
    result = verify(generation=str(good), user="nosuchuser", **STACK)
    assert result["failed"]
    assert "the user nosuchuser does not exist" in result["msg"]


def test_gpu_info_reports_an_error_and_does_not_fail(run_module: Run, tmp_path: Path) -> None:
    result = run_module("bedplate_gpu_info", tools=str(tmp_path), simulated=True)
    assert not result.get("failed")
    assert (result["error"]["name"], result["gpus"], result["simulated"]) == ("PYNVML_MISSING", [], True)


def ansible(module: str, arguments: dict[str, Any], python: str) -> dict[str, Any]:
    """Run a module the way a playbook does: zipped, sent, by ansible itself."""
    command = [str(Path(sys.executable).with_name("ansible")), "localhost", "-i", "localhost,", "-c", "local", "-o"]
    command += ["-m", module, "-a", json.dumps(arguments), "-e", f"ansible_python_interpreter={python}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(result.stdout.partition(" => ")[2])
    return found


def test_out_of_the_zip_that_ansible_ships(good: Path, tools: Path) -> None:
    options = {**STACK, "generation": str(good), "user": "", "tools": str(tools), "layers": ["driver", "stack"]}
    result = ansible("bedplate_verify", options, sys.executable)
    expected = [("import.ok", "pass"), ("import.ok", "pass"), ("collective.ok", "pass")]
    assert [pair for pair in ran(result) if pair[0].startswith(("import", "collective"))] == expected, result
    assert codes(result)[:2] == [("driver.not_managed", "skipped"), ("gpu.count", "skipped")]
    assert "PYNVML" not in str(result["verdicts"][1]["evidence"])  # the NVML child came out of the zip, too


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a probe as another user")
def test_the_stack_runs_as_the_probe_user(verify: Run) -> None:
    # Neither pytest's directories nor the interpreter of these tests need be open to other users.
    generation = Path("/var/tmp") / f"bedplate-test-{os.getpid()}"
    try:
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", generation / "venv"], check=True)
        package = tiny_stack.site_packages(generation) / "whoami"
        package.mkdir()
        (package / "__init__.py").write_text("import os\n__version__ = str(os.getuid())\n")
        options = {**STACK, "imports": ["whoami"], "checks": ["imports"], "user": "nobody"}
        result = verify(generation=str(generation), **options)
        assert result["verdicts"][0]["evidence"]["version"] == str(pwd.getpwnam("nobody").pw_uid)
    finally:
        shutil.rmtree(generation, ignore_errors=True)


def same_option(documented: dict[str, Any], spec: dict[str, Any], name: str) -> None:
    """Compare the documentation of an option, and of the options in it, with the spec that Ansible enforces."""
    assert documented.pop("description"), name
    suboptions = documented.pop("suboptions", {})
    spec = {key: value for key, value in spec.items() if key != "apply_defaults"}
    inner = spec.pop("options", {})
    assert documented == spec, name
    assert suboptions.keys() == inner.keys(), name
    for key, option in suboptions.items():
        same_option(option, inner[key], f"{name}.{key}")


@pytest.mark.parametrize("module", [bedplate_verify, bedplate_gpu_info])
def test_documentation_and_argument_spec_say_the_same(module: Any) -> None:
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    spec = module.argument_spec()
    assert documented.keys() == spec.keys()
    for name, option in documented.items():
        same_option(option, spec[name], name)
    assert yaml.safe_load(module.EXAMPLES)
    assert yaml.safe_load(module.RETURN)


def test_a_verification_that_finds_no_room_to_start_is_a_verdict(
    verify: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    options: dict[str, Any] = {"layers": ["driver"], "checks": ["gpus"]}
    result = verify(**options)
    assert result["failed"]
    assert codes(result) == [("node.child_failed", "fail")]
    assert "there is no place for a probe in" in result["msg"]
    assert not verify(strict=False, **options).get("failed")


def test_idle_asks_for_processes_on_the_gpus_alone(verify: Run, tmp_path: Path) -> None:
    tree = HostTree(tmp_path / "root")
    ask = {"layers": ["driver"], "checks": ["idle"], "sysroot": str(tree.root), "strict": False}
    assert [(item["code"], item["status"]) for item in verify(**ask)["verdicts"]] == [("driver.gpu_in_use", "pass")]
    tree.process(4242, "python3", "/dev/nvidia3")
    assert [(item["code"], item["status"]) for item in verify(**ask)["verdicts"]] == [("driver.gpu_in_use", "fail")]
    assert verify(**{**ask, "sysroot": "/"})["verdicts"] == [], "a container shows the processes of no GPU node"
