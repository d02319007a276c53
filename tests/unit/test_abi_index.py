"""The index of torch releases, the engine over it, and the truth it has to agree with."""

from __future__ import annotations

import json
import lzma
import re
import zipfile
from pathlib import Path

import pytest
from abi_libraries import CHECK_INT, CHECK_UNSIGNED, build, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.controller import abi_check
from bedplate.controller.abi_engine import Engine, Extension, Setting, solve
from bedplate.controller.abi_index import (
    FIRST_RELEASE,
    PRIVATE_FILE,
    add_wheel,
    choose_wheel,
    index_path,
    load_index,
    read_torch_wheel,
    save_index,
    wheel_records,
)
from bedplate.controller.errors import BedplateError
from bedplate.controller.needs import FileNeeds, WheelNeeds
from bedplate.node.abi.exports import IndexFormatError, Release, TorchIndex, version_key
from bedplate.node.verdicts import failing

DATA = Path(__file__).parent / "data" / "abi"

# docs/abi.md: undefined C++ symbols and missing CUDA libraries of the worst file, by torch release.
RELEASES = ("2.8.0", "2.9.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1")
MATRIX = {
    "sgl_kernel-0.3.16.post3": [(0, 0), (1, 0), (1, 0), (3, 0), (3, 4), (7, 4), (8, 4), (8, 4)],
    "sgl_kernel-0.3.21": [(2, 0), (0, 0), (0, 0), (2, 0), (2, 4), (6, 4), (7, 4), (7, 4)],
    "sglang_kernel-0.4.0": [(2, 0), (0, 0), (0, 0), (2, 0), (2, 4), (6, 4), (7, 4), (7, 4)],
    "sglang_kernel-0.4.2": [(9, 4), (7, 4), (7, 4), (3, 4), (0, 0), (4, 0), (5, 0), (6, 0)],
    "sglang_kernel-0.4.10": [(12, 4), (11, 4), (11, 4), (8, 4), (5, 0), (3, 0), (2, 0), (0, 0)],
}


@pytest.fixture(scope="module")
def index() -> TorchIndex:
    return load_index(private=False)


@pytest.fixture(scope="module")
def engine(index: TorchIndex) -> Engine:
    return Engine(index)


def kernel(name: str) -> Extension:
    text = lzma.decompress((DATA / f"{name}.needs.json.xz").read_bytes()).decode()
    return Extension(name.replace("_", "-").replace("-0", " 0", 1), WheelNeeds.from_json(text))


# -- the shipped file


def test_the_shipped_index_is_small_and_complete(index: TorchIndex) -> None:
    assert index_path().stat().st_size < 1_500_000
    assert set(RELEASES) <= set(index.versions())
    assert index.versions()[0] == FIRST_RELEASE
    assert index.versions() == sorted(index.versions(), key=version_key)
    for release in index.releases:
        assert release.cuda
        assert release.glibc.startswith("2.")
        assert release.wheels
        assert all(len(w["sha256"]) == 64 and w["file"].startswith("torch-") for w in release.wheels)
        for name in ("KernelFunction", "FunctionSchema", "TensorImpl", "IValue", "SymInt", "Stream"):
            assert f"c10::{name}" in release.layout, release.version
        assert "torch::CppFunction" in release.layout
        # The older wheels export their static copy of MKL as well.
        assert 80_000 < len(index.exports(release.version)) < 250_000


def test_the_incident_in_the_index(index: TorchIndex) -> None:
    assert index.releases_with([CHECK_INT])[-1] == "2.9.1"
    assert index.releases_with([CHECK_UNSIGNED])[0] == "2.10.0"
    assert index.library_of(CHECK_INT, "2.9.1") == "libc10_cuda.so"
    assert index.layout_of("2.8.0")["c10::KernelFunction"] == [32, 8]
    assert index.layout_of("2.9.1")["c10::KernelFunction"] == [40, 8]
    assert len(index.release("2.10.0").wheels) > len(index.release("2.9.1").wheels)  # type: ignore[union-attr]


# -- the truth


