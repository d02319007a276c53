"""Each failure here has a real cause: real broken shared objects, real crashes, the real loader's words."""

from __future__ import annotations

import os
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
import tiny_stack
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.child import read_environment
from bedplate.node.stack import imports
from bedplate.node.stack.imports import check_import, check_imports
from bedplate.node.verdicts import Verdict

OLD = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stack.build_wheels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def generation(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stack.make_generation(tmp_path_factory.mktemp("generations") / "good", tiny)


def run(generation: Path, module: str, **kwargs: object) -> Verdict:
    arguments = {"timeout_s": 30.0, "environment": read_environment(generation / "environment"), **kwargs}
    return check_import(module, python=str(generation / "venv/bin/python"), **arguments)


def package(generation: Path, name: str, body: str) -> Path:
    """Put a package with the given __init__.py into the generation; return its directory."""
    directory = tiny_stack.site_packages(generation) / name
    directory.mkdir()
    (directory / "__init__.py").write_text(textwrap.dedent(body))
    return directory


def extension(directory: Path, name: str, code: str, *options: str) -> Path:
    """Compile a real extension module with the given C++ in it."""
    source = directory / f"{name}.cpp"
    source.write_text(f'#include "{tiny_stack.TINY}/native/python_abi.h"\n{code}\nEMPTY_MODULE({name})\n')
    output = directory / f"{name}.abi3.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", str(output), str(source), "-Wl,--no-as-needed", *options], check=True
    )
    return output


def test_a_good_stack_imports_and_says_what_it_loaded(generation: Path) -> None:
    torch, kernel = check_imports(
        ["torch", "sgl_kernel"],
        python=str(generation / "venv/bin/python"),
        timeout_s=30,
        environment=read_environment(generation / "environment"),
    )
    assert (torch.code, torch.status, torch.subject) == ("import.ok", "pass", "torch"), torch
    assert torch.evidence["version"] == "2.9.1+tiny"
    assert torch.evidence["cuda"] == "12.8"
    assert (kernel.code, kernel.status) == ("import.ok", "pass"), kernel
    assert kernel.evidence["versions"] == {"torch": "2.9.1+tiny", "sgl-kernel": "0.3.21+tiny"}
    assert kernel.message.endswith(", version 0.3.21+tiny.")
    site = tiny_stack.site_packages(generation)
    assert kernel.evidence["libraries"]["libc10.so"] == [str((site / "torch/lib/libc10.so").resolve())]


def test_the_incident_names_the_symbol(tiny: Path, tmp_path: Path) -> None:
    generation = tiny_stack.make_generation(tmp_path / "g", tiny, torch="2.10.0+tiny")
    verdict = run(generation, "sgl_kernel")
    assert (verdict.code, verdict.status, verdict.layer) == ("import.undefined_symbol", "fail", "stack")
    assert verdict.evidence["symbol"] == OLD
    assert verdict.evidence["file"].endswith("sgl_kernel/common_ops.abi3.so")
    assert verdict.message == (
        "common_ops.abi3.so needs "
        "c10::cuda::c10_cuda_check_implementation(int, char const*, char const*, int, bool), "
        "which no loaded library defines. Installed is torch 2.10.0+tiny."
    )
    assert "loader" not in verdict.evidence  # the text had it, so nobody was asked


def test_a_swallowed_undefined_symbol_is_asked_from_the_loader(generation: Path) -> None:
    directory = package(
        generation,
        "swallows",
        """
        import torch
        try:
            from . import ops
        except ImportError:
            pass
        try:
            ops
        except NameError:
            raise RuntimeError("operator swallows::norm does not exist") from None
        """,
    )
    extension(directory, "ops", "namespace at { void norm(long); }\nvoid use() { at::norm(1); }")
    verdict = run(generation, "swallows")
    assert verdict.code == "import.undefined_symbol"
    assert verdict.evidence["demangled"] == "at::norm(long)"
    assert verdict.evidence["loader"][0]["file"].endswith("swallows/ops.abi3.so")


