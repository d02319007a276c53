"""All three layers of a profile on one node: forward, nothing to do, the automatic way back, on demand, interrupted.

Driver: a signed stand-in of NVIDIA's repository (tests/aptrepo) with modules that DKMS really builds; a boot of the
container plays the loading of the module. Toolkit: the real one, from wheels, as far as compiling needs it. Stack: the
tiny one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_toolkit import COMPILER, RUNTIME, failing, toolkit_wheels, with_blocks  # noqa: F401 (a fixture)
from testbed import ROOT, Node, Play, make_nodes, run

# Real: 100 MB of wheels, and minutes.
pytestmark = [pytest.mark.node, pytest.mark.real]

OLD = {"driver": "575.57.08", "toolkit": "12.8.1", "stack": "low"}
NEW = {"driver": "580.82.07", "toolkit": "13.0.1", "stack": "high"}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory, tiny: Path, toolkit_wheels: Path) -> Path:  # noqa: F811
    folder = tmp_path_factory.mktemp("work") / "profiles"
    old = {"version": "12.8.1", "components": RUNTIME}
    new = {"version": "13.0.1", "components": COMPILER, "default": True}
    for name, base, driver, toolkit in (
        ("low", "tiny-good", "575.57.08", old),
        ("high", "tiny-next", "580.82.07", new),
        ("bad", "tiny-wrongsum", "580.82.07", new),
    ):
        blocks = {"toolkit": toolkit, "driver": {"version": driver, "flavour": "open"}}
        with_blocks(folder, name, tiny / "profiles" / base, blocks, toolkit_wheels)
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("aptrepo") / "repository"
    run(sys.executable, ROOT / "tests" / "aptrepo" / "build.py", out)
    return out


@pytest.fixture(scope="module")
def gpu_node(
    tmp_path_factory: pytest.TempPathFactory,
    toolkit_wheels: Path,  # noqa: F811
    profiles: Path,
    repository: Path,
) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("inventory")
    for nodes in make_nodes(folder, "bedplate-layers", 1, toolkit_wheels, profiles, kind="driver"):
        node = nodes[0]
        run(sys.executable, ROOT / "tests" / "aptrepo" / "onto_node.py", repository, node.name)
        yield node


def settings(repository: Path) -> dict[str, Any]:
    """What the inventory of such a node says."""
    return {
        "bedplate_driver_source": "nvidia",
        "bedplate_toolkit_source": "wheels",
        "bedplate_sysroot": "/opt/simulated",
        "nvidia_driver_repository": "http://127.0.0.1:8099",
        "nvidia_driver_key_fingerprint": (repository / "fingerprint").read_text().strip(),
        "nvidia_driver_reboot": True,
        "nvidia_driver_boot_time_command": "stat -c %Z /proc/1",
    }


@pytest.fixture
def site(gpu_node: Node, repository: Path) -> Any:
    """Run site.yml with those settings."""

    def play(profile: str, *arguments: str, **variables: Any) -> Play:
        return gpu_node.play("site.yml", profile, *arguments, **{**settings(repository), **variables})

    return play


def boots(node: Node) -> int:
    """Return how often the node has been rebooted: podman counts the restarts of its container."""
    text = subprocess.run(
        ["podman", "inspect", "--format", "{{.RestartCount}}", node.name], capture_output=True, text=True, check=True
    ).stdout
    return int(text)


def reboot(node: Node) -> None:
    before = boots(node)
    node.sh("systemctl reboot", check=False)
    for _ in range(120):
        if boots(node) > before and node.sh("systemctl is-active simulated-nvidia aptrepo", check=False).count("\n"):
            return
        time.sleep(0.5)
    pytest.fail("the node did not come back")


def journal(node: Node) -> dict[str, str]:
    """Return the version of each layer as the journal says."""
    state = node.state()
    assert state["intent"] is None
    found = {layer: entry["is"]["version"] for layer, entry in state["layers"].items()}
    assert all(entry["to"] is None for entry in state["layers"].values())
    return {**found, "stack": state["generations"][state["active"]]["profile"]}


def shown(node: Node) -> dict[str, str]:
    """Return the same as the node itself shows: loaded module, what the toolkit says, the link."""
    loaded = node.sh("cat /opt/simulated/sys/module/nvidia/version")
    installed = node.sh("dpkg-query -W -f '${Version}' nvidia-kernel-open-dkms")
    assert installed.startswith(f"{loaded}-"), "loaded is not what is installed"
    path = node.state()["layers"]["toolkit"]["is"]["path"]
    version = json.loads(node.sh(f"cat {path}/version.json"))["cuda"]["version"]
    return {"driver": loaded, "toolkit": version, "stack": node.state()["generations"][node.current()]["profile"]}


def recap(play: Play) -> dict[str, int]:
    line = play.output[play.output.rindex("PLAY RECAP") :].splitlines()[1]
    return {key: int(value) for key, value in (word.split("=") for word in line.partition(":")[2].split())}


def test_the_whole_story(gpu_node: Node, site: Any, repository: Path) -> None:
    node = gpu_node
    plan = site("low", "--check", "--diff")
    assert plan.code == 0, plan.output
    assert "575.57.08-1" in plan.output or "575.57.08" in plan.output
    assert node.sh("dpkg-query -W 'nvidia-*' 2>/dev/null | wc -l") == "0", "check mode installed something"
    assert node.sh("ls -d /opt/bedplate /etc/apt/preferences.d/bedplate* 2>/dev/null || true") == ""

    first = site("low")
    assert first.code == 0, first.output
    assert journal(node) == shown(node) == OLD

    again = site("low")
    assert again.code == 0, again.output
    assert recap(again)["changed"] == 0
    assert recap(again)["ok"] <= 13, again.output

    moved = site("high")
    assert moved.code == 0, moved.output
    assert journal(node) == shown(node) == NEW
    assert node.sh("readlink /usr/local/cuda") == "/usr/local/cuda-13.0"

    back = node.play("rollback.yml", "low", **settings(repository))
    assert back.code == 0, back.output
    assert journal(node) == shown(node) == OLD


def test_a_stack_that_fails_takes_all_layers_back_with_one_reboot(gpu_node: Node, site: Any) -> None:
    node = gpu_node
    assert journal(node) == OLD
    before = boots(node)
    failed = site("bad")
    assert failed.code != 0
    assert node.state()["runs"][-1]["result"] == "failed"
    assert set(failing(node)) == {"collective.wrong_value"}
    assert boots(node) - before == 2, "one reboot there, one back"
    assert journal(node) == shown(node) == OLD
    assert "The node is on low-" in failed.output


def test_a_reboot_that_is_not_allowed_stops_the_run_and_nothing_goes_back(gpu_node: Node, site: Any) -> None:
    node = gpu_node
    stopped = site("high", nvidia_driver_reboot=False)
    assert stopped.code != 0
    assert "reboot" in stopped.output.lower()
    state = node.state()
    assert state["intent"] is None
    assert state["layers"]["driver"]["to"]["version"] == "580.82.07"
    assert node.statuses()["low"] == "verified"
    assert state["generations"][node.current()]["profile"] == "low"
    reboot(node)
    done = site("high", nvidia_driver_reboot=False)
    assert done.code == 0, done.output
    assert journal(node) == shown(node) == NEW


def test_one_layer_alone(gpu_node: Node, site: Any) -> None:
    node = gpu_node
    generation = node.current()
    one = site("low", "--tags", "driver", nvidia_driver_allow_downgrade=True)
    assert one.code == 0, one.output
    assert journal(node) == {**NEW, "driver": "575.57.08"}
    assert node.current() == generation
    other = site("high", bedplate_layers=["driver"])
    assert other.code == 0, other.output
    assert journal(node) == shown(node) == NEW


def test_a_driver_change_that_was_killed_is_settled_by_the_next_run(
    gpu_node: Node, site: Any, repository: Path
) -> None:
    node = gpu_node
    task = "Install exactly these packages in one transaction"
    older = {**settings(repository), "nvidia_driver_allow_downgrade": True}
    node.interrupt("low", task, signal.SIGKILL, 2.0, **older)
    assert node.state()["layers"]["driver"]["to"]["version"] == "575.57.08"
    next_run = site("high")
    assert next_run.code == 0, next_run.output
    assert node.sh("dpkg --audit") == ""
    assert journal(node) == shown(node) == NEW