def counts(engine: Engine, extension: Extension, version: str) -> tuple[int, int]:
    """Return (undefined C++ symbols, missing CUDA libraries) of the worst file of a wheel with one torch release."""
    release = engine.index.release(version)
    assert release
    findings = engine.check([extension], Setting(release, release.cuda)).findings
    return max(((len(f.undefined), len(f.missing)) for f in findings), default=(0, 0))


@pytest.mark.parametrize("name", MATRIX)
def test_the_matrix(engine: Engine, name: str) -> None:
    extension = kernel(name)
    assert [counts(engine, extension, release) for release in RELEASES] == MATRIX[name]


@pytest.mark.parametrize(
    ("name", "satisfied"),
    [
        ("sgl_kernel-0.3.21", ["2.9.0", "2.9.1"]),
        ("sglang_kernel-0.4.0", ["2.9.0", "2.9.1"]),
        ("sglang_kernel-0.4.2", ["2.11.0"]),
    ],
)
def test_which_torch(engine: Engine, name: str, satisfied: list[str]) -> None:
    solution = solve(engine, [kernel(name)])
    assert solution.satisfied_by == satisfied
    assert set(solution.reasons) == set(engine.index.versions()) - set(satisfied)
    assert all(failing(verdicts) for verdicts in solution.reasons.values())


EXPECTED = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", MATRIX)
def test_every_missing_name_is_the_one_that_binutils_finds(
    engine: Engine, index: TorchIndex, name: str, release: str
) -> None:
    # made from the same files: the need list from this wheel, the index from this wheel of torch
    recorded, torch = EXPECTED["kernels"][name], index.release(release)
    extension = kernel(name)
    assert extension.needs.sha256 == recorded["sha256"]
    assert torch
    assert EXPECTED["torch"][release]["sha256"] in {w["sha256"] for w in torch.wheels}
    found = {
        f.file: {"symbols": sorted(s.name.decode() for s in f.undefined), "libraries": sorted(f.missing)}
        for f in engine.check([extension], Setting(torch, torch.cuda)).findings
    }
    expected = recorded["missing"][release]
    nothing: dict[str, list[str]] = {"symbols": [], "libraries": []}
    assert found == {file: expected.get(file, nothing) for file in found}
    # Only libraries that the wheel's own code opens by name, if at all, are not judged.
    assert all(re.fullmatch(r"lib/mscclpp(_nccl)?\.so[.\d]*", file) for file in expected.keys() - found.keys())


def test_the_symbols_are_those_the_loader_named() -> None:
    missing = EXPECTED["kernels"]["sgl_kernel-0.3.21"]["missing"]["2.10.0"].values()
    assert {n for file in missing for n in file["symbols"]} == {CHECK_INT, "_ZN3c1013MessageLoggerC1EPKcii"}


def test_the_silent_break_is_suspect_and_the_good_pair_is_clean(engine: Engine, index: TorchIndex) -> None:
    for name, version, suspects in (
        ("sgl_kernel-0.3.16.post3", "2.9.1", True),
        ("sgl_kernel-0.3.16.post3", "2.10.0", True),
        ("sgl_kernel-0.3.21", "2.8.0", True),
        ("sgl_kernel-0.3.21", "2.9.1", False),
        ("sglang_kernel-0.4.2", "2.11.0", False),
    ):
        release = index.release(version)
        assert release
        verdicts = engine.check([kernel(name)], Setting(release, release.cuda)).verdicts
        found = [v.evidence["file"] for v in verdicts if v.code == "abi.layout_suspect"]
        assert ("sgl_kernel/spatial_ops.abi3.so" in found) is suspects, (name, version)
        assert bool(failing(verdicts)) is suspects


def test_two_extensions_that_agree_on_nothing(engine: Engine) -> None:
    solution = solve(engine, [kernel("sgl_kernel-0.3.21"), kernel("sglang_kernel-0.4.2")])
    assert solution.satisfied_by == []
    only_cuda13 = solve(engine, [kernel("sgl_kernel-0.3.21")], cuda="13")
    assert only_cuda13.satisfied_by == []
    assert any(v.evidence.get("wanted") == "13" for v in only_cuda13.reasons["2.9.1"])
    assert solve(engine, [kernel("sglang_kernel-0.4.2")], cuda="13.0").satisfied_by == ["2.11.0"]


