"""The judge of toolkits, on made toolkits under a root of their own, and on what the probes may answer."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_toolkit_fatbin import ELF, elf, entry, fatbin

from bedplate.node.child import Outcome
from bedplate.node.toolkit import check as toolkit
from bedplate.node.toolkit import compile_child as toolkit_child
from bedplate.node.toolkit.check import judge
from bedplate.node.verdicts import Verdict

PATH = "/usr/local/cuda-13.0"
CUBLAS = "\n".join(f"#define CUBLAS_VER_{name} {number}" for name, number in
                   (("MAJOR", 13), ("MINOR", 0), ("PATCH", 2), ("BUILD", 14)))  # fmt: skip
FILES = {
    "bin/cudafe++": "", "bin/fatbinary": "", "bin/nvcc": "", "bin/nvcc.profile": "", "bin/nvlink": "", "bin/ptxas": "",
    "include/cccl/cuda/std/version": "", "include/crt/host_config.h": "#if __GNUC__ > 15\n#error",
    "include/cublas_api.h": CUBLAS, "include/cublas_v2.h": "", "include/cuda_runtime.h": "",
    "include/cuda_runtime_api.h": "#define CUDART_VERSION  13000\n", "lib64/libcublas.so": "",
    "lib64/libcudart_static.a": "", "nvvm/libdevice/libdevice.10.bc": "",
}  # fmt: skip
VERSIONS = {
    "cuda": {"version": "13.0.1"},
    "cuda_cudart": {"version": "13.0.88"},
    "libcublas": {"version": "13.0.2.14"},
    "cuda_nvcc": {"version": "13.0.88"},
}
COMPONENTS = ["cublas", "nvcc"]
PROGRAM = fatbin(entry(ELF, 120, b"bedplate_probe"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node with the toolkit 13.0.1 of NVIDIA's packages, and gcc 12."""
    tree = tmp_path / PATH.lstrip("/")
    for name, text in FILES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tree / "lib64/libcudart.so.13.0.88").write_text("")
    (tree / "lib64/libcudart.so").symlink_to("libcudart.so.13.0.88")
    (tree / "version.json").write_text(json.dumps(VERSIONS))
    gcc(tmp_path, "gcc", "12.2.0")
    return tmp_path


def gcc(root: Path, name: str, version: str, cxx: str = "/usr/libexec/cc1plus") -> None:
    path = root / "usr/bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncase $1 in -print*) echo {cxx};; *) echo {version};; esac\n")
    path.chmod(0o755)


def judged(root: Path, **wanted: Any) -> list[Verdict]:
    given = {"version": "13.0.1", "source": "nvidia", "components": COMPONENTS, "arch": ["sm_120"], **wanted}
    return judge(given, root=str(root))


def one(verdicts: list[Verdict], code: str) -> Verdict:
    (found,) = (verdict for verdict in verdicts if verdict.code == code)
    return found


def write(root: Path, name: str, text: str) -> None:
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ---- files, versions, links -----------------------------------------------------------------------------------------


def test_a_whole_toolkit_passes_and_what_cannot_run_is_skipped(root: Path) -> None:
    verdicts = judged(root)
    assert {v.code: v.status for v in verdicts} == {
        "toolkit.layout": "pass",
        "toolkit.version": "pass",
        "toolkit.library_path": "pass",
        "toolkit.compile": "skipped",
    }
    assert "cublas 13.0.2.14" in one(verdicts, "toolkit.version").message
    assert all(v.message for v in verdicts)


@pytest.mark.parametrize(("source", "status"), [("nvidia", "fail"), ("wheels", "fail"), ("none", "warn")])
def test_no_toolkit(tmp_path: Path, source: str, status: str) -> None:
    (verdict,) = judged(tmp_path, source=source)
    assert (verdict.code, verdict.status) == ("toolkit.layout", status)
    assert PATH in verdict.message
    assert verdict.action


def test_a_missing_file_is_named(root: Path) -> None:
    (root / "usr/local/cuda-13.0/bin/ptxas").unlink()
    verdict = one(judged(root), "toolkit.layout")
    assert verdict.status == "fail"
    assert "bin/ptxas, a part of nvcc" in verdict.message


def test_a_toolkit_from_wheels_that_was_changed(root: Path) -> None:
    write(root, f"{PATH}/version.json", json.dumps({**VERSIONS, "bedplate": {"source": "wheels"}}))
    verdict = one(judged(root, source="wheels"), "toolkit.layout")
    assert verdict.status == "fail"
    assert "manifest" in verdict.message


