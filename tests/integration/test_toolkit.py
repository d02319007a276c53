"""The real CUDA toolkit, from wheels, on a real node: side by side, proved, pointed at, taken back.

Of the toolkit only what compiling needs is taken (104 MB of wheels), beside the tiny stack.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed import ROOT, Node, Play, make_nodes, run, wheel_cache

from bedplate.node.abi.elf import ElfFile
from bedplate.node.toolkit.fatbin import cubins
from bedplate.node.toolkit.wheels import select

# Real: 100 MB of wheels, and minutes.
pytestmark = [pytest.mark.node, pytest.mark.real]

SMALL = {"bedplate_collective_max_bytes": 1048576}
COMPILER = ["nvcc"]
RUNTIME = ["cudart", "nvrtc"]
PATH = "/usr/local/cuda-13.0"
PROGRAM = r"""
#include <cstdio>
__global__ void bedplate_mark(int *p) { *p = 1; }
int main() { int v = 0; cudaRuntimeGetVersion(&v); bedplate_mark<<<1, 1>>>(nullptr); printf("%d", v); }
"""


def of_cuda_13(wheel: Path, folder: Path) -> None:
    """Copy a tiny wheel; torch says there that it was built with CUDA 13.0, as the toolkit is."""
    if not wheel.name.startswith("torch-"):
        shutil.copy(wheel, folder)
        return
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(folder / wheel.name, "w") as new:
        (record,) = (name for name in old.namelist() if name.endswith("/RECORD"))
        version = old.read("torch/version.py").replace(b'cuda = "12.8"', b'cuda = "13.0"')
        digest = base64.urlsafe_b64encode(hashlib.sha256(version).digest()).rstrip(b"=").decode()
        lines = [line for line in old.read(record).decode().splitlines() if not line.startswith("torch/version.py,")]
        for info in old.infolist():
            content = {"torch/version.py": version}.get(info.filename, old.read(info))
            if info.filename == record:
                content = "\n".join([f"torch/version.py,sha256={digest},{len(version)}", *lines, ""]).encode()
            new.writestr(info, content)


def with_blocks(profiles: Path, name: str, base: Path, blocks: dict[str, Any], wheels: Path) -> None:
    """Make a profile of another one, with more blocks, and lock it."""
    (profiles / name).mkdir(parents=True)
    # Time enough for the collective: this is not about how fast the machine is.
    text = (base / "profile.yml").read_text().replace("timeout_s: 10\n", "timeout_s: 90\n")
    more = "".join(f"{key}: {json.dumps(block)}\n" for key, block in blocks.items())
    (profiles / name / "profile.yml").write_text(f"{text}\n{more}")
    run("bedplate", "lock", name, "--profiles", profiles, "--no-index", "--find-links", wheels)


@pytest.fixture(scope="module")
def toolkit_wheels(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The tiny wheels, for CUDA 13, and those of the toolkits, fetched once into the cache."""
    folder = tmp_path_factory.mktemp("wheels")
    for wheel in (tiny / "wheels").glob("*.whl"):
        of_cuda_13(wheel, folder)
    for version, components in (("13.0.1", COMPILER), ("13.0.2", COMPILER), ("12.8.1", RUNTIME)):
        script = ROOT / "scripts" / "toolkit_wheels.py"
        run(sys.executable, script, "fetch", version, "--to", wheel_cache(), "--components", *components)
        text = (ROOT / "roles" / "cuda_toolkit" / "files" / f"toolkit-{version}-x86_64.lock").read_text()
        for name in select(text, version, components)["files"]:
            shutil.copy(wheel_cache() / name, folder)
    return folder


@pytest.fixture(scope="module")
def toolkit_profiles(tmp_path_factory: pytest.TempPathFactory, tiny: Path, toolkit_wheels: Path) -> Path:
    profiles = tmp_path_factory.mktemp("work") / "profiles"
    new = {"version": "13.0.1", "default": True, "components": COMPILER}
    old = {"version": "12.8.1", "default": False, "components": RUNTIME}
    for name, base, block in (
        ("tk-130-1", "tiny-good", new),
        ("tk-130-2", "tiny-next", {**new, "version": "13.0.2"}),
        ("tk-128", "tiny-good", old),
        ("tk-128-nvcc", "tiny-good", {**old, "components": COMPILER}),
        ("tk-wrongsum", "tiny-wrongsum", {**new, "version": "13.0.2"}),
    ):
        with_blocks(profiles, name, tiny / "profiles" / base, {"toolkit": block}, toolkit_wheels)
    return profiles


@pytest.fixture(scope="module")
def toolkit_node(
    tmp_path_factory: pytest.TempPathFactory, toolkit_wheels: Path, toolkit_profiles: Path
) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("inventory")
    for nodes in make_nodes(folder, "bedplate-toolkit", 1, toolkit_wheels, toolkit_profiles):
        yield nodes[0]


@pytest.fixture
def node(toolkit_node: Node) -> Node:
    """The node without a toolkit, a stack or a journal."""
    toolkit_node.wipe()
    toolkit_node.sh("rm -rf /usr/local/cuda /usr/local/cuda-* /usr/local/cuda.old")
    return toolkit_node