# -- the format

names = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=120)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["1.0.0", "1.0.1", "2.0.0"]), st.dictionaries(names, st.lists(names), max_size=3), min_size=1
    )
)
def test_what_is_added_is_read_back(releases: dict[str, dict[str, list[str]]]) -> None:
    index = TorchIndex()
    for version, exports in releases.items():
        index.add(Release(version, cuda="13.0"), exports)
    again = TorchIndex.parse(index.dump())
    assert again.versions() == sorted(releases)
    for version, exports in releases.items():
        assert set(again.exports(version)) == {n for library in exports.values() for n in library}
    assert again.dump() == index.dump()


def test_a_release_is_replaced_by_its_version() -> None:
    index = TorchIndex()
    index.add(Release("1.0"), {"liba.so": ["old", "both"]})
    index.add(Release("2.0"), {"liba.so": ["both"]})
    index.add(Release("1.0", cuda="9"), {"libb.so": ["new", "both"]})
    assert index.versions() == ["1.0", "2.0"]
    assert index.exports("1.0") == ["both", "new"]
    assert not index.knows("old")
    assert index.library_of("both", "1.0") == "libb.so"
    assert index.library_of("both", "2.0") == "liba.so"


@pytest.mark.parametrize(
    "data", [b"", b"no xz", lzma.compress(b"no json\n"), lzma.compress(b'{"schema": 9}\n'), lzma.compress(b"[]\n")]
)
def test_what_is_no_index(data: bytes) -> None:
    with pytest.raises(IndexFormatError):
        TorchIndex.parse(data)


def test_names_by_a_part_of_them() -> None:
    index = TorchIndex()
    index.add(Release("1.0"), {"l.so": ["_Zabc", "_Zab", "abc\tx", "_Zxab", "zz"]})
    assert index.names_with("ab") == ["_Zab", "_Zabc", "_Zxab"]
    assert index.names_with("Za\tb") == []
    for name in ("_Z", "_Zabcd", "", "a\n_Zab", "zz\t0", "\udcff"):
        assert not index.knows(name), name


@pytest.mark.parametrize("line", ["_Za\t7", "_Za\tx", "_Za\t-1", "_Za"])
def test_a_line_of_no_class(line: str) -> None:
    text = f'{{"schema":2,"machine":"x86_64","libraries":[],"releases":[],"classes":[]}}\n{line}\n'
    with pytest.raises(IndexFormatError):
        TorchIndex.parse(lzma.compress(text.encode())).mask_of("_Za")
    with pytest.raises(IndexFormatError):
        list(TorchIndex.parse(lzma.compress(text.encode())).names())