def test_the_loader_is_asked_with_torch_loaded_and_survives_a_crashing_file(generation: Path) -> None:
    directory = package(generation, "hides", "raise RuntimeError('no backend')")
    site = tiny_stack.site_packages(generation)
    extension(directory, "good", "", f"-L{site}/torch/lib", "-lc10_cuda")  # no RPATH: only torch helps it
    extension(directory, "worse", "#include <cstdlib>\n__attribute__((constructor)) void x() { abort(); }")
    verdict = run(generation, "hides")
    assert verdict.code == "import.error"
    assert verdict.message == "The import raised RuntimeError: no backend"
    assert verdict.evidence["loader"] == [
        {"file": str((directory / "worse.abi3.so").resolve()), "error": "loading it died by signal 6"}
    ]


def test_an_error_in_the_chain_is_found_under_other_words(generation: Path) -> None:
    directory = package(
        generation,
        "chained",
        """
        try:
            from . import ops
        except ImportError as error:
            raise RuntimeError("reinstall chained") from error
        """,
    )
    extension(directory, "ops", 'extern "C" void missing_one();\nvoid use() { missing_one(); }')
    verdict = run(generation, "chained")
    assert (verdict.code, verdict.evidence["symbol"]) == ("import.undefined_symbol", "missing_one")


def test_a_fallback_that_is_missing_too_does_not_hide_the_cause(generation: Path) -> None:
    directory = package(
        generation,
        "fallback",
        "try:\n    from . import ops\nexcept ImportError:\n    import fallback_of_fallback\n",
    )
    extension(directory, "ops", 'extern "C" void missing_two();\nvoid use() { missing_two(); }')
    assert run(generation, "fallback").evidence["symbol"] == "missing_two"


def test_a_missing_library_is_named(generation: Path, tmp_path: Path) -> None:
    subprocess.run(
        ["gcc", "-shared", "-o", str(tmp_path / "libnvrtc.so.12"), "-xc", "/dev/null", "-Wl,-soname,libnvrtc.so.12"],
        check=True,
    )
    directory = package(generation, "needs_library", "from . import ops")
    extension(directory, "ops", "", str(tmp_path / "libnvrtc.so.12"))
    verdict = run(generation, "needs_library")
    assert (verdict.code, verdict.evidence["library"]) == ("import.missing_library", "libnvrtc.so.12")
    assert "CUDA packages" in verdict.action


def test_a_missing_symbol_version_is_a_library_too_old(generation: Path, tmp_path: Path) -> None:
    def library(version: str, directory: Path) -> Path:
        directory.mkdir()
        (directory / "map").write_text(f"{version} {{ global: thing; }};")
        (directory / "x.c").write_text("int thing(void) { return 1; }")
        output = directory / "libthing.so.1"
        subprocess.run(
            [
                "gcc",
                "-shared",
                "-fPIC",
                "-o",
                str(output),
                str(directory / "x.c"),
                f"-Wl,--version-script={directory}/map",
                "-Wl,-soname,libthing.so.1",
            ],
            check=True,
        )
        return output

    new = library("THING_2.0", tmp_path / "new")
    old = library("THING_1.0", tmp_path / "old")
    directory = package(generation, "needs_newer", "from . import ops")
    code = 'extern "C" int thing();\nint use() { return thing(); }'
    extension(directory, "ops", code, str(new), f"-Wl,-rpath,{old.parent}")
    verdict = run(generation, "needs_newer")
    assert (verdict.code, verdict.evidence["version"]) == ("import.missing_library", "THING_2.0")
    assert "too old" in verdict.message


@pytest.mark.parametrize(
    ("name", "body", "missing"),
    [("absent", None, "absent"), ("needs_numpy", "import nosuchnumpy.linalg", "nosuchnumpy")],
)
def test_a_missing_module_is_named(generation: Path, name: str, body: str, missing: str) -> None:
    if body:
        package(generation, name, body)
    verdict = run(generation, name)
    assert (verdict.code, verdict.evidence["module"]) == ("import.missing_module", missing)


@pytest.mark.parametrize(
    "text",
    [
        "flashinfer-cubin version (0.6.2) does not match flashinfer version (0.6.3). Please install ...",
        "Detected that PyTorch and torchvision were compiled with mismatched CUDA versions",
        "incompatible torch version 2.10",
    ],
)
def test_a_version_mismatch_is_told_in_the_words_of_the_package(generation: Path, text: str) -> None:
    name = f"mismatch_{len(text)}"
    package(generation, name, f"raise RuntimeError({text!r})")
    verdict = run(generation, name)
    assert verdict.code == "import.version_mismatch"
    assert text[:40] in verdict.message


