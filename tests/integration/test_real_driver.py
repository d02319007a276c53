"""Debian's real NVIDIA driver on a container node: installed, upgraded, taken back by itself, with real DKMS builds.

One test, in order, because each chapter starts where the one before ended. It prints the times it measured. A container
cannot load a module: a boot of it plays that, from what DKMS really installed (tests/aptrepo/node/simulated-nvidia).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_aptrepo import ask
from testbed import ROOT, Node, make_nodes, run

pytestmark = [pytest.mark.real, pytest.mark.node]

# Backports have the proprietary modules only of this release; the release itself has the open ones of the next.
OLD, NEW = "535.216.03", "535.261.03"
OLD_PACKAGE, NEW_PACKAGE = "535.216.03-2~bpo12+1", "535.261.03-1"
ADA, BLACKWELL = "10de:2684", "10de:2bb5"
DRIVER_NOT_LOADED = 9  # nvml.h, nvmlReturn_t
# What the node is: its driver is Debian's, a boot of it is a new /proc/1, and what it loads is played.
NODE = {
    "bedplate_driver_source": "distro",
    "bedplate_sysroot": "/opt/simulated",
    "nvidia_driver_backports": True,
    "nvidia_driver_reboot": True,
    "nvidia_driver_boot_time_command": "stat -c %Z /proc/1",
}
# A GPU is gone with the new driver, and is there again with the old one.
LOSES_A_GPU = """---
- name: Take a GPU away with the new driver, and give it back with the old one
  ansible.builtin.copy:
    dest: /etc/fakegpu.conf
    content: "{{ '' if nvidia_driver_wanted | length > 0 else 'count=7\\n' }}"
    mode: "0644"
"""
NVML = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"  # where the loader finds it, and where the stand-in of it is


def profile_of(profiles: Path, name: str, base: Path, version: str, flavour: str) -> None:
    """Copy a profile and pin a driver in it; the lock is about the wheels and stays as it is."""
    shutil.copytree(base, profiles / name)
    file = profiles / name / "profile.yml"
    expect = file.read_text().replace("10de:2bb5", ADA)
    file.write_text(f"{expect}driver: {json.dumps({'version': version, 'flavour': flavour})}\n")


@pytest.fixture(scope="module")
def driver_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with a compiler, kernel headers and DKMS; no driver yet."""
    work = tmp_path_factory.mktemp("work")
    tiny = work / "tiny"  # its own: this test is long, and others build theirs anew meanwhile
    run(sys.executable, ROOT / "tests" / "tiny" / "build.py", tiny)
    profiles = work / "profiles"
    profile_of(profiles, "old", tiny / "profiles" / "tiny-good", OLD, "proprietary")
    profile_of(profiles, "new", tiny / "profiles" / "tiny-good", NEW, "open")
    run(sys.executable, ROOT / "tests" / "aptrepo" / "build.py", work / "aptrepo")
    for nodes in make_nodes(
        tmp_path_factory.mktemp("inventory"), "bedplate-realdriver", 1, tiny / "wheels", profiles, "driver"
    ):
        # Only for the unit that plays the loading; its repository is not used.
        run(sys.executable, ROOT / "tests" / "aptrepo" / "onto_node.py", work / "aptrepo", nodes[0].name)
        boots_the_release_kernel(nodes[0])
        yield nodes[0]


def boots_the_release_kernel(node: Node) -> None:
    """Let the node have the kernel headers of Debian's last point release, and no newer ones.

    Debian's open modules of a release are not always made for a kernel that a security update has brought since.
    """
    node.sh("apt-get -q update")
    node.sh("apt-get -q install -y --allow-downgrades linux-headers-amd64/$(. /etc/os-release; echo $VERSION_CODENAME)")
    node.sh("apt-get -q purge -y --autoremove; rm -f /boot/vmlinuz-*; systemctl restart simulated-nvidia")
    assert len(node.sh("ls /lib/modules").split()) == 1


def has_gpus(node: Node, pci_id: str) -> None:
    """Let the node have eight GPUs of an id."""
    node.sh(f"echo PCI_ID={pci_id} >/etc/simulated-nvidia && systemctl restart simulated-nvidia")


def loaded(node: Node) -> str:
    return node.sh("cat /opt/simulated/sys/module/nvidia/version 2>/dev/null || true")


def versions(node: Node) -> set[str]:
    """Return the versions of the driver's installed packages."""
    names = "libcuda1 libnvidia-ml1 nvidia-smi firmware-nvidia-gsp"
    return set(node.sh(f"dpkg-query -W -f '${{Version}}\\n' {names}").split())


def module_licence(node: Node) -> str:
    """Return the licence of the module that DKMS installed; those beside it, such as uvm, have their own."""
    return node.sh(
        "cd /lib/modules/*/updates/dkms && modinfo -F license $(ls | grep -xE 'nvidia-current(-open)?[.]ko')"
    )


