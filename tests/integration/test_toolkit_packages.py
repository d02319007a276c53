"""The toolkit as packages of NVIDIA's repository: exact leaves, from one release to the next and back by apt.

The repository is a signed stand-in with NVIDIA's names, versions and relations; what compiling needs is really in its
packages, taken from NVIDIA's wheels (tests/aptrepo/real_toolkit.py). The stack is not the subject here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_toolkit import COMPILER, architectures, compile_program, failing, layer, toolkit_wheels, with_blocks  # noqa: F401 (a fixture)
from testbed import ROOT, Node, Play, make_nodes, run

# Real: 100 MB of wheels, and minutes.
pytestmark = [pytest.mark.node, pytest.mark.real]

PATH = "/usr/local/cuda-13.0"
OLD, NEW = "13.0.88-1", "13.0.96-1"  # cudart's, of 13.0.1 and 13.0.2

SHARED = {"cuda-toolkit-13-config-common", "cuda-toolkit-config-common"}
HOOK = "/etc/apt/apt.conf.d/99loses-a-file"
LOSES_A_FILE = (
    f'DPkg::Post-Invoke {{ "! dpkg-query -W cuda-cudart-13-0 | grep -qF {NEW}'
    f' || rm -f {PATH}/targets/x86_64-linux/lib/libcudart_static.a"; }};'
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, toolkit_wheels: Path) -> Path:  # noqa: F811
    out = tmp_path_factory.mktemp("aptrepo") / "repository"
    run(sys.executable, ROOT / "tests" / "aptrepo" / "real_toolkit.py", out, toolkit_wheels)
    return out


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory,
    tiny: Path,
    toolkit_wheels: Path,  # noqa: F811
    repository: Path,
) -> Iterator[Node]:
    """A node that serves itself the repository."""
    profiles = tmp_path_factory.mktemp("work") / "profiles"
    for name, version in (("apt-130-1", "13.0.1"), ("apt-130-2", "13.0.2")):
        block = {"version": version, "default": True, "components": COMPILER}
        with_blocks(profiles, name, tiny / "profiles" / "tiny-good", {"toolkit": block}, toolkit_wheels)
    folder = tmp_path_factory.mktemp("inventory")
    for nodes in make_nodes(folder, "bedplate-toolkit-apt", 1, toolkit_wheels, profiles):
        run(sys.executable, ROOT / "tests" / "aptrepo" / "onto_node.py", repository, nodes[0].name)
        yield nodes[0]


def provision(node: Node, repository: Path, profile: str, *arguments: str, **variables: Any) -> Play:
    given = {
        "bedplate_toolkit_source": "nvidia",
        "cuda_toolkit_repository": "http://127.0.0.1:8099",
        "cuda_toolkit_key_fingerprint": (repository / "fingerprint").read_text().strip(),
        **variables,
    }
    return node.play("site.yml", profile, "--tags", "toolkit", *arguments, **given)


def installed(node: Node) -> dict[str, str]:
    """Return the versions of the toolkit's packages."""
    lines = node.sh(
        "dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\\n' 'cuda-*' 'libnv*' 2>/dev/null || true"
    )
    words = [line.split() for line in lines.splitlines()]
    return {name: version for status, name, version in (w for w in words if len(w) == 3) if status == "installed"}


def test_exact_packages_from_one_release_to_the_next_and_back(node: Node, repository: Path, tmp_path: Path) -> None:
    check = provision(node, repository, "apt-130-1", "--check")
    assert check.code == 0, check.output
    assert "cuda-cudart-13-0 13.0.88" in check.output
    assert installed(node) == {}

    first = provision(node, repository, "apt-130-1")
    assert first.code == 0, first.output
    old = installed(node)
    assert {old["cuda-cudart-13-0"], old["cuda-cudart-dev-13-0"], old["cuda-toolkit-13-0-config-common"]} == {OLD}
    assert "cuda-toolkit-13-0" not in old, "a meta package"
    assert layer(node)["is"]["packages"].items() <= old.items()
    assert compile_program(node, PATH, "/tmp/one") == "13000"
    run("podman", "cp", f"{node.name}:/tmp/one/p", tmp_path / "p")
    assert architectures(tmp_path / "p", b"bedplate_mark") == {120}
    assert node.sh("readlink -f /usr/local/cuda") == PATH

    again = provision(node, repository, "apt-130-1")
    assert again.code == 0, again.output
    assert "changed=0" in again.output[again.output.index("PLAY RECAP") :]

    # The repository has 13.0.2, and nothing that asks for it by hand gets past the pin.
    assert f"Candidate: {OLD}" in node.sh("apt-cache policy cuda-cudart-13-0")
    moved = [line.split()[1] for line in node.sh("apt-get -s dist-upgrade").splitlines() if line.startswith("Inst ")]
    assert {name for name in moved if "-13-0" in name} == set(), "what several toolkits share is not one's to pin"
    node.sh("apt-get -s install cuda-toolkit-13-0 >/tmp/meta 2>&1; test $? -eq 100")
    assert "unmet dependencies" in node.sh("cat /tmp/meta")

    # A release that lacks a file fails its proof: apt takes the packages back, pins and all.
    node.sh(f"echo '{LOSES_A_FILE}' > {HOOK}")
    failed = provision(node, repository, "apt-130-2")
    node.sh(f"rm {HOOK}")
    assert failed.code != 0
    assert failing(node) == ["toolkit.layout"]
    assert installed(node) == old
    assert layer(node)["is"]["version"] == "13.0.1"
    assert layer(node)["to"] is None
    assert f"Candidate: {OLD}" in node.sh("apt-cache policy cuda-cudart-13-0")

    newer = provision(node, repository, "apt-130-2")
    assert newer.code == 0, newer.output
    new = installed(node)
    moved = {"cuda-cudart-13-0", "cuda-cudart-dev-13-0", "cuda-driver-dev-13-0", "cuda-toolkit-13-0-config-common"}
    assert {name for name in new if new[name] != old[name]} == moved | SHARED
    assert new["cuda-cudart-13-0"] == NEW
    assert compile_program(node, PATH, "/tmp/two") == "13000"

    refused = provision(node, repository, "apt-130-1")
    assert refused.code != 0
    assert "packages.downgrade" in failing(node)
    assert installed(node) == new

    back = provision(node, repository, "apt-130-1", cuda_toolkit_allow_downgrade=True)
    assert back.code == 0, back.output
    # What several toolkits share stays the newer one.
    assert {name for name, version in installed(node).items() if version != old[name]} == SHARED
    assert compile_program(node, PATH, "/tmp/three") == "13000"
    assert node.sh("readlink -f /usr/local/cuda") == PATH