@pytest.mark.parametrize(
    ("name", "body", "ending"),
    [
        ("segfaults", "import ctypes; ctypes.string_at(0)", "died by SIGSEGV"),
        ("aborts", "import os; os.abort()", "died by SIGABRT"),
        ("prints_and_leaves", "import os; print('all good', flush=True); os._exit(0)", "ended with exit code 0"),
    ],
)
def test_an_import_that_ends_the_process_is_a_crash(generation: Path, name: str, body: str, ending: str) -> None:
    package(generation, name, body)
    verdict = run(generation, name)
    assert (verdict.code, verdict.status) == ("import.crash", "fail")
    assert ending in verdict.message
    assert verdict.evidence["stage"] == f"importing {name}"


def test_the_crashing_kernel_build(tiny: Path, tmp_path: Path) -> None:
    generation = tiny_stack.make_generation(tmp_path / "g", tiny, kernel="0.3.21+tiny.crash")
    verdict = run(generation, "sgl_kernel")
    assert (verdict.code, verdict.evidence["signal"]) == ("import.crash", "SIGABRT")
    assert "sgl_kernel/__init__.py" in verdict.evidence["stderr"]  # the fault handler's traceback


def test_a_hang_is_a_timeout_that_shows_where(generation: Path) -> None:
    package(generation, "hangs", "import time\ntime.sleep(100)")
    verdict = run(generation, "hangs", timeout_s=1.5)
    assert verdict.code == "import.timeout"
    assert "hangs/__init__.py" in verdict.evidence["stderr"]


def test_system_exit_in_a_package_is_an_error(generation: Path) -> None:
    package(generation, "exits", "import sys; print('usage: ...'); sys.exit(0)")
    verdict = run(generation, "exits")
    assert (verdict.code, verdict.message) == ("import.error", "The import raised SystemExit: 0")


def test_an_import_that_leaves_a_process_passes_and_says_so(generation: Path) -> None:
    package(generation, "leaves", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)")
    verdict = run(generation, "leaves")
    assert (verdict.code, verdict.evidence["left_processes"]) == ("import.ok", 1)
    assert "It left 1 process running, which ended by SIGKILL." in verdict.message


def test_an_import_that_fills_memory_is_stopped(generation: Path) -> None:
    package(generation, "eats", "x = []\nwhile True: x.append(bytearray(1 << 24))")
    verdict = run(generation, "eats", memory_bytes=1 << 28)
    assert (verdict.code, verdict.status) == ("import.memory", "fail")


def test_an_import_that_fills_memory_through_its_children_is_stopped(generation: Path) -> None:
    body = """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                break
        held = bytearray(150 << 20)
        time.sleep(60)
        """
    package(generation, "eats_together", body)
    verdict = run(generation, "eats_together", memory_bytes=1 << 28)
    assert (verdict.code, verdict.status) == ("import.memory", "fail")
    assert verdict.evidence["stage"] == "importing eats_together"