def test_a_cut_index_and_a_huge_one(monkeypatch: pytest.MonkeyPatch) -> None:
    index = TorchIndex()
    index.add(Release("1.0"), {"l.so": [f"name{n}" for n in range(2000)]})
    data = index.dump()
    with pytest.raises(IndexFormatError):
        TorchIndex.parse(data[: len(data) // 2])
    monkeypatch.setattr("bedplate.node.abi.exports.MAX_INDEX_BYTES", 1000)
    with pytest.raises(IndexFormatError, match="larger"):
        TorchIndex.parse(data)


# -- building


def torch_wheel(place: Path, version: str = "9.9.9") -> Path:
    library = build(place / "libc10.so", [CHECK_INT], ["puts"], "-Wl,-soname,libc10.so")
    path = place / f"torch-{version}-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(library, "torch/lib/libc10.so")
        archive.writestr("torch/version.py", f"__version__ = '{version}'\ncuda: Optional[str] = '13.0'\n")
    return path


@needs_compiler
def test_a_wheel_is_added_and_a_private_file_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_ABI_INDEX", str(tmp_path / "torch.idx"))
    public = TorchIndex()
    public.add(Release("1.0", cuda="12.1"), {"libc10.so": ["old"]})
    save_index(public, tmp_path / "torch.idx")
    private = TorchIndex()
    release = add_wheel(private, torch_wheel(tmp_path))
    save_index(private, tmp_path / PRIVATE_FILE)
    assert (release.version, release.cuda, release.provides) == ("9.9.9", "13.0", ["libc10.so"])
    merged = load_index()
    assert merged.versions() == ["1.0", "9.9.9"]
    assert merged.releases_with([CHECK_INT]) == ["9.9.9"]
    assert load_index(private=False).versions() == ["1.0"]


def test_wheels_that_are_none(tmp_path: Path) -> None:
    for name, message in (
        ("nonsense.whl", "not a wheel by its name"),
        ("numpy-1.0-cp311-cp311-linux_x86_64.whl", "a wheel of numpy"),
        ("torch-1.0-cp311-cp311-linux_x86_64.whl", "cannot be read"),
    ):
        (tmp_path / name).write_bytes(b"not a zip")
        with pytest.raises(BedplateError, match=message):
            read_torch_wheel(tmp_path / name)


def test_an_absent_or_broken_index_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BedplateError, match="bedplate abi index add"):
        load_index(tmp_path / "absent.idx")
    (tmp_path / "broken.idx").write_bytes(b"x")
    with pytest.raises(BedplateError, match="not usable"):
        load_index(tmp_path / "broken.idx")


def test_of_several_wheels_the_one_installers_take() -> None:
    pypi = pytest.importorskip("pypi_simple")
    files = [
        f"torch-2.10.0-{tag}-manylinux_2_28_x86_64.whl"
        for tag in ("cp311-cp311", "3-cp311-cp311", "cp313-cp313t", "cp312-cp312")
    ]
    packages = [
        pypi.DistributionPackage(
            filename=f, project="torch", version="2.10.0", package_type="wheel", url="u", digests={"sha256": "0"},
            requires_python=None, has_sig=None, is_yanked=False,
        )
        for f in files
    ]  # fmt: skip
    assert choose_wheel(packages).filename == files[1]
    assert [r["file"] for r in wheel_records(packages)] == sorted(files)


# -- settings of the engine


def extension(*needs: FileNeeds) -> Extension:
    return Extension("ext 1.0", WheelNeeds("ext-1.0.whl", "0" * 64, 1, [], list(needs), 0))


def test_glibc_of_the_target_and_libraries_of_the_node(engine: Engine, index: TorchIndex) -> None:
    release = index.release("2.9.1")
    assert release
    needs = FileNeeds(
        "pkg/a.so",
        needed=["libc.so.6", "libnuma.so.1", "libcuda.so.1", "libc10.so", "libnccl.so.9"],
        module=True,
        versions=[("GLIBC_2.38", "libc.so.6")],
    )
    setting = Setting(release, release.cuda, python=(3, 11), glibc="2.34", libraries=set())
    report = engine.check([extension(needs)], setting)
    assert {v.code for v in failing(report.verdicts)} == {"abi.glibc_too_old", "abi.missing_library"}
    assert report.from_node == ["libnuma.so.1"]
    assert list(report.driver) == ["libcuda.so.1"]
    assert "the target with glibc 2.34" in next(v.message for v in report.verdicts if v.code == "abi.glibc_too_old")


def test_a_symbol_of_a_sibling_is_not_missing(engine: Engine, index: TorchIndex) -> None:
    release = index.release("2.9.1")
    assert release
    own = "_ZN2at6native9my_kernelEv"
    user = FileNeeds("pkg/a.so", needed=["libmine.so", "libc10.so"], module=True, undefined=[(own, "", "", False)])
    sibling = FileNeeds("pkg/libmine.so", soname="libmine.so", exports=[own])
    setting = Setting(release, release.cuda)
    assert failing(engine.check([extension(user, sibling)], setting).verdicts) == []
    assert len(failing(engine.check([extension(user)], setting).verdicts)) == 1


def test_wheels_need_a_torch_to_be_held_against(tmp_path: Path) -> None:
    with pytest.raises(BedplateError, match="--torch VERSION"):
        abi_check.check_wheels([tmp_path / "ext-1.0-py3-none-any.whl"])
    with pytest.raises(BedplateError, match="cannot read"):
        abi_check.check_wheels([tmp_path / "ext-1.0-py3-none-any.whl"], "2.9.1")
    with pytest.raises(BedplateError, match="no Python environment"):
        abi_check.check_directory(tmp_path)