def codes(node: Node) -> set[str]:
    """Return the codes of the failing verdicts of the node's last run."""
    return {v["code"] for v in node.state()["runs"][-1]["verdicts"] if v["status"] not in ("pass", "warn", "skipped")}


def error_of_the_real_nvml(node: Node) -> dict[str, Any]:
    """Return what Bedplate is told by Debian's NVML: this kernel really has no module loaded."""
    node.sh(f"mv {NVML} /root/stand-in && ln -s nvidia/current/libnvidia-ml.so.1 {NVML} && ldconfig")
    found = ask(node, "bedplate_verify", layers=["driver"], checks=["gpus"], expect={"gpus": 8}, strict=False)
    node.sh(f"mv /root/stand-in {NVML} && ldconfig")
    (verdict,) = (verdict for verdict in found["verdicts"] if verdict["code"] == "gpu.nvml_error")
    error: dict[str, Any] = verdict["evidence"]["error"]
    return error


def test_story(driver_node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node, figures = driver_node, []

    def timed(label: str, profile: str, expect: int, **variables: object) -> str:
        started = time.monotonic()
        play = node.play("site.yml", profile, "--tags", "driver", **NODE, **variables)
        figures.append(f"{label}: {time.monotonic() - started:.0f} s")
        assert play.code == expect, play.output
        return play.output

    # 1. The proprietary modules are refused for a Blackwell, before anything changes.
    has_gpus(node, BLACKWELL)
    output = timed(f"proprietary {OLD} for {BLACKWELL} refused", "old", 2)
    assert "works with the open ones only" in output
    assert "driver.flavour" in codes(node)
    assert node.sh("dpkg-query -W -f '${Status}' nvidia-smi 2>/dev/null || true") == ""
    assert node.sh("ls /etc/apt/sources.list.d/bedplate* 2>/dev/null || true") == ""

    # 2. The older release, from backports, with a real build of the proprietary modules.
    has_gpus(node, ADA)
    timed(f"{OLD} on a bare node, proprietary modules built", "old", 0)
    assert versions(node) == {OLD_PACKAGE}
    assert loaded(node) == OLD
    assert module_licence(node) == "NVIDIA"
    assert f"Candidate: {OLD_PACKAGE}" in node.sh("apt-cache policy libcuda1"), "the pin holds against a newer one"
    error = error_of_the_real_nvml(node)
    assert (error["code"], error["text"]) == (DRIVER_NOT_LOADED, "Driver Not Loaded")

    # 3. Nothing to do.
    output = timed("again, nothing to do", "old", 0)
    assert "changed=0" in output

    # 4. The next release loses a GPU: the node takes itself back, packages, modules and pins.
    hook = tmp_path / "hook.yml"
    hook.write_text(LOSES_A_GPU)
    output = timed(f"{NEW} fails its verification, {OLD} again", "new", 2, nvidia_driver_before_reboot=str(hook))
    assert "NVML sees 7, and 8 are expected" in output
    assert "remove nvidia-kernel-dkms" in output
    assert "upgrade nvidia-kernel-dkms" not in output
    assert "gpu.count" in codes(node)
    assert versions(node) == {OLD_PACKAGE}
    assert loaded(node) == OLD
    assert node.state()["layers"]["driver"]["is"]["version"] == OLD
    assert f"Pin: version {OLD_PACKAGE}" in node.sh("cat /etc/apt/preferences.d/bedplate-nvidia-driver.pref")

    # 5. The next release as it should be, with a real build of the open modules.
    timed(f"{OLD} to {NEW}, open modules built", "new", 0)
    assert versions(node) == {NEW_PACKAGE}
    assert loaded(node) == NEW
    assert module_licence(node) == "Dual MIT/GPL"
    kernel = node.sh("ls /lib/modules | sort -V | tail -1")
    assert node.sh("dkms status").splitlines() == [f"nvidia-current-open/{NEW}, {kernel}, x86_64: installed"]
    assert node.sh("apt-mark showhold") == ""

    with capsys.disabled():
        print("\n" + "\n".join(figures))


def test_debian_knows_no_source_packages_beyond_the_pin(driver_node: Node) -> None:
    """What the pin names covers every package of the driver: apt would choose no other version of any of them."""
    packages = driver_node.state()["layers"]["driver"]["is"]["packages"]
    assert len(packages) >= 8
    policy = driver_node.sh(f"apt-cache policy {' '.join(packages)}")
    assert policy.count(f"Candidate: {NEW_PACKAGE}") == len(packages)
    done = subprocess.run(
        ["podman", "exec", driver_node.name, "apt-get", "-s", "dist-upgrade"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "nvidia" not in done.stdout
