"""All three layers of a profile on one node: forward, nothing to do, the automatic way back, on demand, interrupted.

Driver: a signed stand-in of NVIDIA's repository (tests/aptrepo) with modules that DKMS really builds; a boot of the
container plays the loading of the module. Toolkit: the real one, from wheels, as far as compiling needs it. Stack: the
tiny one.
"""

from __future__ import annotations

import json
import re
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
KERNEL_BEFORE = "5.0.0-1-amd64"


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
        # Most hosts keep the kernel before, to fall back on; DKMS by itself builds for the newest.
        node.sh(
            f"kernel=$(ls /lib/modules) && cp -a /lib/modules/$kernel /lib/modules/{KERNEL_BEFORE}"
            f" && cp -a /boot/vmlinuz-$kernel /boot/vmlinuz-{KERNEL_BEFORE}"
        )
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


def everything(node: Node) -> str:
    """Return name, kind, size, mode and time of every file but logs, Ansible's own and apt's cache."""
    left_out = "/proc /sys /dev /run /tmp /var/tmp /var/log /opt/simulated /home/ops /var/cache/apt"
    prune = " -o ".join(f"-path '{path}'" for path in left_out.split())
    return node.sh(f"find / -xdev \\( {prune} \\) -prune -o -printf '%p %y %s %m %T@ %l\\n' 2>/dev/null | sort")


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
    before = everything(node)
    plan = site("low", "--check", "--diff")
    assert plan.code == 0, plan.output
    assert everything(node) == before, "check mode changed something"
    words = re.sub(r"\s+", " ", plan.output)  # Ansible breaks the lines of long texts
    assert re.search(r"driver none -> 575\.57\.08 \(open, from nvidia\)\. 11 packages: 11 to install; ", words)
    assert re.search(r"[1-9][0-9.]* kB to download, \+[1-9][0-9.]* kB on disk\. A reboot is needed", words)
    assert "install nvidia-kernel-open-dkms 575.57.08-1" in words
    assert re.search(r"CUDA 12\.8\.1 at /usr/local/cuda-12\.8: 2 wheels, [0-9.]+ MB, from directory", words)
    assert re.search(r"2 packages for cp3\d+-x86_64, [0-9.]+ KB of wheels", words)

    # Nothing has loaded the new module yet, and nothing may: that is no failure, and nothing is taken back.
    waiting = site("low", nvidia_driver_reboot=False)
    assert waiting.code != 0
    assert set(failing(node, "needs-reboot")) == {"driver.module_not_loaded", "gpu.nvml_error"}
    assert failing(node) == []
    assert "Nothing went back, since nothing is broken" in waiting.output
    assert node.state()["layers"]["driver"]["to"]["version"] == "575.57.08"
    assert node.sh("dpkg-query -W -f '${db:Status-Status}' nvidia-kernel-open-dkms") == "installed"

    first = site("low")
    assert first.code == 0, first.output
    assert journal(node) == shown(node) == OLD
    built = node.sh("dkms status").splitlines()
    assert [line.endswith(": installed") for line in built] == [True, True]
    assert built[0].startswith(f"nvidia/575.57.08, {KERNEL_BEFORE}, ")

    again = site("low")
    assert again.code == 0, again.output
    assert recap(again)["changed"] == 0
    assert recap(again)["ok"] <= 13, again.output

    plan = site("high", "--check", "--diff")
    assert plan.code == 0, plan.output
    words = re.sub(r"\s+", " ", plan.output)
    assert "driver 575.57.08 -> 580.82.07 (open, from nvidia)" in words
    assert "upgrade nvidia-kernel-open-dkms 575.57.08-1 580.82.07-1" in words
    assert re.search(r"CUDA 13\.0\.1 at /usr/local/cuda-13\.0: [0-9]+ wheels, .* /usr/local/cuda will name it", words)
    assert journal(node) == shown(node) == OLD

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


def test_a_gpu_that_is_lost_takes_no_driver_back(gpu_node: Node, site: Any, repository: Path) -> None:
    """It is gone for the driver that was there as well: the node stays, and says what is not proved."""
    node = gpu_node
    assert journal(node) == shown(node) == OLD
    before, generation = boots(node), node.current()
    node.sh("echo GPUS=7 >/etc/simulated-nvidia")  # from the next boot on
    lost = site("high")
    assert lost.code != 0
    assert set(failing(node)) == {"gpu.count", "gpu.pci_count"}
    assert "Nothing went back, since going back cures no hardware. The node is on low-" in lost.output
    assert boots(node) - before == 1
    state = node.state()
    assert state["intent"] is None
    assert (state["runs"][-1]["result"], node.current(), node.statuses()["low"]) == ("failed", generation, "verified")
    driver = state["layers"]["driver"]
    assert (driver["is"]["version"], driver["to"]["version"]) == ("575.57.08", "580.82.07")
    assert node.sh("cat /opt/simulated/sys/module/nvidia/version") == "580.82.07"

    # On demand it does go back, judged by what the older profile expects; that fails by name, and is no success.
    asked = node.play("rollback.yml", "low", **{**settings(repository), "bedplate_rollback_to": "low"})
    assert asked.code != 0
    assert asked.output.partition("fatal: ")[0].rpartition("TASK [")[2].startswith("nvidia_driver : Verify]")
    told = re.sub(r"\s+", " ", asked.output)
    assert "NVML sees 7, and 8 are expected" in told
    assert f"Going back to {generation} failed in: Verify" in told
    assert node.state()["intent"] is None, "the node is let go"

    node.sh("rm /etc/simulated-nvidia")
    reboot(node)
    repaired = node.play("rollback.yml", "low", **{**settings(repository), "bedplate_rollback_to": "low"})
    assert repaired.code == 0, repaired.output
    assert journal(node) == shown(node) == OLD


def test_a_repository_that_is_refused_leaves_nothing(gpu_node: Node, site: Any) -> None:
    node = gpu_node
    assert journal(node) == shown(node) == OLD
    apt = "find /etc/apt -type f | sort | xargs sha256sum"
    before = node.sh(apt)
    for variable, value, code in (
        ("nvidia_driver_repository", "http://127.0.0.1:8099/faults/kernel", "packages.kernel_change"),
        ("nvidia_driver_repository", "http://127.0.0.1:9", "packages.mirror"),
        ("nvidia_driver_key_fingerprint", "EB693B3035CD5710E231E123A4B469963BF863CC", "packages.mirror"),
    ):
        refused = site("high", "--tags", "driver", **{variable: value})
        assert refused.code != 0
        assert failing(node) == [code], refused.output
        assert node.sh(apt) == before, f"{variable} {value} left something"
        assert journal(node) == shown(node) == OLD


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


def test_one_layer_alone(gpu_node: Node, site: Any, repository: Path) -> None:
    node = gpu_node
    generation = node.current()
    one = site("low", bedplate_layers=["driver"], nvidia_driver_allow_downgrade=True)
    assert one.code == 0, one.output
    assert journal(node) == {**NEW, "driver": "575.57.08"}
    assert node.current() == generation
    # The live generation again, on what it was verified on.
    back = node.play("rollback.yml", "high", **{**settings(repository), "bedplate_rollback_to": "high"})
    assert back.code == 0, back.output
    assert journal(node) == shown(node) == NEW
    assert node.current() == generation


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