def test_another_release(root: Path) -> None:
    write(root, f"{PATH}/version.json", json.dumps({"cuda": {"version": "13.0.2"}}))
    verdict = one(judged(root), "toolkit.version")
    assert verdict.status == "fail"
    assert "CUDA 13.0.2; the profile pins 13.0.1" in verdict.message


@pytest.mark.parametrize("how", ["cudart", "cublas"])
def test_leaves_of_the_next_release_under_the_pinned_one(root: Path, how: str) -> None:
    """What the meta package alone installs: nvcc does not tell, cudart and cublas do."""
    if how == "cudart":
        library = root / "usr/local/cuda-13.0/lib64/libcudart.so"
        library.unlink()
        (library.parent / "libcudart.so.13.0.96").write_text("")
        library.symlink_to("libcudart.so.13.0.96")
    else:
        write(root, f"{PATH}/include/cublas_api.h", CUBLAS.replace("MINOR 0", "MINOR 1"))
    verdict = one(judged(root), "toolkit.component")
    assert verdict.status == "fail"
    assert verdict.subject == how
    assert "in CUDA 13.0.1 it is" in verdict.message


def test_a_toolkit_that_does_not_say_its_release(root: Path) -> None:
    """As a runfile without version.json: the series is right, the release cannot be told."""
    tree = root / "usr/local/cuda-13.0"
    (tree / "version.json").unlink()
    (tree / "lib64/libcudart.so").unlink()
    (tree / "lib64/libcudart.so").write_text("")
    assert one(judged(root, source="none", components=[]), "toolkit.version").status == "warn"
    write(root, f"{PATH}/include/cuda_runtime_api.h", "#define CUDART_VERSION  12080\n")
    verdict = one(judged(root, source="none", components=[]), "toolkit.version")
    assert verdict.status == "fail"
    assert "is CUDA 12.8" in verdict.message


@pytest.mark.parametrize("junk", ["", "[]", '{"cuda": 1}', "\xff"])
def test_a_damaged_version_file_is_no_crash(root: Path, junk: str) -> None:
    write(root, f"{PATH}/version.json", junk)
    assert one(judged(root), "toolkit.version").status == "pass", "cudart's file name and cublas' header still tell"


def test_default_link(root: Path) -> None:
    link = root / "usr/local/cuda"
    assert "does not exist" in one(judged(root, default=True), "toolkit.default_link").message
    link.symlink_to("cuda-12.8")
    assert one(judged(root, default=True), "toolkit.default_link").status == "fail"
    link.unlink()
    link.symlink_to("cuda-13.0")
    assert one(judged(root, default=True), "toolkit.default_link").status == "pass"
    assert "toolkit.default_link" not in {v.code for v in judged(root)}
    link.unlink()
    link.mkdir()
    verdict = one(judged(root, default=True), "toolkit.default_link")
    assert "is a directory" in verdict.message
    assert "default: false" in verdict.action


@pytest.mark.parametrize(
    ("file", "text", "status"),
    [
        ("/etc/ld.so.conf.d/000_cuda.conf", "/usr/local/cuda-13.0/targets/x86_64-linux/lib\n", "pass"),
        ("/etc/ld.so.conf.d/cuda.conf", "/usr/local/cuda-12.8/lib64\n", "warn"),
        ("/etc/ld.so.conf.d/compat.conf", "/usr/local/cuda-13.0/compat\n", "fail"),
        ("/etc/ld.so.conf", "# /usr/local/cuda-13.0/compat\ninclude /etc/ld.so.conf.d/*.conf\n", "pass"),
        ("/etc/environment", 'LD_LIBRARY_PATH="/usr/local/cuda-13.0/lib64"\n', "warn"),
        ("/etc/profile.d/cuda.sh", "export LD_LIBRARY_PATH=/opt/lib:/usr/local/cuda/compat\n", "fail"),
        ("/etc/profile.d/none.sh", "# export LD_LIBRARY_PATH=/usr/local/cuda/compat\n", "pass"),
        ("/etc/systemd/system.conf.d/env.conf", 'DefaultEnvironment="LD_LIBRARY_PATH=/opt/x"\n', "warn"),
    ],
)
def test_what_shadows_libraries(root: Path, file: str, text: str, status: str) -> None:
    write(root, file, text)
    verdict = one(judged(root), "toolkit.library_path")
    assert verdict.status == status
    assert status == "pass" or (file in verdict.message and verdict.action)


# ---- the host compiler ----------------------------------------------------------------------------------------------


