"""The check of an installed environment, on small libraries compiled for each case."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from abi_libraries import CHECK_INT, CHECK_UNSIGNED, build, environment, needs_compiler

from bedplate.node.abi.check import Report, check_environment
from bedplate.node.abi.demangle import nearest_of
from bedplate.node.abi.installed import find_environment, shared_objects, site_packages_of
from bedplate.node.abi.judge import library_major
from bedplate.node.abi.loader import SystemLibraries, read_ld_cache
from bedplate.node.verdicts import Verdict, sentence

pytestmark = needs_compiler


class FakeIndex:
    """An index of two releases: 2.9.1 has the int signature, 2.10.0 the unsigned one."""

    has: ClassVar[dict[str, list[str]]] = {
        CHECK_INT: ["2.9.1"],
        CHECK_UNSIGNED: ["2.10.0"],
        "_ZN3c106SymInt3fooEv": ["2.9.1", "2.10.0"],
    }

    def __init__(self) -> None:
        self.layouts: dict[str, dict[str, list[int]]] = {}

    def releases_with(self, names: Any) -> list[str]:
        found = ["2.9.1", "2.10.0"]
        for name in names:
            found = [r for r in found if r in self.has.get(name, [])]
        return found

    def knows(self, name: str) -> bool:
        return name in self.has

    def cuda_of(self, version: str) -> str:  # noqa: ARG002
        return "12.8"

    def layout_of(self, version: str) -> dict[str, list[int]]:
        return self.layouts.get(version, {})


def check(site: Path, **options: Any) -> Report:
    return check_environment(str(site), python=os.path.realpath(sys.executable), **options)


def only(report: Report, code: str) -> Verdict:
    found = [v for v in report.verdicts if v.code == code]
    assert len(found) == 1, [sentence(v) for v in report.verdicts]
    return found[0]


def codes(report: Report) -> list[str]:
    return [v.code for v in report.verdicts if v.status == "fail"]


def test_a_healthy_environment_passes(tmp_path: Path) -> None:
    report = check(environment(tmp_path))
    assert report.status == "pass"
    assert only(report, "abi.ok").evidence["torch"] == "2.9.1"
    assert report.driver == {"libcuda.so.1": 1} or Path("/usr/lib/x86_64-linux-gnu/libcuda.so.1").exists()


def test_the_incident_in_one_sentence(tmp_path: Path) -> None:
    report = check(environment(tmp_path, CHECK_UNSIGNED, "2.10.0"), index=FakeIndex())
    verdict = only(report, "abi.undefined_symbol")
    assert verdict.subject == "sgl-kernel 0.3.21"
    signature = "(int, char const*, char const*, unsigned int, bool)"
    assert verdict.message == (
        "sgl_kernel/common_ops.abi3.so needs c10::cuda::c10_cuda_check_implementation(int, char const*, char const*, "
        f"int, bool), but torch 2.10.0 has it as {signature}: parameter 4 is unsigned int instead of int; "
        "torch 2.9.1 has the wanted one."
    )
    assert verdict.action == "Use torch 2.9.1, or a sgl-kernel built for torch 2.10.0."
    symbol = next(s for s in verdict.evidence["symbols"] if s["mangled"] == CHECK_INT)
    assert symbol["nearest_mangled"] == CHECK_UNSIGNED
    assert symbol["satisfied_by"] == ["2.9.1"]
    assert symbol["differs"] == [{"position": 4, "wanted": "int", "has": "unsigned int"}]


def test_a_torch_that_is_not_the_one_it_says_is_told_from_a_wrong_release(tmp_path: Path) -> None:
    """Its own release would have the symbol: a build without CUDA, or files that something wrote over it."""
    verdict = only(check(environment(tmp_path, CHECK_UNSIGNED, "2.9.1"), index=FakeIndex()), "abi.undefined_symbol")
    assert verdict.message.endswith(
        "torch 2.9.1 has the wanted one, so this one is another build of it, or was changed."
    )
    assert verdict.action == "Install torch 2.9.1 again, the build that sgl-kernel 0.3.21 was compiled for."


def test_a_missing_library_is_reported_once_and_not_as_its_symbols(tmp_path: Path) -> None:
    site = environment(tmp_path)
    other = tmp_path / "other"
    build(other / "libnuma.so.9", [f"numa_{n}" for n in range(60)], [], "-Wl,-soname,libnuma.so.9")
    for name in ("a", "b"):
        needs = [f"numa_{n}" for n in range(60)]
        build(site / "pkg" / f"{name}.so", [f"PyInit_{name}"], needs, f"-L{other}", "-l:libnuma.so.9")
    (other / "libnuma.so.9").unlink()
    verdict = only(check(site), "abi.missing_library")
    assert verdict.evidence["files"] == ["pkg/a.so", "pkg/b.so"]
    assert verdict.evidence["symbols"] == 120
    assert "pkg/a.so and 1 other file need libnuma.so.9" in verdict.message


def test_a_cuda_library_of_another_major(tmp_path: Path) -> None:
    site = environment(tmp_path)
    other = tmp_path / "other"
    build(other / "libcudart.so.11", ["cudaMalloc"], [], "-Wl,-soname,libcudart.so.11")
    build(site / "pkg" / "a.so", ["PyInit_a"], ["cudaMalloc"], f"-L{other}", "-l:libcudart.so.11")
    (other / "libcudart.so.11").unlink()
    report = check(site)
    assert codes(report) == ["abi.cuda_major"]
    verdict = only(report, "abi.cuda_major")
    assert verdict.evidence["wanted_major"] == "11"
    assert verdict.evidence["torch_cuda"] == "12.8"


def test_the_driver_is_listed_and_not_missing(tmp_path: Path) -> None:
    site = environment(tmp_path)
    other = tmp_path / "other"
    build(other / "libnvidia-ml.so.1", ["nvmlInit_v2"], [], "-Wl,-soname,libnvidia-ml.so.1")
    build(site / "pkg" / "a.so", ["PyInit_a"], ["nvmlInit_v2"], f"-L{other}", "-l:libnvidia-ml.so.1")
    (other / "libnvidia-ml.so.1").unlink()
    report = check(site)
    assert report.status == "pass"
    assert report.driver["libnvidia-ml.so.1"] == 1


def test_a_name_of_ones_own_is_not_the_drivers(tmp_path: Path) -> None:
    site = environment(tmp_path)
    driver = build(tmp_path / "driver" / "libcuda.so.1", ["cuInit"], [], "-Wl,-soname,libcuda.so.1")
    needs = ["custom_allreduce", "cuInit"]
    build(site / "own" / "_C.abi3.so", ["PyInit__C"], needs, f"-L{driver.parent}", "-l:libcuda.so.1")
    driver.unlink()
    report = check(site)
    assert [s["mangled"] for s in only(report, "abi.undefined_symbol").evidence["symbols"]] == ["custom_allreduce"]
    assert report.driver == {"libcuda.so.1": 1}


def test_what_this_node_never_loads_is_judged_apart(tmp_path: Path) -> None:
    site = environment(tmp_path)
    for file in (
        "pkg/x.cpython-310-x86_64-linux-gnu.so",
        "pkg/sm90/k.so",
        "pkg/lib_torch28_ops.so",
        "pkg/cu11/k2.so",
    ):
        stem = Path(file).name.split(".")[0]
        build(site / file, [f"PyInit_{stem}"], ["nobody_has_this"])
    build(site / "pkg/sm100/k.so", ["PyInit_k"], [])
    report = check(site)
    assert report.status == "pass"
    reasons = {a["file"]: a["reason"] for a in report.apart}
    assert "another Python" in reasons["pkg/x.cpython-310-x86_64-linux-gnu.so"]
    assert "this node takes sm100" in reasons["pkg/sm90/k.so"]
    assert reasons["pkg/lib_torch28_ops.so"] == "built for torch 2.8"
    assert reasons["pkg/cu11/k2.so"] == "built for CUDA 11"
    assert codes(check(site, arch=90)) == ["abi.undefined_symbol"]


def test_a_plugin_nobody_needs_is_listed_and_not_judged(tmp_path: Path) -> None:
    site = environment(tmp_path)
    build(site / "pkg" / "libplugin.so", [], ["MPI_Init"])
    report = check(site)
    assert report.status == "pass"
    assert "pkg/libplugin.so" in {a["file"] for a in report.apart}


def test_weak_symbols_and_unreferenced_ones_are_no_errors(tmp_path: Path) -> None:
    site = environment(tmp_path)
    build(site / "pkg" / "a.so", ["PyInit_a"], [], weak=["maybe_there"])
    assert check(site).status == "pass"


def test_python_symbols_come_from_the_interpreter(tmp_path: Path) -> None:
    site = environment(tmp_path)
    build(site / "pkg" / "a.so", ["PyInit_a"], ["PyModule_Create2", "PyLong_FromLong"])
    assert check(site).status == "pass"
    build(site / "pkg" / "b.so", ["PyInit_b"], ["PyCowboy_Ride"])
    verdict = only(check(site), "abi.python_abi")
    assert verdict.evidence["symbols"] == ["PyCowboy_Ride"]


@pytest.mark.parametrize("place", ["lib/python3.11/site-packages", "target"])
def test_without_an_interpreter_nothing_is_said_of_pythons_names(tmp_path: Path, place: str) -> None:
    build(tmp_path / place / "pkg" / "a.abi3.so", ["PyInit_a"], ["PyModule_Create2", "nowhere"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/no/such/python")
    report = check_environment(str(tmp_path / place))
    assert codes(report) == ["abi.undefined_symbol"]
    assert [s["mangled"] for s in only(report, "abi.undefined_symbol").evidence["symbols"]] == ["nowhere"]
    verdict = only(report, "abi.unreadable_file")
    assert (verdict.status, verdict.evidence["names"]) == ("inconclusive", ["PyModule_Create2"])
    assert "no interpreter" in verdict.message


def test_a_newer_glibc_and_a_newer_runtime_are_named(tmp_path: Path) -> None:
    site = environment(tmp_path)
    path = build(site / "pkg" / "a.so", ["PyInit_a"], ["puts", "memcpy"])
    data = path.read_bytes()
    assert b"GLIBC_2.2.5\0" in data
    path.write_bytes(data.replace(b"GLIBC_2.2.5\0", b"GLIBC_2.9.9\0"))
    report = check(site)
    assert codes(report) == ["abi.glibc_too_old"]
    assert "needs GLIBC_2.9.9" in only(report, "abi.glibc_too_old").message


def test_a_newer_cpp_runtime_is_named(tmp_path: Path) -> None:
    site = environment(tmp_path)
    path = build(site / "pkg" / "a.so", ["PyInit_a"], ["__cxa_guard_acquire"], "-l:libstdc++.so.6")
    data = path.read_bytes()
    assert b"CXXABI_1.3\0" in data
    path.write_bytes(data.replace(b"CXXABI_1.3\0", b"CXXABI_9.3\0"))
    report = check(site)
    assert codes(report) == ["abi.cxxabi"]
    verdict = only(report, "abi.cxxabi")
    assert "needs CXXABI_9.3" in verdict.message
    assert "libstdc++.so.6" in verdict.action


def test_a_version_that_the_library_lacks_is_an_undefined_symbol(tmp_path: Path) -> None:
    site = environment(tmp_path)
    script = tmp_path / "v.map"
    script.write_text("FOO_2 { global: foo; };")
    lib = site / "pkg" / "lib"
    options = ["-Wl,-soname,libfoo.so.1"]
    build(lib / "libfoo.so.1", ["foo"], [], *options, f"-Wl,--version-script={script}")
    build(site / "pkg" / "a.so", ["PyInit_a"], ["foo"], f"-L{lib}", "-l:libfoo.so.1", "-Wl,-rpath,$ORIGIN/lib")
    assert check(site).status == "pass"
    script.write_text("FOO_1 { global: foo; };")
    build(lib / "libfoo.so.1", ["foo"], [], *options, f"-Wl,--version-script={script}")
    verdict = only(check(site), "abi.undefined_symbol")
    assert "foo (version FOO_2), but the libfoo.so.1 it would load does not define it" in verdict.message


def test_runpath_of_one_file_is_not_inherited_and_rpath_is(tmp_path: Path) -> None:
    site = environment(tmp_path)
    lib = site / "pkg" / "lib"
    build(lib / "libinner.so", ["inner"], [], "-Wl,-soname,libinner.so")
    build(lib / "libouter.so", ["outer"], ["inner"], "-Wl,-soname,libouter.so", f"-L{lib}", "-linner")
    for tag, expected in (("--disable-new-dtags", []), ("--enable-new-dtags", ["abi.missing_library"])):
        flags = [f"-L{lib}", "-louter", f"-Wl,-rpath,$ORIGIN/lib,{tag}", f"-Wl,-rpath-link,{lib}"]
        build(site / "pkg" / "a.so", ["PyInit_a"], ["outer"], *flags)
        report = check(site)
        # The inner library is in the same distribution: its own code may load it first, so it is not a failure.
        assert codes(report) == []
        found = [v.code for v in report.verdicts if v.status == "warn"]
        assert found == []
        (lib / "libinner.so").rename(tmp_path / "libinner.so")
        assert codes(check(site)) == ["abi.missing_library"]
        (tmp_path / "libinner.so").rename(lib / "libinner.so")
        assert expected is not None


def test_a_library_of_another_distribution_is_a_warning(tmp_path: Path) -> None:
    site = environment(tmp_path)
    build(site / "other_pkg" / "libshared.so.1", ["shared"], [], "-Wl,-soname,libshared.so.1")
    build(site / "pkg" / "a.so", ["PyInit_a"], ["shared"], f"-L{site / 'other_pkg'}", "-l:libshared.so.1")
    report = check(site)
    assert report.status == "warn"
    assert only(report, "abi.missing_library").evidence["present_at"] == "other_pkg/libshared.so.1"


@pytest.mark.parametrize("content", [b"INPUT(-lfoo)", b"!<arch>\n", b"\x7fELF\x02\x01", b""])
def test_unreadable_files_are_verdicts(tmp_path: Path, content: bytes) -> None:
    site = environment(tmp_path)
    (site / "pkg").mkdir()
    (site / "pkg" / "a.so").write_bytes(content)
    verdict = only(check(site), "abi.unreadable_file")
    assert verdict.evidence["file"] == "pkg/a.so"
    assert verdict.evidence["reason"]


def test_a_file_for_32_bits_that_nothing_would_load_is_listed_apart(tmp_path: Path) -> None:
    site = environment(tmp_path)
    (site / "pkg").mkdir()
    (site / "pkg" / "a.so").write_bytes(b"\x7fELF\x01\x01" + b"\0" * 90)
    report = check(site)
    assert report.status == "pass"
    assert report.apart == [{"file": "pkg/a.so", "reason": "a 32-bit ELF file"}]


def test_layouts_that_changed_make_files_suspect(tmp_path: Path) -> None:
    site = environment(tmp_path, CHECK_UNSIGNED, "2.10.0")
    lib = site / "torch" / "lib"
    build(site / "sgl_kernel" / "spatial_ops.abi3.so", [], ["_ZN3c106SymInt3fooEv"], f"-L{lib}", "-lc10")
    with (site / "sgl_kernel-0.3.21.dist-info" / "RECORD").open("a") as record:
        record.write("sgl_kernel/spatial_ops.abi3.so,sha256=x,1\n")
    index = FakeIndex()
    index.layouts = {"2.9.1": {"c10::KernelFunction": [32, 8]}, "2.10.0": {"c10::KernelFunction": [40, 8]}}
    verdict = only(check(site, index=index), "abi.layout_suspect")
    assert verdict.message == (
        "sgl_kernel/spatial_ops.abi3.so finds all its symbols, but sgl-kernel 0.3.21 was built for torch 2.9.1, where "
        "c10::KernelFunction has 32 bytes; in torch 2.10.0 it has 40."
    )
    index.layouts = {"2.9.1": {"c10::KernelFunction": [40, 8]}, "2.10.0": {"c10::KernelFunction": [40, 8]}}
    assert codes(check(site, index=index)) == ["abi.undefined_symbol"]


def test_no_torch_at_all(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    build(site / "pkg" / "a.so", ["PyInit_a"], ["nobody"])
    verdict = only(check(site), "abi.undefined_symbol")
    assert "neither the installed libraries nor another library it loads has it" in verdict.message


def test_the_interpreter_is_found_beside_and_a_bad_one_is_a_verdict(tmp_path: Path) -> None:
    site = environment(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert find_environment(str(site)).python == os.path.realpath(sys.executable)
    assert site_packages_of(str(tmp_path)) == str(site)
    assert check_environment(str(site)).status == "pass"
    report = check_environment(str(site), python="/etc/hostname")
    assert codes(report) == ["abi.unreadable_file"]
    with pytest.raises(NotADirectoryError):
        check_environment(str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError):
        site_packages_of(str(tmp_path / "bin"))


def test_shared_objects_are_found_by_their_names(tmp_path: Path) -> None:
    for name in ("a.so", "d/libb.so.1.2", "d/c.soup", "d/x.so.txt", "__pycache__/y.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert shared_objects(str(tmp_path)) == ["a.so", "d/libb.so.1.2"]


def test_system_directories_and_the_cache(tmp_path: Path) -> None:
    build(tmp_path / "sys" / "libodd.so.3", ["odd"], [], "-Wl,-soname,libodd.so.3")
    site = environment(tmp_path / "env")
    build(site / "pkg" / "a.so", ["PyInit_a"], ["odd"], f"-L{tmp_path / 'sys'}", "-l:libodd.so.3")
    assert codes(check(site)) == ["abi.missing_library"]
    assert check(site, library_path=[str(tmp_path / "sys")]).status == "pass"
    directories = ["/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", str(tmp_path / "sys")]
    assert check(site, system=SystemLibraries(cache=None, directories=directories)).status == "pass"
    assert read_ld_cache(b"nonsense") == {}
    if Path("/etc/ld.so.cache").exists():
        assert "libc.so.6" in read_ld_cache(Path("/etc/ld.so.cache").read_bytes())


def test_library_majors() -> None:
    assert library_major("libcudart.so.12") == "12"
    assert library_major("libcusolver.so.12") == "13"
    assert library_major("libcurand.so.10") == ""
    assert library_major("libcusparse.so.12") == ""  # what torch for CUDA 13.0 needs as well
    assert library_major("libfoo.so.3") == ""


def test_nearest_prefers_the_same_template_arguments_and_fewest_differences() -> None:
    wanted = "_ZNK2at10TensorBase14const_data_ptrIiLi0EEEPKT_v"
    others = ["_ZNK2at10TensorBase14const_data_ptrIfEEPKT_v", "_ZN2at10TensorBase3fooEv"]
    assert nearest_of(wanted, others) == others[0]
    assert nearest_of(CHECK_INT, ["_ZN3c104cuda5otherEv"]) is None


def test_the_module_reports_and_fails(tmp_path: Path, run_module: Any) -> None:
    site = environment(tmp_path, CHECK_UNSIGNED, "2.10.0")
    python = os.path.realpath(sys.executable)
    lax = run_module("bedplate_abi", site_packages=str(site), python=python, strict=False, check=True)
    assert lax["changed"] is False
    assert lax["status"] == "fail"
    assert lax["checked"] >= 3
    strict = run_module("bedplate_abi", site_packages=str(site), python=python)
    assert strict["failed"] is True
    assert strict["msg"].startswith("sgl-kernel 0.3.21: sgl_kernel/common_ops.abi3.so needs c10::cuda::c10_cuda_check")
    absent = run_module("bedplate_abi", generation=str(tmp_path / "absent"))
    assert "could not start" in absent["msg"]