def provision(node: Node, profile: str, *arguments: str, whole: bool = False, **variables: Any) -> Play:
    """Change the toolkit, and the stack as well when asked: that takes most of the time."""
    given = {"bedplate_toolkit_source": "wheels", **SMALL, **variables}
    return node.play("site.yml", profile, *([] if whole else ["--tags", "toolkit"]), *arguments, **given)


def compile_program(node: Node, path: str, out: str, *options: str) -> str:
    """Compile as an unprivileged user does, run it, and return what it prints."""
    node.sh(f"rm -rf {out}; install -d -o nobody {out}")
    source = PROGRAM.replace("'", "'\\''")
    node.sh(f"printf '%s' '{source}' > {out}/p.cu")
    nvcc = f"{path}/bin/nvcc -arch=sm_120 {' '.join(options)} -o {out}/p {out}/p.cu"
    return node.sh(f"runuser -u nobody -- sh -c 'cd {out} && TMPDIR={out} {nvcc}' && {out}/p")


def layer(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = node.state()["layers"]["toolkit"]
    return found


def failing(node: Node, status: str = "fail") -> list[str]:
    return [v["code"] for v in node.state()["runs"][-1]["verdicts"] if v["status"] == status]


def test_provision_compile_beside_and_back(node: Node) -> None:
    """One story, in order: bare, the compiler, nothing to do, a second toolkit beside, the next release, back."""
    check = provision(node, "tk-130-1", "--check")
    assert "13.0.1" in check.output
    assert "no reboot" in check.output
    assert node.sh("ls -d /usr/local/cuda* /opt/bedplate 2>/dev/null || true") == ""

    first = provision(node, "tk-130-1", whole=True)
    assert first.code == 0, first.output
    assert node.sh("readlink /usr/local/cuda") == PATH
    instance = node.sh(f"readlink {PATH}")
    assert instance.startswith("/opt/bedplate/toolkits/13.0.1-")
    assert layer(node)["is"]["instance"] == instance
    assert layer(node)["to"] is None
    assert "V13.0.88" in node.sh(f"{PATH}/bin/nvcc --version")
    assert compile_program(node, PATH, "/tmp/one") == "13000"
    assert compile_program(node, PATH, "/tmp/shared", "-cudart", "shared", f"-Xlinker -rpath={PATH}/lib64") == "13000"
    subprocess.run(["podman", "cp", f"{node.name}:/tmp/one/p", "/tmp/bedplate-toolkit-p"], check=True)
    assert architectures(Path("/tmp/bedplate-toolkit-p"), b"bedplate_mark") == {120}
    environment = node.sh("cat /opt/bedplate/current/environment")
    assert f'CUDA_HOME="{instance}"' in environment
    assert node.sh(". /opt/bedplate/current/env.sh && command -v nvcc") == f"{instance}/bin/nvcc"
    assert "LD_LIBRARY_PATH" not in environment

    again = provision(node, "tk-130-1", whole=True)
    assert again.code == 0, again.output
    assert "changed=0" in again.output[again.output.index("PLAY RECAP") :]

    beside = provision(node, "tk-128")
    assert beside.code == 0, beside.output
    assert node.sh("readlink /usr/local/cuda") == PATH, "the default moved although the profile does not say so"
    assert node.sh("readlink /usr/local/cuda-12.8").startswith("/opt/bedplate/toolkits/12.8.1-")
    assert compile_program(node, PATH, "/tmp/two") == "13000"
    assert layer(node)["is"]["home"] == "", "there is no compiler in it"

    newer = provision(node, "tk-130-2", whole=True)
    assert newer.code == 0, newer.output
    assert node.sh(f"readlink {PATH}").startswith("/opt/bedplate/toolkits/13.0.2-")
    assert json.loads(node.sh(f"cat {PATH}/version.json"))["cuda_cudart"]["version"] == "13.0.96"
    assert node.sh(f"ls {instance}/bin/nvcc"), "the older toolkit is gone"

    node.sh("mv /opt/bedplate/cache /root/")  # a rollback needs no wheels
    back = node.play(
        "rollback.yml", "tk-130-1", bedplate_toolkit_source="wheels", bedplate_rollback_to="tk-130-1", **SMALL
    )
    node.sh("mv /root/cache /opt/bedplate/")
    assert back.code == 0, back.output
    assert node.sh(f"readlink {PATH}") == instance
    assert f'CUDA_HOME="{instance}"' in node.sh("cat /opt/bedplate/current/environment")


def architectures(program: Path, marker: bytes) -> set[int]:
    """Return the architectures for which a program has machine code, read without NVIDIA's tools."""
    return cubins(ElfFile.open(str(program)), marker)


def test_a_stack_that_fails_takes_the_toolkit_back(node: Node) -> None:
    first = provision(node, "tk-130-1", whole=True)
    assert first.code == 0, first.output
    instance = node.sh(f"readlink {PATH}")
    failed = provision(node, "tk-wrongsum", whole=True)
    assert failed.code != 0
    assert set(failing(node)) == {"collective.wrong_value"}
    assert node.sh(f"readlink {PATH}") == instance
    assert node.sh("readlink /usr/local/cuda") == PATH
    assert layer(node)["is"]["version"] == "13.0.1"
    assert layer(node)["to"] is None
    assert node.statuses()["tk-130-1"] == "verified"


def test_a_directory_in_the_way_is_refused_and_kept(node: Node) -> None:
    node.sh("mkdir -p /usr/local/cuda && touch /usr/local/cuda/mine")
    play = provision(node, "tk-130-1")
    assert play.code != 0
    assert "/usr/local/cuda is a directory" in play.output
    assert "/usr/local/cuda.old" in play.output
    assert node.sh("ls /usr/local/cuda") == "mine"
    node.sh(f"rm -rf /usr/local/cuda; mkdir -p {PATH}/bin; touch {PATH}/bin/mine")
    play = provision(node, "tk-130-1")
    assert play.code != 0
    assert f"{PATH} is a directory that Bedplate did not make" in play.output
    assert node.sh(f"ls {PATH}/bin") == "mine"


def test_a_compiler_that_nvcc_does_not_take_is_refused(node: Node) -> None:
    node.sh("printf '#!/bin/sh\\ncase $1 in -print*) echo /usr/bin/true;; *) echo 99.1.0;; esac' > /usr/local/bin/gcc")
    node.sh("chmod 755 /usr/local/bin/gcc")
    try:
        play = provision(node, "tk-130-1")
    finally:
        node.sh("rm /usr/local/bin/gcc")
    assert play.code != 0
    assert "is gcc 99.1.0; nvcc of CUDA 13.0 takes gcc 6 to 15" in play.output
    assert node.sh("ls -d /usr/local/cuda* 2>/dev/null || true") == "", "a link moved before the proof"


@pytest.mark.parametrize("fault", ["truncated", "changed", "absent"])
def test_wheels_that_are_not_the_locked_ones(node: Node, toolkit_wheels: Path, fault: str) -> None:
    (wheel,) = toolkit_wheels.glob("nvidia_cuda_crt-13.0.88-*.whl")
    kept = wheel.with_suffix(".kept")
    wheel.rename(kept)
    try:
        if fault == "truncated":
            wheel.write_bytes(kept.read_bytes()[:-1000])
        elif fault == "changed":
            shutil.copy(kept, wheel)
            with zipfile.ZipFile(wheel, "a") as archive:
                archive.comment = b"changed after it was locked"
        play = provision(node, "tk-130-1")
    finally:
        wheel.unlink(missing_ok=True)
        kept.rename(wheel)
    assert play.code != 0
    assert "uv could not unpack the locked wheels of CUDA 13.0.1" in play.output
    assert "nvidia" in play.output
    assert node.sh("ls -d /usr/local/cuda* 2>/dev/null || true") == ""


def test_wheels_without_a_compiler_are_refused_by_name(node: Node) -> None:
    play = provision(node, "tk-128-nvcc")
    assert play.code != 0
    assert "the wheels of CUDA 12.8.1 bring no nvcc" in play.output


def test_a_toolkit_that_was_changed_in_place_is_built_again_beside(node: Node) -> None:
    first = provision(node, "tk-130-1")
    assert first.code == 0, first.output
    instance = node.sh(f"readlink {PATH}")
    node.sh(f"rm {instance}/bin/ptxas")
    again = provision(node, "tk-130-1", bedplate_force=True)
    assert again.code == 0, again.output
    assert node.sh(f"readlink {PATH}") == f"{instance}.2"
    assert node.sh(f"ls {instance}/bin/ptxas || true") == "", "what is live was repaired in place"
    assert compile_program(node, PATH, "/tmp/three") == "13000"


@pytest.mark.real
def test_the_whole_toolkit(node: Node, toolkit_wheels: Path, toolkit_profiles: Path, tiny: Path) -> None:
    """All 25 wheels of 13.0.1: 1.5 GB to fetch, 2.4 GB on the node."""
    script = ROOT / "scripts" / "toolkit_wheels.py"
    run(sys.executable, script, "fetch", "13.0.1", "--to", toolkit_wheels)
    with_blocks(
        toolkit_profiles,
        "tk-all",
        tiny / "profiles" / "tiny-good",
        {"toolkit": {"version": "13.0.1", "default": True}},
        toolkit_wheels,
    )
    play = provision(node, "tk-all")
    assert play.code == 0, play.output
    assert int(node.sh(f"du -sm $(readlink {PATH})").split()[0]) > 2000
    versions = json.loads(node.sh(f"cat {PATH}/version.json"))
    assert versions["libcublas"]["version"] == "13.0.2.14"
    options = ["-cudart", "shared", f"-Xlinker -rpath={PATH}/lib64", "-lcublas", "-lcufft", "-lcusolver", "-lcusparse"]
    assert compile_program(node, PATH, "/tmp/all", *options, "-lcurand", "-lnvrtc", "-lnvJitLink") == "13000"