def test_no_compiler(root: Path) -> None:
    (root / "usr/bin/gcc").unlink()
    verdict = one(judged(root), "toolkit.compiler_missing")
    assert "gcc 6 to 15" in verdict.message
    gcc(root, "gcc", "12.2.0", cxx="cc1plus")
    assert one(judged(root), "toolkit.compiler_missing").status == "fail", "C without C++"


@pytest.mark.parametrize("version", ["16.1.0", "5.4.0"])
def test_a_compiler_that_nvcc_does_not_take(root: Path, version: str) -> None:
    gcc(root, "gcc", version)
    verdict = one(judged(root), "toolkit.compiler_unsupported")
    assert f"gcc {version}; nvcc of CUDA 13.0 takes gcc 6 to 15" in verdict.message
    assert "g++-15" in verdict.action
    gcc(root, "g++-14", "14.2.0")
    assert "usr/bin/g++-14" in one(judged(root), "toolkit.compiler_unsupported").action
    assert "toolkit.compiler_unsupported" not in {v.code for v in judged(root, host_compiler="/usr/bin/g++-14")}


def test_the_newest_compiler_is_the_one_that_the_header_names(root: Path) -> None:
    gcc(root, "gcc", "15.1.0")
    write(root, f"{PATH}/include/crt/host_config.h", "#if __GNUC__ > 14\n")
    assert "6 to 14" in one(judged(root), "toolkit.compiler_unsupported").message


def test_a_toolkit_without_nvcc_says_so(root: Path) -> None:
    verdict = one(judged(root, components=["cublas"]), "toolkit.compile")
    assert verdict.status == "skipped"
    assert "has no nvcc" in verdict.message


# ---- what the probe answers -----------------------------------------------------------------------------------------


def answered(monkeypatch: pytest.MonkeyPatch, result: Any, **other: Any) -> list[Verdict]:
    """Judge the answer of the probe that compiles."""
    outcome = Outcome(**{"exit_code": 0, "signal": None, "timed_out": False, "result": result, "stages": {},
                         "stdout": "", "stderr": "", "elapsed_s": 1.0, "left_processes": 0, **other})  # fmt: skip
    monkeypatch.setattr(toolkit, "run_probe", lambda *_, **__: outcome)
    return toolkit._program(PATH, "13.0.1", [120], "", "", 1.0)


def good(**changes: Any) -> dict[str, Any]:
    program = bytes(elf(changes.pop("gpu_code", PROGRAM)).data)
    return {
        "shared_runtime": 13000,
        "compile": {"exit_code": 0, "output": ""},
        "program": base64.b64encode(program).decode(),
        "run": {"exit_code": 0, "output": "runtime 13000\n"},
        "kernel": kernel("driver 13000\ndevices 0 2\ndevice 0 0 0\ndevice 1 0 0\n"),
        **changes,
    }


def kernel(output: str, exit_code: int | None = 0) -> Mapping[str, Any]:
    return {"exit_code": exit_code, "output": output}


# The reader of a made file needs its tables; judge opens the bytes by itself.
@pytest.fixture(autouse=True)
def _small_elf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "ElfFile", lambda data, _: elf(data[120:]) if data[:4] == b"\x7fELF" else elf(b""))


def test_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = answered(monkeypatch, good())
    assert [(v.code, v.status) for v in verdicts] == [
        ("toolkit.compile", "pass"),
        ("toolkit.runtime", "pass"),
        ("toolkit.kernel", "pass"),
    ]
    assert "2 GPUs" in verdicts[-1].message


def test_nvcc_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    output = "probe.cu(3): note\nprobe.cu(4): error: no such thing\n1 error detected"
    (verdict,) = answered(monkeypatch, good(compile={"exit_code": 1, "output": output}))
    assert verdict.code == "toolkit.compile_failed"
    assert "error: no such thing" in verdict.message
    (verdict,) = answered(monkeypatch, None, exit_code=None, timed_out=True)
    assert verdict.code == "toolkit.compile_failed"
    assert "did not end in time" in verdict.message


@pytest.mark.parametrize(
    "gpu_code", [fatbin(entry(ELF, 90, b"bedplate_probe")), fatbin(entry(ELF, 120, b"of a library")), b"", PROGRAM[:-2]]
)
def test_machine_code_is_missing(monkeypatch: pytest.MonkeyPatch, gpu_code: bytes) -> None:
    verdicts = answered(monkeypatch, good(gpu_code=gpu_code))
    assert one(verdicts, "toolkit.arch_missing").status == "fail"
    assert "toolkit.kernel" not in {v.code for v in verdicts}


