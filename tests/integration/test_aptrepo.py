"""Driver and toolkit packages on a node, from the signed stand-in of NVIDIA's repository (tests/aptrepo).

apt, dpkg and DKMS are the real ones; the packages are small and the kernel modules do nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from testbed import ROOT, Node, make_nodes, run

pytestmark = pytest.mark.node

URL = "http://127.0.0.1:8099"
CODE = "/srv/code"  # of bedplate, on the node
SOURCE = "/etc/apt/sources.list.d/nvidia.sources"
COMPUTE = (
    "nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libcuda1", "libnvidia-ml1", "libnvidia-cfg1",
    "libnvidia-ptxjitcompiler1", "nvidia-smi", "nvidia-persistenced", "nvidia-modprobe", "nvidia-kernel-support",
    "firmware-nvidia-gsp",
)  # fmt: skip

# What the module's arguments are unless a test says otherwise.
OPTIONS = {
    "action": "simulate", "site": "", "preview": None, "own": [], "allow_downgrade": False, "pinned": False,
    "allow_kernel_change": False, "timeout": 60,
}  # fmt: skip


def driver(version: str) -> dict[str, str]:
    return dict.fromkeys(COMPUTE, version)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that can build kernel modules, with the repository on it."""
    folder = tmp_path_factory.mktemp("aptrepo")
    run(sys.executable, ROOT / "tests" / "aptrepo" / "build.py", folder / "repository")
    for name in ("inventory", "wheels"):
        (folder / name).mkdir()
    for nodes in make_nodes(
        folder / "inventory", "bedplate-aptrepo", 1, folder / "wheels", folder / "profiles", kind="driver"
    ):
        made = nodes[0]
        run(sys.executable, ROOT / "tests" / "aptrepo" / "onto_node.py", folder / "repository", made.name)
        made.sh("cp /srv/aptrepo/debian12/x86_64/3bf863cc.pub /usr/share/keyrings/nvidia.asc")
        made.sh(f"mkdir -p {CODE}/bedplate")
        for part in ("__init__.py", "node"):
            run("podman", "cp", ROOT / "src" / "bedplate" / part, f"{made.name}:{CODE}/bedplate/{part}")
        use(made, "debian12")
        yield made


def use(node: Node, path: str) -> None:
    """Let the node know this repository, and the distribution's."""
    lines = ["Types: deb", f"URIs: {URL}/{path}/x86_64/", "Suites: ./", "Signed-By: /usr/share/keyrings/nvidia.asc"]
    node.sh(f"printf '%s\\n' {' '.join(repr(line) for line in lines)} >{SOURCE}")
    # Only this list is fetched; the others came with the image.
    node.sh(
        f"rm -f /var/lib/apt/lists/127.0.0.1*; apt-get -q update -o Dir::Etc::sourcelist={SOURCE}"
        " -o Dir::Etc::sourceparts=- -o APT::Get::List-Cleanup=0"
    )


