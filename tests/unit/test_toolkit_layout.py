"""From small wheels to the tree of a toolkit, and the links to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.node.state.durable import StateError
from bedplate.node.toolkit.layout import (
    Alternatives,
    Places,
    damage,
    lay_out,
    perform,
    point,
    prepare,
    prune,
    publish,
    survey,
    switch,
)
from conftest import RunModule

FILES_13 = {
    "nvidia/cu13/bin/nvcc": "nvcc",
    "nvidia/cu13/bin/crt/link.stub": "stub",
    "nvidia/cu13/include/cuda_runtime.h": "header",
    "nvidia/cu13/include/nvvm.h": "header",
    "nvidia/cu13/include/__init__.py": "",
    "nvidia/cu13/lib/libcudart.so.13": "library",
    "nvidia/cu13/lib/libnvrtc-builtins.so.13.0": "library",
    "nvidia/cu13/lib/libnvvm.so.4": "library",
    "nvidia/cu13/lib/libcheckpoint.so": "library",
    "nvidia/cu13/nvvm/bin/cicc": "cicc",
    "nvidia/cu13/.metadata/notes.txt": "of NVIDIA's build",
    "nvidia_cuda_nvcc-13.0.88.dist-info/METADATA": "Name: nvidia-cuda-nvcc",
    "nvidia_cuda_runtime-13.0.88.dist-info/METADATA": "Name: nvidia-cuda-runtime",
}
FILES_12 = {
    "nvidia/__init__.py": "",
    "nvidia/cuda_runtime/__init__.py": "",
    "nvidia/cuda_runtime/include/cuda.h": "header",
    "nvidia/cuda_runtime/include/generated_meta.h": "of cudart",
    "nvidia/cuda_runtime/lib/libcudart.so.12": "library",
    "nvidia/cuda_sanitizer_api/include/generated_meta.h": "of the sanitizer",
    "nvidia/cuda_nvcc/bin/ptxas": "ptxas",
    "nvidia/cuda_nvcc/nvvm/lib64/libnvvm.so": "library",
    "nvidia_cuda_nvcc_cu12-12.8.93.dist-info/METADATA": "",
    "nvidia_cuda_runtime_cu12-12.8.90.dist-info/METADATA": "",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def made(tmp_path: Path, files: dict[str, str], version: str = "13.0.1") -> Path:
    write(tmp_path / "site", files)
    lay_out(str(tmp_path / "site"), str(tmp_path / "cuda"), version)
    return tmp_path / "cuda"


def read(tree: Path, name: str) -> str:
    return (tree / name).read_text()


# ---- the tree -----------------------------------------------------------------------------------------------------


def test_wheels_of_cuda_13(tmp_path: Path) -> None:
    tree = made(tmp_path, FILES_13)
    assert read(tree, "bin/nvcc") == "nvcc"
    assert read(tree, "bin/crt/link.stub") == "stub"
    assert read(tree, "include/cuda_runtime.h") == "header"
    assert (tree / "include").readlink() == Path("targets/x86_64-linux/include")
    assert (tree / "lib64/libcudart.so").readlink() == Path("libcudart.so.13")
    assert (tree / "lib64/libnvrtc-builtins.so").readlink() == Path("libnvrtc-builtins.so.13.0")
    assert read(tree, "nvvm/lib64/libnvvm.so") == "library"
    assert read(tree, "nvvm/include/nvvm.h") == "header"
    assert not list(tree.rglob("__init__.py"))
    assert not list(tree.rglob("notes.txt"))
    assert read(tree, "share/bedplate/nvidia_cuda_nvcc-13.0.88.dist-info/METADATA").startswith("Name")


def test_version_json_says_what_it_is_and_how_it_came(tmp_path: Path) -> None:
    found = json.loads(read(made(tmp_path, FILES_13), "version.json"))
    assert found["cuda"] == {"name": "CUDA SDK", "version": "13.0.1"}
    assert found["cuda_cudart"]["version"] == "13.0.88"
    assert found["bedplate"]["source"] == "wheels"
    assert found["bedplate"]["wheels"]["nvidia_cuda_nvcc"] == "13.0.88"
    assert "cublas" in found["bedplate"]["absent"]


def test_wheels_of_cuda_12_lie_apart_and_have_no_nvcc(tmp_path: Path) -> None:
    tree = made(tmp_path, FILES_12, "12.8.1")
    assert read(tree, "include/generated_meta.h") == "of cudart"
    assert read(tree, "compute-sanitizer/include/generated_meta.h") == "of the sanitizer"
    assert read(tree, "bin/ptxas") == "ptxas"
    found = json.loads(read(tree, "version.json"))
    assert found["libnvvm"]["version"] == "12.8.93"
    assert "cuda_nvcc" not in found


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"nvidia/other/include/cuda_runtime.h": "another header"}, "different files cuda_runtime.h"),
        ({"nvidia/cu13/etc/thing.conf": "x"}, "has no place"),
        ({"nvidia/cu13/README": "x"}, "has no place"),
    ],
    ids=["conflict", "directory", "file"],
)
def test_wheels_that_do_not_make_one_toolkit(tmp_path: Path, extra: dict[str, str], says: str) -> None:
    with pytest.raises(StateError, match=says):
        made(tmp_path, {**FILES_13, **extra})


def test_the_same_file_of_two_wheels_is_taken_once(tmp_path: Path) -> None:
    tree = made(tmp_path, {**FILES_13, "nvidia/other/include/cuda_runtime.h": "header"})
    assert read(tree, "include/cuda_runtime.h") == "header"


def test_packages_that_are_no_toolkit(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no part of a CUDA toolkit"):
        made(tmp_path, {"nvidia/__init__.py": ""})


NAMES = st.sampled_from(["a", "b", "libx.so.1", "liby.so.2.3", "z.h"])


@settings(max_examples=40, deadline=None)  # it flushes the disk
@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["bin", "include", "lib", "nvvm"]), st.sampled_from(["", "d/", "d/e/"]), NAMES),
        st.text("xyz", max_size=3),
        min_size=1,
    )
)
def test_every_file_of_the_wheels_is_in_the_tree(files: dict[tuple[str, str, str], str]) -> None:
    places = {"bin": "bin", "include": "include", "lib": "lib64", "nvvm": "nvvm"}
    with tempfile.TemporaryDirectory() as folder:
        tree = made(Path(folder), {f"nvidia/cu13/{top}/{sub}{name}": text for (top, sub, name), text in files.items()})
        assert all(read(tree, f"{places[top]}/{sub}{name}") == text for (top, sub, name), text in files.items())
        assert damage(str(tree)) == []


@pytest.mark.parametrize("how", ["missing", "longer", "added", "relinked", "manifest"])
def test_damage(tmp_path: Path, how: str) -> None:
    tree = made(tmp_path, FILES_13)
    assert damage(str(tree)) == []
    if how == "missing":
        (tree / "bin/nvcc").unlink()
    elif how == "longer":
        (tree / "bin/nvcc").write_text("another nvcc")
    elif how == "added":
        (tree / "bin/extra").write_text("x")
    elif how == "relinked":
        (tree / "lib64/libcudart.so").unlink()
        (tree / "lib64/libcudart.so").symlink_to("libcheckpoint.so")
    else:
        (tree / "bedplate-manifest.json").write_text("[]")
    assert len(damage(str(tree))) == 1


# ---- names and links ----------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "local").mkdir()
    return Places(str(tmp_path / "opt"), str(tmp_path / "local"))


def build(places: Places, name: str = "13.0.1-abc", version: str = "13.0.1") -> str:
    prepare(places, name)
    folder = Path(places.toolkits) / f"{name}.build"
    write(folder / "site", FILES_13)
    lay_out(str(folder / "site"), str(folder / "cuda"), version)
    return publish(places, name)


def test_build_publish_switch_and_back(places: Places) -> None:
    first = build(places)
    assert switch(places, "13.0.1", first)
    second = build(places, "13.0.2-def", "13.0.2")
    assert os.readlink(places.path("13.0.1")) == first
    assert switch(places, "13.0.2", second)
    assert os.path.realpath(places.path("13.0.1")) == os.path.realpath(second)
    assert switch(places, "13.0.1", first)
    assert not switch(places, "13.0.1", first), "nothing to do the second time"
    found = survey(places, "13.0.1", "13.0.1-abc")
    assert (found["kind"], found["ready"], found["half_built"]) == ("ours", first, [])
    assert found["instances"] == {first: "13.0.1", second: "13.0.2"}


def test_a_damaged_toolkit_is_not_ready_and_its_successor_gets_another_name(places: Places) -> None:
    first = build(places)
    Path(first, "bin/nvcc").unlink()
    assert survey(places, "13.0.1", "13.0.1-abc")["ready"] == ""
    assert build(places) == f"{first}.2"
    assert survey(places, "13.0.1", "13.0.1-abc")["ready"] == f"{first}.2"
    assert not Path(first, "bin/nvcc").exists(), "nothing is repaired in place"


def test_what_an_interrupted_build_left_goes(places: Places) -> None:
    prepare(places, "13.0.1-abc")
    left = Path(places.toolkits, "13.0.1-abc.build")
    (left / "site").mkdir()
    assert prepare(places, "13.0.2-def", check=True) == [str(left)]
    assert left.exists()
    prepare(places, "13.0.2-def")
    assert not left.exists()


@pytest.mark.parametrize("what", ["directory", "link", "file"])
def test_what_others_made_is_refused_and_kept(places: Places, tmp_path: Path, what: str) -> None:
    target = build(places)
    path = Path(places.path("13.0.1"))
    if what == "directory":
        path.mkdir()
    elif what == "link":
        path.symlink_to(tmp_path)
    else:
        path.write_text("mine")
    with pytest.raises(StateError, match="Bedplate did not make"):
        switch(places, "13.0.1", target)
    assert not (path.is_symlink() and path.readlink() == Path(target))


def test_the_default_moves_by_a_rename_and_goes_away_again(places: Places) -> None:
    switch(places, "13.0.1", build(places))
    path = places.path("13.0.1")
    assert point(places, path, check=True) == ("", path)
    assert not os.path.lexists(places.default)
    assert point(places, path) == ("", path)
    assert os.readlink(places.default) == path
    assert point(places, path) == (path, path)
    assert point(places, "") == (path, "")
    assert not os.path.lexists(places.default)


@pytest.mark.parametrize("text", ["cuda-12.8", "./cuda-12.8/", "../local/cuda-12.8", "{prefix}/cuda-12.8/"])
def test_a_default_that_is_written_otherwise_is_pointed_back_at(places: Places, text: str) -> None:
    """`ln -s cuda-12.8 cuda` in /usr/local, is what administrators write; it names the same from anywhere."""
    switch(places, "13.0.1", build(places))
    other = os.path.join(places.prefix, "cuda-12.8")
    os.mkdir(other)
    os.symlink(text.format(prefix=places.prefix), places.default)
    assert survey(places, "13.0.1", "")["default_names"] == other
    assert point(places, other) == (other, other)
    assert point(places, places.path("13.0.1")) == (other, places.path("13.0.1"))
    assert point(places, other) == (places.path("13.0.1"), other)


def test_a_default_that_is_a_directory_is_refused_with_the_next_action(places: Places) -> None:
    switch(places, "13.0.1", build(places))
    os.mkdir(places.default)
    with pytest.raises(StateError, match=r"is a directory.*Move it away.*default: false"):
        point(places, places.path("13.0.1"))
    os.rmdir(places.default)
    with pytest.raises(StateError, match="is no toolkit"):
        point(places, places.path("12.8.1"))


@pytest.mark.skipif(shutil.which("update-alternatives") is None, reason="no update-alternatives on this machine")
def test_a_default_of_update_alternatives_is_moved_by_that_tool(places: Places, tmp_path: Path) -> None:
    command = ["update-alternatives", "--log", "/dev/null"]
    for option in ("altdir", "admindir"):
        (tmp_path / option).mkdir()
        command += [f"--{option}", str(tmp_path / option)]
    tool = Alternatives(command, str(tmp_path / "altdir"))
    other = tmp_path / "local" / "cuda-12.8"
    other.mkdir()
    subprocess.run([*command, "--install", places.default, "cuda", str(other), "128"], check=True, capture_output=True)
    switch(places, "13.0.1", build(places))
    path = places.path("13.0.1")
    assert survey(places, "13.0.1", "", tool)["default_kind"] == "alternatives"
    assert point(places, path, alternatives=tool) == (str(other), path)
    assert os.path.realpath(places.default) == os.path.realpath(path)
    # A package that registers itself later, with a higher priority, does not move what was set by hand.
    third = tmp_path / "local" / "cuda-13.9"
    third.mkdir()
    subprocess.run([*command, "--install", places.default, "cuda", str(third), "139"], check=True, capture_output=True)
    assert os.path.realpath(places.default) == os.path.realpath(path)
    assert point(places, str(other), alternatives=tool) == (path, str(other))


def test_prune_keeps_what_is_named(places: Places) -> None:
    first, second = build(places), build(places, "13.0.2-def", "13.0.2")
    third, fourth = build(places, "13.0.1-ghi"), build(places, "13.0.1-jkl")
    switch(places, "13.0.2", second)
    environment = Path(places.root, "generations", "one", "environment")
    environment.parent.mkdir(parents=True)
    environment.write_text(f'CUDA_HOME="{first}"\n')
    assert prune(places, [third], check=True) == [fourth]
    assert prune(places, [third]) == [fourth]
    assert sorted(survey(places, "13.0.1", "")["instances"]) == sorted([first, second, third])


# ---- the module ---------------------------------------------------------------------------------------------------

LOCK = """# nvidia_cuda_nvcc-13.0.88-py3-none-any.whl 10
nvidia-cuda-nvcc==13.0.88 \\
    --hash=sha256:{a}