@pytest.mark.parametrize(
    "changes",
    [{"shared_runtime": 13010}, {"run": kernel("runtime 12080\n")}, {"run": kernel("", 127)}],
    ids=["library", "program", "crash"],
)
def test_runtimes_of_two_releases(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    verdict = one(answered(monkeypatch, good(**changes)), "toolkit.runtime")
    assert verdict.status == "fail"
    assert "CUDA 13.0.1 answers 13000" in verdict.message


@pytest.mark.parametrize(
    ("output", "code", "status", "says"),
    [
        ("driver 0\ndevices 35 0\n", "toolkit.kernel", "skipped", "no driver here"),
        ("driver 13000\ndevices 100 0\n", "toolkit.kernel", "skipped", "no GPU here"),
        ("driver 12080\ndevices 35 0\n", "toolkit.driver_too_old", "fail", "for CUDA 12.8"),
        ("driver 13000\ndevices 803 0\n", "toolkit.library_path", "fail", "compatibility library"),
        ("driver 13000\ndevices 804 0\n", "toolkit.library_path", "fail", "error 804"),
        ("driver 13000\ndevices 999 0\n", "toolkit.kernel", "fail", "error 999"),
        ("driver 13000\ndevices 0 2\ndevice 0 0 0\ndevice 1 209 64\n", "toolkit.kernel", "fail", "GPU 1 answers"),
        ("driver 13000\ndevices 0 1\ndevice 0 0 3\n", "toolkit.kernel", "fail", "computed 3 of 64 values wrong"),
        ("driver 13000\ndevices 0 2\ndevice 0 0 0\n", "toolkit.kernel", "fail", "1 of 2 GPUs"),
        ("did not end within 120 s", "toolkit.kernel", "fail", "did not end"),
        ("", "toolkit.kernel", "fail", "did not reach the GPUs"),
    ],
)  # fmt: skip
def test_kernel_on_the_gpus(monkeypatch: pytest.MonkeyPatch, output: str, code: str, status: str, says: str) -> None:
    verdict = one(answered(monkeypatch, good(kernel=kernel(output, 1))), code)
    assert verdict.status == status
    assert says in verdict.message
    assert status == "skipped" or verdict.action


# ---- the torch extension --------------------------------------------------------------------------------------------


def extension(monkeypatch: pytest.MonkeyPatch, result: Any, home: str = "", **other: Any) -> Verdict:
    outcome = Outcome(**{"exit_code": 0, "signal": None, "timed_out": False, "result": result,
                         "stages": {"extension": "compiling"}, "stdout": "", "stderr": "", "elapsed_s": 40.0,
                         "left_processes": 0, **other})  # fmt: skip
    monkeypatch.setattr(toolkit, "run_probe", lambda *_, **__: outcome)
    environment = {"CUDA_HOME": home} if home else {}
    return toolkit._extension({"version": "13.0.1"}, PATH, [120], "python", environment, "", 600)


@pytest.mark.parametrize(
    ("result", "status", "says"),
    [
        ({"ok": True, "device": "cpu", "torch_cuda": "13.0"}, "pass", "computes right on cpu"),
        ({"ok": False, "device": "cuda", "torch_cuda": "13.0"}, "fail", "wrong values"),
        ({"skipped": "this torch brings no headers"}, "skipped", "no headers"),
        ({"error": "x\nninja: error: loading\ny"}, "fail", "ninja: error: loading"),
    ],
)
def test_extension(monkeypatch: pytest.MonkeyPatch, result: Any, status: str, says: str) -> None:
    verdict = extension(monkeypatch, result)
    assert (verdict.code, verdict.status) == ("toolkit.extension", status)
    assert says in verdict.message


def test_extension_that_ends_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = extension(monkeypatch, None, exit_code=None, timed_out=True, elapsed_s=600.0)
    assert verdict.status == "fail"
    assert "killed after 600 s while compiling" in verdict.message


def test_extension_of_a_stack_with_another_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = extension(monkeypatch, None, home="/usr/local/cuda-12.8")
    assert verdict.status == "skipped"
    assert "uses the toolkit at /usr/local/cuda-12.8" in verdict.message


def test_the_program_is_the_one_that_the_reader_looks_for() -> None:
    assert f"void {toolkit_child.KERNEL}(" in toolkit_child.SOURCE


@pytest.mark.parametrize("arch", ["120", "sm_12x", ""])
def test_an_architecture_that_is_none(root: Path, arch: str) -> None:
    with pytest.raises(ValueError, match="no architecture such as sm_120"):
        judged(root, arch=[arch])
