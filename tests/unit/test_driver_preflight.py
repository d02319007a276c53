"""What stands against changing a driver, each on a tree that is healthy but for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driver_tree import KERNEL, NEXT_KERNEL, VERSION, Tree, healthy, key

from bedplate.node.driver import check as driver
from bedplate.node.driver import rules as driver_rules
from bedplate.node.verdicts import CODES, Verdict, failing, layers_of

WANTED: dict[str, Any] = {"version": VERSION, "flavour": "open", "source": "nvidia", "parameters": {}, "packages": {}}
MIB = 1 << 20
ROOMY = {"/boot": 4096 * MIB, "/usr": 40960 * MIB, "/var": 40960 * MIB, "/lib/modules": 40960 * MIB}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return healthy(tmp_path)


def preflight(
    tree: Tree,
    *,
    users: list[dict[str, Any]] | None = None,
    waited_s: float = 0.0,
    cuda: str = "",
    gpus: list[dict[str, Any]] | None = None,
    free: dict[str, int] | None = None,
    **changes: Any,
) -> list[Verdict]:
    report = {**tree.inspect(), "free_bytes": {**ROOMY, **(free or {})}}
    verdicts = driver.preflight(
        report, {**WANTED, **changes}, gpus=gpus, users=users or [], waited_s=waited_s, cuda=cuda
    )
    for verdict in verdicts:
        assert verdict.status in CODES[verdict.code].statuses, verdict
        assert verdict.layer in layers_of(verdict.code), verdict
        assert verdict.status == "pass" or verdict.action, verdict
    return verdicts


def only(verdicts: list[Verdict], code: str) -> Verdict:
    (verdict,) = [verdict for verdict in verdicts if verdict.code == code and verdict.status != "pass"]
    return verdict


def bad(verdicts: list[Verdict]) -> list[tuple[str, str]]:
    return [(verdict.code, verdict.status) for verdict in failing(verdicts)]


def test_a_healthy_node_may_be_changed(tree: Tree) -> None:
    verdicts = preflight(tree, cuda="13.0.1")
    assert {verdict.status for verdict in verdicts} == {"pass"}
    assert [verdict.code for verdict in verdicts] == [
        "driver.flavour",
        "driver.unsupported",
        "driver.toolkit_minimum",
        "driver.gpu_in_use",
        "driver.secure_boot",
        "driver.headers_missing",
        "driver.no_space",
    ]


def test_a_bare_node_may_be_changed(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("/etc/os-release", 'ID=debian\nVERSION_ID="12"\n')
    assert bad(preflight(tree)) == []


def test_proprietary_modules_are_refused_for_blackwell(tree: Tree) -> None:
    verdict = only(preflight(tree, flavour="proprietary"), "driver.flavour")
    assert (verdict.status, verdict.subject) == ("fail", "GPU 10de:2bb5")
    assert "open ones only" in verdict.message
    assert verdict.action == "Set driver.flavour to open in the profile."


@pytest.mark.parametrize("pci_id", ["10de:2901", "10de:2b85", "10DE:2BB1", "10de:2c02", "10de:2f04", "10de:3182"])
def test_gpus_that_work_with_the_open_modules_only(tree: Tree, pci_id: str) -> None:
    assert bad(preflight(tree, gpus=[{"pci_id": pci_id}], flavour="proprietary"))[0] == ("driver.flavour", "fail")


@pytest.mark.parametrize("pci_id", ["10de:28f8", "10de:26b9", "10de:2342", "10de:20b5", "10de:", "1002:7448", ""])
def test_older_gpus_may_have_the_proprietary_modules(tree: Tree, pci_id: str) -> None:
    assert bad(preflight(tree, gpus=[{"pci_id": pci_id}], flavour="proprietary")) == []


def test_the_driver_is_older_than_the_gpu(tree: Tree) -> None:
    verdict = only(preflight(tree, version="570.172.08"), "driver.unsupported")
    assert verdict.message == "It is too old for the GPU 10de:2bb5, which 575.57.08 was the first to know."
    assert "575.57.08" in verdict.action


def test_debian_13_has_no_580(tree: Tree) -> None:
    tree.write("/etc/os-release", 'ID=debian\nVERSION_ID="13"\n')
    verdict = only(preflight(tree), "driver.unsupported")
    assert (verdict.status, verdict.subject) == ("fail", f"NVIDIA driver {VERSION}")
    assert "debian 13 begins with 590" in verdict.message
    assert "590" in verdict.action
    assert bad(preflight(tree, version="590.44.01")) == []
    assert bad(preflight(tree, source="distro")) == []


@pytest.mark.parametrize(
    ("system", "version", "known"),
    [
        ("ubuntu", "22.04", True),
        ("rocky", "9.6", True),
        ("rhel", "9.4", True),
        ("ubuntu", "20.04", False),
        ("arch", "", False),
    ],
)
def test_systems_that_nvidias_repository_knows(tree: Tree, system: str, version: str, known: bool) -> None:
    tree.write("/etc/os-release", f"ID={system}\nVERSION_ID={version}\n")
    assert (("driver.unsupported", "fail") in bad(preflight(tree))) is not known


@pytest.mark.parametrize(
    ("cuda", "version", "status"),
    [
        ("13.0.1", "580.65.06", "pass"),
        ("13.2", "575.57.08", "fail"),
        ("12.8", "575.57.08", "pass"),
        ("12.8", "520.61.05", "fail"),
        ("11.8", "450.80.02", "pass"),
    ],
)
def test_cuda_needs_a_driver(tree: Tree, cuda: str, version: str, status: str) -> None:
    verdicts = preflight(tree, cuda=cuda, version=version, gpus=[])
    (verdict,) = [verdict for verdict in verdicts if verdict.code == "driver.toolkit_minimum"]
    assert (verdict.status, verdict.subject) == (status, f"CUDA {cuda}")


def test_a_cuda_that_the_table_does_not_know_is_not_judged(tree: Tree) -> None:
    assert "driver.toolkit_minimum" not in [verdict.code for verdict in preflight(tree, cuda="99.0")]


def test_nouveau_is_a_warning_before_a_change(tree: Tree) -> None:
    tree.unloaded()
    tree.nouveau()
    verdict = only(preflight(tree), "driver.nouveau")
    assert (verdict.status, verdict.subject) == ("warn", "nouveau")
    assert "nvidia_driver_reboot" in verdict.action


def test_processes_use_the_gpus(tree: Tree) -> None:
    users = [{"pid": 4711 + index, "comm": "python3", "user": "svc"} for index in range(7)]
    verdict = only(preflight(tree, users=users, waited_s=30.0), "driver.gpu_in_use")
    assert verdict.status == "fail"
    assert "in use after 30 s of waiting by python3 (4711), " in verdict.message
    assert "and 2 more" in verdict.message
    assert "bedplate_before_change" in verdict.action
    assert len(verdict.evidence["processes"]) == 7


def test_waiting_ends_when_the_last_process_has_left() -> None:
    answers = [[{"pid": 1}], [{"pid": 1}], []]
    slept: list[float] = []
    assert driver.wait_for_users(lambda: answers.pop(0), 60.0, sleep=slept.append) == []
    assert len(slept) == 2


def test_waiting_ends_when_its_time_is_over() -> None:
    asked: list[None] = []

    def users() -> list[dict[str, Any]]:
        asked.append(None)
        return [{"pid": 1}]

    assert driver.wait_for_users(users, 0.05) == [{"pid": 1}]
    assert driver.wait_for_users(users) == [{"pid": 1}]
    assert len(asked) == 3


def test_secure_boot_and_dkms_has_no_key(tree: Tree) -> None:
    tree.efi(secure_boot=True, enrolled=(key("vendor"),))
    verdict = only(preflight(tree), "driver.secure_boot")
    assert (verdict.status, verdict.subject) == ("fail", "Secure Boot")
    assert "no key to sign with" in verdict.message
    assert "mokutil --import" in verdict.action


@pytest.mark.parametrize("path", ["/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub", "/root/own.der"])
def test_secure_boot_and_the_key_of_dkms_is_not_enrolled(tree: Tree, path: str) -> None:
    tree.efi(secure_boot=True, enrolled=(key("vendor"),))
    tree.write(path, key("dkms").der)
    if path.startswith("/root"):
        tree.write("/etc/dkms/framework.conf", f'# mok_certificate=/x\nmok_certificate="{path}"\n')
    verdict = only(preflight(tree), "driver.secure_boot")
    assert (verdict.status, verdict.subject) == ("fail", path)
    assert f"mokutil --import {path}" in verdict.action
    tree.efi(secure_boot=True, enrolled=(key("vendor"), key("dkms")))
    assert bad(preflight(tree)) == []


def test_secure_boot_does_not_matter_to_signed_prebuilt_modules(tree: Tree) -> None:
    tree.efi(secure_boot=True)
    packages = {"linux-modules-nvidia-580-open-generic": "6.8.0-84.84", "nvidia-utils-580": f"{VERSION}-0ubuntu1"}
    assert bad(preflight(tree, packages=packages)) == []


def test_secure_boot_that_cannot_be_read_is_inconclusive(tree: Tree) -> None:
    tree.at("/sys/firmware/efi").mkdir(parents=True)
    verdict = only(preflight(tree), "driver.secure_boot")
    assert (verdict.status, "mokutil --sb-state" in verdict.action) == ("inconclusive", True)


def test_enrolled_keys_that_cannot_be_read_are_inconclusive(tree: Tree) -> None:
    tree.efi(secure_boot=True)
    tree.write("/var/lib/dkms/mok.pub", key("dkms").der)
    tree.remove("sys/firmware/efi/efivars/MokListRT-*")
    tree.at("/sys/firmware/efi/mok-variables/MokListRT").mkdir(parents=True)
    verdict = only(preflight(tree), "driver.secure_boot")
    assert (verdict.status, "mokutil --test-key" in verdict.action) == ("inconclusive", True)


@pytest.mark.parametrize(("system", "package"), [("ubuntu", "linux-headers-"), ("rocky", "kernel-devel-")])
def test_headers_are_missing_for_a_kernel_that_does_not_run(tree: Tree, system: str, package: str) -> None:
    tree.write("/etc/os-release", f"ID={system}\nVERSION_ID={'9' if system == 'rocky' else '24.04'}\n")
    tree.remove(f"usr/src/linux-headers-{NEXT_KERNEL}")
    verdict = only(preflight(tree), "driver.headers_missing")
    assert (verdict.status, verdict.subject) == ("fail", f"kernel {NEXT_KERNEL}")
    assert f"{package}{NEXT_KERNEL}" in verdict.message
    assert verdict.action == f"Install {package}{NEXT_KERNEL}, or remove the kernel."


def test_prebuilt_modules_need_no_headers(tree: Tree) -> None:
    tree.at(f"/lib/modules/{KERNEL}/build").unlink()
    assert bad(preflight(tree, packages={"linux-modules-nvidia-580-open-generic": "1-1"})) == []


@pytest.mark.parametrize(("directory", "free"), [("/boot", 60 * MIB), ("/var", 900 * MIB), ("/usr", 10 * MIB)])
def test_a_file_system_is_too_full(tree: Tree, directory: str, free: int) -> None:
    verdict = only(preflight(tree, free={directory: free}), "driver.no_space")
    assert (verdict.status, verdict.subject) == ("fail", directory)
    assert f"{free // MIB} MiB free" in verdict.message
    assert verdict.evidence["needed_bytes"] > verdict.evidence["free_bytes"] == free


def test_a_reboot_is_pending_for_something_else(tree: Tree) -> None:
    tree.write("/run/reboot-required", "*** System restart required ***\n")
    tree.write("/run/reboot-required.pkgs", "linux-image-6.8.0-90-generic\nlibc6\n")
    verdict = only(preflight(tree), "driver.reboot_pending")
    assert (verdict.status, verdict.subject) == ("needs-reboot", "node")
    assert "libc6" in verdict.message
    assert verdict.action.startswith("Reboot the node first")


def test_a_reboot_that_this_driver_itself_waits_for_does_not_stop_the_next_run(tree: Tree) -> None:
    tree.loaded("575.57.08")
    tree.write("/var/run/reboot-required", "")
    tree.write("/var/run/reboot-required.pkgs", "nvidia-dkms-580-open\n")
    verdicts = preflight(tree)
    assert bad(verdicts) == []
    assert only(verdicts, "driver.reboot_pending").status == "warn"


def test_an_interrupted_dpkg_does_not_stop_the_run_that_settles_it(tree: Tree) -> None:
    tree.packages(VERSION, status="install reinstreq half-installed")
    tree.write("/var/lib/dpkg/updates/0001", "")
    verdicts = preflight(tree)
    assert bad(verdicts) == []
    assert "dpkg --configure -a" in only(verdicts, "driver.half_installed").action


def test_a_driver_that_is_not_ours_is_not_prepared_for(tree: Tree) -> None:
    tree.remove("usr/src/*")
    tree.write("/run/reboot-required", "")
    verdicts = preflight(tree, source="none", free={"/boot": 0})
    assert [verdict.code for verdict in verdicts] == ["driver.flavour", "driver.unsupported", "driver.gpu_in_use"]


@pytest.mark.parametrize("version", ["", "x", "580", "580.82.07", "580.x.1", "9" * 500])
def test_versions_are_compared_as_numbers(version: str) -> None:
    assert isinstance(driver_rules.branch(version), int)
    assert driver_rules.numbers("580.105.08") > driver_rules.numbers("580.95.05")