# nvidia_cuda_runtime-13.0.88-py3-none-any.whl 20
nvidia-cuda-runtime==13.0.88 \\
    --hash=sha256:{b}
""".format(a="a" * 64, b="b" * 64)


def test_module_through_a_whole_change(run_module: RunModule, places: Places) -> None:
    def call(action: str, check: bool = False, **options: Any) -> dict[str, Any]:
        given = {"action": action, "version": "13.0.1", "root": places.root, "prefix": places.prefix, **options}
        result = run_module("bedplate_toolkit", check=check, diff=True, **given)
        assert not result.get("failed"), result
        return result

    found = call("read", lock=LOCK, components=["cudart"])
    assert found["wanted"]["files"] == ["nvidia_cuda_runtime-13.0.88-py3-none-any.whl"]
    assert (found["wanted"]["bytes"], found["compiler"], found["changed"]) == (20, False, False)
    name = call("read", lock=LOCK)["wanted"]["id"]
    assert name != found["wanted"]["id"]
    assert call("prepare", id=name, check=True)["changed"]
    assert not os.path.exists(places.toolkits)
    call("prepare", id=name)
    write(Path(places.toolkits, f"{name}.build", "site"), FILES_13)
    assert call("layout", id=name, check=True)["made"] == {}
    assert call("layout", id=name)["made"]["components"] == {"cudart": "13.0.88", "nvcc": "13.0.88"}
    assert call("publish", id=name, check=True)["changed"]
    published = call("publish", id=name)
    assert published["diff"] == {"before": "", "after": f"{places.path('13.0.1')} -> {published['instance']}\n"}
    assert call("read", lock=LOCK)["toolkit"]["ready"] == published["instance"]
    assert call("switch", target=published["instance"])["changed"] is False
    assert call("point", target=places.path("13.0.1"))["changed"]
    assert call("prune")["removed"] == []


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"action": "read", "version": "thirteen"}, "invalid", "no release such as 13.0.1"),
        ({"action": "read", "version": "13.0.1", "lock": "junk"}, "invalid", "no entry of a toolkit's lock"),
        ({"action": "read", "version": "13.0.1", "lock": LOCK, "components": ["cublas"]}, "invalid", "bring no cublas"),
        ({"action": "read", "version": "13.0.9", "packages": True}, "invalid", "not one of the releases"),
        ({"action": "prepare", "version": "13.0.1", "id": "../x"}, "invalid", "no id of a toolkit"),
        ({"action": "publish", "version": "13.0.1", "id": "13.0.1-abc"}, "missing", "nothing was built"),
    ],
)
def test_module_refusals(run_module: RunModule, places: Places, options: dict[str, Any], error: str, says: str) -> None:
    result = run_module("bedplate_toolkit", root=places.root, prefix=places.prefix, **options)
    assert result["failed"]
    assert result["error"] == error
    assert says in result["msg"]


def test_read_names_the_packages_of_a_release(places: Places) -> None:
    options = {"action": "read", "version": "13.0.1", "lock": "", "components": ["nvcc"], "packages": True, "id": "",
               "target": "", "keep": []}  # fmt: skip
    found = perform(places, options)["packages"]
    assert found["cuda-nvcc-13-0"] == "13.0.88"
    assert {"cuda-cudart-dev-13-0", "libnvvm-13-0", "cuda-crt-13-0"} <= set(found)
    assert not any(name.startswith(("cuda-toolkit-13-0=", "cuda-13", "cuda-runtime", "cuda-drivers")) for name in found)