def ask(node: Node, module: str, **options: Any) -> dict[str, Any]:
    """Run a module on the node and return its result."""
    done = subprocess.run(
        ["ansible", node.name, "-i", str(node.inventory), "-m", module, "-a", json.dumps(options)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
    )  # fmt: skip
    _, found, result = done.stdout.partition("=> ")
    assert found, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(result)
    return answer


def judge(node: Node, names: dict[str, str], layer: str = "driver", **options: Any) -> dict[str, Any]:
    """Do on the node what the module bedplate_packages does there, without Ansible's seconds around it."""
    given = json.dumps({**OPTIONS, "layer": layer, "packages": names, **options})
    program = f"""import json, sys
sys.path.insert(0, {CODE!r})
from bedplate.node.packages.apt_query import PackageError
from bedplate.node.packages.manage import perform
options = json.loads(sys.argv[1])
try:
    result = perform(options)[0]
except PackageError as error:
    result = dict(verdicts=[error.verdict(options["layer"]).to_dict()])
print(json.dumps(result))
"""
    answer: dict[str, Any] = json.loads(node.sh(f"python3 -c {shlex.quote(program)} {shlex.quote(given)}"))
    return answer


def codes(result: dict[str, Any]) -> list[str]:
    return [verdict["code"] for verdict in result["verdicts"]]


def change(node: Node, names: dict[str, str]) -> None:
    """Do what a role does with a plan that was accepted."""
    words = [f"{name}={version}" for name, version in names.items()]
    result = ask(node, "ansible.builtin.apt", name=words, allow_downgrade=True, install_recommends=False)
    assert result["changed"] is True, result


def reboot(node: Node) -> None:
    """Boot the node again: its container ends, starts by itself, and has a new first process."""
    before = node.sh("stat -c %Z /proc/1")
    node.sh("systemctl reboot", check=False)
    test = f'[ "$(stat -c %Z /proc/1)" != {before} ] && systemctl is-active simulated-nvidia.service && echo up'
    deadline = time.monotonic() + 60
    while "up" not in node.sh(test, check=False).split():
        assert time.monotonic() < deadline, "the node did not come back"
        time.sleep(0.5)


def shown(node: Node, path: str) -> str:
    """Return what this boot's kernel would show."""
    return node.sh(f"cat /opt/simulated/{path} 2>/dev/null || true")


# ---- what is refused, before anything changes ----


@pytest.mark.parametrize(
    ("fault", "code", "subject"),
    [
        ("kernel", "packages.kernel_change", "linux-image-6.99.0-1-amd64"),
        ("foreign", "packages.removes_foreign", "site-gpu-monitor"),
        ("transitional", "packages.transitional", "nvidia-driver-cuda"),
    ],
)
def test_a_faulty_repository_is_refused(node: Node, fault: str, code: str, subject: str) -> None:
    use(node, f"faults/{fault}/debian12")
    if fault == "foreign":
        node.sh("apt-get -q install -y site-gpu-monitor")
    names = driver("580.82.07")
    if fault == "transitional":  # what the transitional package no longer depends on is not asked for
        kernel = ("nvidia-kernel-open-dkms", "nvidia-kernel-support", "firmware-nvidia-gsp")
        names = dict.fromkeys(("nvidia-driver-cuda", *kernel), "580.82.07")
    result = judge(node, names)
    use(node, "debian12")
    assert codes(result) == [code]
    assert result["verdicts"][0]["subject"] == subject
    assert node.sh("dpkg-query -W -f '${Package} ' 'nvidia-*' 'linux-image-*' 2>/dev/null || true") == ""


def test_a_branch_behind_a_transitional_name_is_refused(node: Node) -> None:
    """Ubuntu's names: nvidia-driver-575-open brings branch 580."""
    use(node, "faults/transitional/ubuntu2404")
    result = judge(node, {"nvidia-driver-575-open": "580.95.05"})
    use(node, "debian12")
    assert codes(result) == ["packages.transitional"]
    assert "it would bring libnvidia-cfg1-580 580.95.05-0ubuntu1" in result["msg"]


def test_a_meta_package_alone_brings_the_newest(node: Node) -> None:
    result = judge(node, {"nvidia-open": "580.82.07"})
    assert codes(result) == ["packages.version_differs"]
    assert "590.44.01-1" in result["msg"]


def test_the_toolkit_drifts_unless_every_leaf_is_named(node: Node) -> None:
    meta = {"cuda-toolkit-13-0": "13.0.1-1"}
    result = judge(node, meta, "toolkit")
    assert codes(result) == ["packages.unpinned"]
    leaves = {step["name"]: step["after"] for step in result["plan"]["steps"]}
    assert leaves["cuda-cudart-13-0"] == "13.0.96-1"
    for name, version in leaves.items():
        leaves[name] = {"13.0.2-1": "13.0.1-1", "13.0.96-1": "13.0.88-1", "13.1.0.3-1": "13.0.2.14-1"}.get(
            version, version
        )
    result = judge(node, leaves, "toolkit")
    assert codes(result) == ["packages.ok"]
    assert {step["name"]: step["after"] for step in result["plan"]["steps"]} == leaves


def test_a_node_without_the_repository_can_say_what_would_happen(node: Node) -> None:
    """What check mode on a bare node shows; nothing of the node's own changes."""
    node.sh(f"mv {SOURCE} /root/ && rm -f /var/lib/apt/lists/127.0.0.1*")
    names = {"nvidia-driver-cuda": "580.82.07", "nvidia-kernel-open-dkms": "580.82.07"}
    # Asked first: apt renews its own cache when a source went away.
    without = judge(node, names)
    before = node.sh("find /etc/apt /var/lib/apt /var/cache/apt -type f | sort | xargs stat -c '%n %Y'")
    repository = {
        "uris": f"{URL}/debian12/x86_64/",
        "key": f"{URL}/debian12/x86_64/3bf863cc.pub",
        "fingerprint": node.sh("cat /srv/aptrepo/fingerprint"),
        "suites": "./",
        "without": [],
        "preferences": "Package: src:*nvidia*:any\nPin: version 580.82.07-1\nPin-Priority: 1000\n",
    }
    plan = judge(node, names, preview=repository)
    wrong = judge(node, names, preview={**repository, "fingerprint": "0" * 40})
    after = node.sh("find /etc/apt /var/lib/apt /var/cache/apt -type f | sort | xargs stat -c '%n %Y'")
    left = node.sh("ls /tmp | grep bedplate-apt || true")
    use(node, "debian12")
    assert codes(without) == ["packages.not_available"] * 2
    assert codes(plan) == ["packages.ok"]
    assert {step["after"] for step in plan["plan"]["steps"]} == {"580.82.07-1"}
    assert len(plan["plan"]["steps"]) == len(COMPUTE)
    assert codes(wrong) == ["packages.mirror"]
    assert after == before
    assert left == ""


# ---- a change, and the way back ----


def test_install_upgrade_and_back(node: Node) -> None:
    plan = ask(node, "bedplate_packages", layer="driver", packages=driver("575.57.08"))
    assert codes(plan) == ["packages.ok"]
    assert plan["changed"] is True
    assert plan["plan"]["download_bytes"] > 0
    change(node, plan["packages"])
    assert codes(judge(node, plan["packages"], action="assert")) == ["packages.ok"]
    assert "installed" in node.sh("dkms status nvidia/575.57.08")
    kernel = node.sh("ls /lib/modules")
    assert node.sh(f"modinfo -k {kernel} -F license nvidia") == "Dual MIT/GPL"

    # Nothing is loaded before the next boot, and NVML says so.
    assert shown(node, "sys/module/nvidia/version") == ""
    reboot(node)
    assert shown(node, "sys/module/nvidia/version") == "575.57.08"
    assert "Open Kernel Module" in shown(node, "proc/driver/nvidia/version")

    # Up. Until the boot the library is newer than the module.
    plan = judge(node, driver("580.82.07"))
    assert codes(plan) == ["packages.ok"]
    assert {step["action"] for step in plan["plan"]["steps"]} == {"upgrade"}
    change(node, plan["packages"])
    assert shown(node, "sys/module/nvidia/version") == "575.57.08"
    assert "error.nvmlInit=18" in node.sh("cat /etc/fakegpu.conf")
    reboot(node)
    assert shown(node, "sys/module/nvidia/version") == "580.82.07"
    assert "error" not in node.sh("cat /etc/fakegpu.conf")
    assert judge(node, driver("580.82.07"))["changed"] is False

    # Back, when it is allowed.
    assert codes(judge(node, driver("575.57.08"))) == ["packages.downgrade"]
    plan = judge(node, driver("575.57.08"), allow_downgrade=True)
    assert codes(plan) == ["packages.ok"]
    change(node, plan["packages"])
    assert codes(judge(node, plan["packages"], action="assert")) == ["packages.ok"]
    assert node.sh(f"modinfo -k {kernel} -F version nvidia") == "575.57.08"
    assert node.sh("dkms status nvidia/580.82.07") == ""


def test_a_preferences_file_counts_only_when_apt_reads_it(node: Node) -> None:
    installed = dict(
        line.split("=") for line in node.sh("dpkg-query -W -f '${Package}=${Version}\\n' nvidia-smi").split()
    )
    pin = "Package: src:nvidia-graphics-drivers*:any\nPin: version 575.57.08-1\nPin-Priority: 1000\n"
    folder = "/etc/apt/preferences.d"
    # A name that ends in a version looks like an unknown extension.
    node.sh(f"printf '{pin}' >{folder}/bedplate-575.57.08")
    result = judge(node, installed, action="assert", pinned=True)
    assert codes(result) == ["packages.ok", "packages.not_pinned"]
    node.sh(f"mv {folder}/bedplate-575.57.08 {folder}/bedplate-driver.pref")
    result = judge(node, installed, action="assert", pinned=True)
    node.sh(f"rm {folder}/bedplate-driver.pref")
    assert codes(result) == ["packages.ok", "packages.ok"]


# ---- a node whose dpkg is not ready ----


def test_an_interrupted_change_is_found(node: Node) -> None:
    node.sh("dpkg --unpack /srv/aptrepo/debian12/x86_64/nvidia-xconfig_580.82.07-1_amd64.deb")
    result = judge(node, {"nvidia-settings": "580.82.07-1"})
    node.sh("dpkg --configure -a && dpkg --purge nvidia-xconfig")
    assert "packages.dpkg_interrupted" in codes(result)
    assert result["verdicts"][0]["evidence"]["unfinished"] == ["nvidia-xconfig"]


def test_a_held_lock_is_named(node: Node) -> None:
    program = (
        "import fcntl,time; f=open('/var/lib/dpkg/lock-frontend','r+'); fcntl.lockf(f,fcntl.LOCK_EX); time.sleep(60)"
    )
    node.sh(f'systemd-run --quiet --unit=holder python3 -c "{program}"')
    result = judge(node, {"nvidia-settings": "580.82.07-1"})
    pid = node.sh("systemctl show --value --property=MainPID holder")
    node.sh("systemctl stop holder")
    locked = next(verdict for verdict in result["verdicts"] if verdict["code"] == "packages.locked")
    assert locked["evidence"] == {"path": "/var/lib/dpkg/lock-frontend", "pid": int(pid), "command": "python3"}