def library(path: Path, code: str = "int thing(void) { return 1; }") -> Path:
    """Compile a real shared library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-xc", "-", "-o", str(path), f"-Wl,-soname,{path.name}"]
    subprocess.run(command, input=code, text=True, check=True)
    return path


def loads(generation: Path, name: str, *paths: Path) -> None:
    """Put a package into the generation that loads the given files."""
    package(generation, name, "import ctypes\n" + "".join(f"ctypes.CDLL({str(path)!r})\n" for path in paths))


def test_a_library_from_outside_the_generation_is_foreign(generation: Path, tmp_path: Path) -> None:
    outside = library(tmp_path / "cuda/lib64/libcudart.so.13")
    loads(generation, "shadowed", outside)
    verdict = run(generation, "shadowed")
    assert (verdict.code, verdict.status) == ("import.foreign_library", "fail")
    assert verdict.evidence["foreign"] == [str(outside)]
    assert "LD_LIBRARY_PATH" in verdict.action


def test_a_library_that_the_system_shadows_is_foreign(tiny: Path, tmp_path: Path) -> None:
    """The way it happens: LD_LIBRARY_PATH names a directory with a library of the same name."""
    generation = tiny_stack.make_generation(tmp_path / "g", tiny)
    inside = library(tiny_stack.site_packages(generation) / "nvidia/lib/libcublas.so.13")
    directory = package(generation, "uses_blas", "from . import ops")
    extension(directory, "ops", "", str(inside), "-Wl,--enable-new-dtags", f"-Wl,-rpath,{inside.parent}")
    assert run(generation, "uses_blas").code == "import.ok"
    outside = library(tmp_path / "system/libcublas.so.13")
    verdict = run(generation, "uses_blas", environment={"LD_LIBRARY_PATH": str(outside.parent)})
    assert (verdict.code, verdict.evidence["foreign"]) == ("import.foreign_library", [str(outside)])


def test_a_link_out_of_the_generation_is_foreign(generation: Path, tmp_path: Path) -> None:
    outside = library(tmp_path / "libnccl.so.2", "int ncclGetVersion(int *v) { *v = 22705; return 0; }")
    link = tiny_stack.site_packages(generation) / "libnccl.so.2"
    link.symlink_to(outside)
    loads(generation, "linked", link)
    link_verdict = run(generation, "linked")
    assert (link_verdict.code, link_verdict.evidence["foreign"]) == ("import.foreign_library", [str(outside)])


def test_the_libraries_of_the_driver_come_from_outside(generation: Path, tmp_path: Path) -> None:
    loads(generation, "driven", library(tmp_path / "libcuda.so.1"), library(tmp_path / "libnvidia-ml.so.1"))
    verdict = run(generation, "driven")
    assert verdict.code == "import.ok"
    assert sorted(verdict.evidence["libraries"]) == ["libcuda.so.1", "libnvidia-ml.so.1"]


@pytest.mark.parametrize(
    "names",
    [
        ("a/libcudart.so.12", "a/libcudart.so.13"),
        ("b/libnccl.so.2", "c/libnccl.so.2"),
        ("d/libcudart-9335f6a2.so.12", "d/libcudart.so.12"),
    ],
    ids=["two CUDA majors", "two files of one name", "one that a wheel brings for itself"],
)
def test_a_library_that_is_loaded_twice(generation: Path, names: tuple[str, str]) -> None:
    site = tiny_stack.site_packages(generation)
    name = "twice_" + names[0].partition("/")[0]
    paths = [library(site / name / path) for path in names]
    (site / name / "__init__.py").write_text(
        f"import ctypes\nfor path in {[str(p) for p in paths]!r}: ctypes.CDLL(path)\n"
    )
    verdict = run(generation, name)
    assert (verdict.code, verdict.status) == ("import.duplicate_library", "fail")
    (found,) = verdict.evidence["copies"].values()
    assert found == sorted(str(path.resolve()) for path in paths)


def test_torch_and_nccl_are_asked_what_they_are(tiny: Path, tmp_path: Path) -> None:
    generation = tiny_stack.make_generation(tmp_path / "g", tiny)
    nccl = library(
        tiny_stack.site_packages(generation) / "nvidia/libnccl.so.2",
        "int ncclGetVersion(int *v) { *v = 22809; return 0; }",
    )
    package(generation, "with_nccl", f"import torch, ctypes\nctypes.CDLL({str(nccl)!r})\n")
    evidence = run(generation, "with_nccl").evidence
    assert (evidence["cuda"], evidence["arch_list"], evidence["nccl"]) == ("12.8", ["sm_90", "sm_120"], 22809)


def test_an_nccl_that_crashes_when_it_is_asked_does_not_take_the_import_with_it(tiny: Path, tmp_path: Path) -> None:
    generation = tiny_stack.make_generation(tmp_path / "g", tiny)
    code = "#include <stdlib.h>\nint ncclGetVersion(int *v) { abort(); }"
    nccl = library(tiny_stack.site_packages(generation) / "nvidia/libnccl.so.2", code)
    package(generation, "bad_nccl", f"import torch, ctypes\nctypes.CDLL({str(nccl)!r})\n")
    verdict = run(generation, "bad_nccl")
    assert (verdict.code, verdict.evidence["nccl"]) == ("import.ok", None)


def test_one_rule_says_what_is_of_the_driver(generation: Path, tmp_path: Path) -> None:
    for number, (name, of_driver) in enumerate(
        {"libcuda.so.1": True, "libnvcuvid.so.1": True, "libnvrtc.so.13": False}.items()
    ):
        needed = library(tmp_path / name)
        directory = package(generation, f"needs_{number}", "from . import ops")
        extension(directory, "ops", "", str(needed))
        needed.unlink()
        verdict = run(generation, f"needs_{number}")
        assert (verdict.code, verdict.evidence["library"]) == ("import.missing_library", name)
        assert ("driver" in verdict.action) == of_driver


def test_a_child_that_cannot_be_started_fails_its_module_and_no_other_check(generation: Path) -> None:
    verdicts = check_imports(["torch", "sgl_kernel"], python="/no/such/python", timeout_s=5)
    assert [(v.code, v.status, v.layer, v.subject) for v in verdicts] == [
        ("node.child_failed", "fail", "stack", "torch"),
        ("node.child_failed", "fail", "stack", "sgl_kernel"),
    ]
    assert "/no/such/python" in verdicts[0].message


def test_imports_run_at_once_as_far_as_memory_goes(generation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for number in range(4):
        package(generation, f"slow_{number}", "import time\ntime.sleep(1)")
    modules = [f"slow_{number}" for number in range(4)]

    def seconds() -> float:
        began = time.monotonic()
        verdicts = check_imports(modules, python=str(generation / "venv/bin/python"), timeout_s=30)
        assert [v.subject for v in verdicts if v.code == "import.ok"] == modules
        return time.monotonic() - began

    monkeypatch.setattr(imports, "available_bytes", lambda: 100 * imports.IMPORT_BYTES)
    assert seconds() < 4
    monkeypatch.setattr(imports, "available_bytes", lambda: 0)
    assert seconds() >= 4


def test_available_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  8 kB\nMemAvailable:    3 kB\n")
    assert imports.available_bytes(str(tmp_path / "meminfo")) == 3072
    (tmp_path / "meminfo").write_text("MemTotal:  8 kB\n")
    assert imports.available_bytes(str(tmp_path / "meminfo")) == 0
    assert imports.available_bytes() > 0


def test_an_exception_that_cannot_be_shown(generation: Path) -> None:
    package(generation, "odd", "class E(Exception):\n    def __str__(self): raise ValueError\nraise E")
    assert run(generation, "odd").code == "import.error"


def test_the_environment_of_the_caller_does_not_reach_the_import(
    generation: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert run(generation, "only_here").code == "import.missing_module"
    assert os.listdir(tmp_path) == ["only_here.py"]


WORDS = st.sampled_from(
    [": undefined symbol: ", "cannot open shared object file", ": version `", "' not found", ".so", "a"]
)


@given(st.lists(WORDS | st.text(max_size=5), max_size=30))
def test_any_text_is_read_without_an_error(parts: list[str]) -> None:
    finding = imports._from_loader(["".join(parts)])
    assert finding is None or finding.code in ("import.undefined_symbol", "import.missing_library")


@pytest.mark.parametrize("text", [".so" * 3000, "version " * 1000, "mismatch" * 1000, "x: " * 3000])
def test_a_text_made_to_be_slow_is_not(text: str) -> None:
    began = time.monotonic()
    assert imports._from_loader([text]) is None
    assert imports._mismatch([text]) is None
    assert time.monotonic() - began < 1


def test_the_first_sentence_of_the_loader_counts() -> None:
    library = "libnvrtc.so.12: cannot open shared object file: No such file"
    symbol = "ops.so: undefined symbol: missing_three"
    assert imports._from_loader([f"{library}\n{symbol}"]).code == "import.missing_library"
    assert imports._from_loader([f"{symbol}\n{library}"]).code == "import.undefined_symbol"


def test_a_generation_that_is_reached_through_a_link_is_still_itself(generation: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(generation)
    assert run(tmp_path / "current", "torch").code == "import.ok"


def test_a_loader_text_without_a_file_name() -> None:
    finding = imports._from_loader(["undefined symbol: _ZN3c104normEv"])
    assert (finding.code, finding.evidence["file"]) == ("import.undefined_symbol", None)
    assert finding.message.startswith("An extension needs c10::norm()")
