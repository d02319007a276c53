"""Each test breaks a healthy tree as one fault of the field breaks a node, and reads what an operator would read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from driver_tree import (
    BOOT,
    KERNEL,
    MODULES,
    NEXT_KERNEL,
    OLD,
    PROPRIETARY,
    VERSION,
    Tree,
    healthy,
    key,
)

from bedplate.node import verify
from bedplate.node.driver import check as driver
from bedplate.node.hardware import gpu
from bedplate.node.verdicts import CODES, Verdict, failing, layers_of

WANTED: dict[str, Any] = {"version": VERSION, "flavour": "open", "source": "nvidia", "parameters": {}, "packages": {}}
NVML = {"error": None, "driver_version": VERSION, "gpus": []}
CUDA = {"error": None, "timed_out": False, "code": 0, "version": 13000, "devices": 8}
HMM_OFF = {"parameters": {"nvidia_uvm": {"uvm_disable_hmm": "1"}}}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return healthy(tmp_path)


def judge(tree: Tree, nvml: dict[str, Any] | None = None, **changes: Any) -> list[Verdict]:
    options = {name: changes.pop(name) for name in ("expected_gpus", "cuda") if name in changes}
    verdicts = driver.judge(tree.inspect(), {**WANTED, **changes}, NVML if nvml is None else nvml, **options)
    for verdict in verdicts:
        info = CODES[verdict.code]
        assert verdict.status in info.statuses, verdict
        assert verdict.layer in layers_of(verdict.code), verdict
        assert verdict.status in ("pass", "skipped") or verdict.action, verdict
    return verdicts


def only(verdicts: list[Verdict], code: str) -> Verdict:
    (verdict,) = [verdict for verdict in verdicts if verdict.code == code and verdict.status != "pass"]
    return verdict


def codes(verdicts: list[Verdict]) -> list[tuple[str, str]]:
    return [(verdict.code, verdict.status) for verdict in verdicts]


def bad(verdicts: list[Verdict]) -> list[tuple[str, str]]:
    return codes(failing(verdicts))


def test_a_healthy_node_has_no_failing_verdict(tree: Tree) -> None:
    verdicts = judge(tree)
    assert codes(verdicts) == [
        ("driver.version", "pass"),
        ("driver.flavour", "pass"),
        ("driver.dkms_missing", "pass"),
        ("driver.initramfs_stale", "pass"),
        ("driver.firmware_missing", "pass"),
        ("driver.unattended_upgrades", "pass"),
    ]
    version = verdicts[0].evidence
    assert (version["loaded"], version["module"], version["library"], version["cuda_library"]) == (VERSION,) * 4
    assert list(version["packages"]) == [VERSION]


def test_a_report_is_json_and_judges_nothing(tree: Tree) -> None:
    report = tree.inspect()
    assert report["kernel"] == {"running": KERNEL, "bootable": [KERNEL, NEXT_KERNEL], "images": True}
    assert report["gpus"] == ["10de:2bb5"] * 8
    assert report["unreadable"] == {}
    assert {module["name"] for module in report["kernels"][KERNEL]["modules"]} == {
        name.replace("-", "_") for name in MODULES
    }
    __import__("json").dumps(report)


# Loaded, on disk, library, packages


def upgrade(tree: Tree, version: str) -> None:
    """Do what upgraded packages do, without the reboot."""
    for release in (KERNEL, NEXT_KERNEL):
        tree.modules(release, version)
    tree.libraries(version)
    tree.firmware(version)
    tree.packages(version)


def test_the_wanted_driver_waits_for_its_reboot(tree: Tree) -> None:
    tree.loaded(OLD)
    verdicts = judge(tree, {"error": {"code": 18, "name": "NVML_ERROR_LIB_RM_VERSION_MISMATCH", "text": "x"}})
    assert bad(verdicts) == [("driver.reboot_pending", "needs-reboot")]
    pending = only(verdicts, "driver.reboot_pending")
    assert f"{VERSION} is installed and {OLD} is still loaded" in pending.message
    assert pending.action.startswith("Reboot the node")


def test_unattended_upgrades_changed_the_driver_under_the_running_module(tree: Tree) -> None:
    upgrade(tree, "580.95.05")
    tree.history(
        "Start-Date: 2025-10-10  06:12:01\n"
        "Commandline: /usr/bin/unattended-upgrade\n"
        f"Upgrade: libnvidia-compute-580:amd64 ({VERSION}-0ubuntu1, 580.95.05-0ubuntu1), bash:amd64 (1, 2)\n"
        "End-Date: 2025-10-10  06:13:00\n"
    )
    verdicts = judge(tree, {"error": {"code": 18, "name": "NVML_ERROR_LIB_RM_VERSION_MISMATCH", "text": "x"}})
    mismatch = only(verdicts, "driver.library_mismatch")
    assert mismatch.status == "fail"
    assert f"{VERSION} is loaded and 580.95.05 is on disk" in mismatch.message
    assert "unattended-upgrades changed it on 2025-10-10" in mismatch.message
    assert mismatch.action.startswith("Do not reboot yet")
    assert mismatch.evidence["last_change"]["packages"] == [
        f"libnvidia-compute-580 {VERSION}-0ubuntu1 -> 580.95.05-0ubuntu1"
    ]


def test_a_change_before_the_boot_is_not_blamed(tree: Tree) -> None:
    upgrade(tree, "580.95.05")
    tree.history("Start-Date: 2025-09-01  06:12:01\nUpgrade: libnvidia-compute-580:amd64 (1-1, 2-1)\n")
    assert "2025-09-01" not in only(judge(tree), "driver.library_mismatch").message


def test_the_library_is_of_another_version_than_everything_else(tree: Tree) -> None:
    tree.libraries("580.95.05")
    mismatch = only(judge(tree), "driver.library_mismatch")
    assert mismatch.status == "fail"
    assert f"loaded module {VERSION}" in mismatch.message
    assert "libnvidia-ml 580.95.05" in mismatch.message
    assert "provision.yml" in mismatch.action


def test_nvml_loads_a_library_from_elsewhere(tree: Tree) -> None:
    mismatch = only(judge(tree, {"error": {"code": 18}}), "driver.library_mismatch")
    assert "ldconfig -p" in mismatch.action


def test_asking_for_570_gave_580(tree: Tree) -> None:
    verdict = only(judge(tree, version="570.172.08"), "driver.version")
    assert (verdict.status, verdict.subject) == ("fail", "NVIDIA driver")
    assert verdict.message == f"The driver is {VERSION}, and the profile pins 570.172.08."


def test_only_the_packages_differ(tree: Tree) -> None:
    tree.packages("580.95.05")
    verdict = only(judge(tree), "driver.version")
    assert verdict.status == "fail"
    assert "nvidia-utils-580" in verdict.message
    assert "580.95.05" in verdict.message


def test_without_a_wanted_version_the_parts_must_agree(tree: Tree) -> None:
    assert bad(judge(tree, version="")) == []
    tree.loaded(OLD)
    assert bad(judge(tree, version="")) == [("driver.reboot_pending", "needs-reboot")]


def test_dpkg_was_interrupted(tree: Tree) -> None:
    tree.packages(VERSION, status="install ok half-configured")
    verdict = only(judge(tree), "driver.half_installed")
    assert (verdict.status, "libnvidia-compute-580 (half-configured)" in verdict.message) == ("fail", True)
    assert "dpkg --configure -a" in verdict.action


def test_nothing_is_installed(tree: Tree) -> None:
    tree.unloaded()
    for pattern in ("lib/modules/*/updates", "var/lib/dkms", "var/lib/dpkg/status", "usr/lib/x86_64-linux-gnu"):
        tree.remove(pattern)
    verdicts = judge(tree)
    assert verdicts[0].message == "No NVIDIA driver is installed here: no module, no library, no package."
    assert "driver.module_not_loaded" not in [verdict.code for verdict in verdicts]


# Not loaded, and why


def why_not_loaded(tree: Tree, **options: Any) -> Verdict:
    return only(judge(tree, {"error": {"code": 9}}, **options), "driver.module_not_loaded")


def test_not_loaded_for_no_reason_that_files_tell(tree: Tree) -> None:
    tree.unloaded()
    verdict = why_not_loaded(tree)
    assert (verdict.status, verdict.evidence["cause"], verdict.subject) == ("fail", "unknown", "module nvidia")
    assert "dmesg" in verdict.action


INSTALLED = "Start-Date: {}  06:12:01\nCommandline: apt-get install\nInstall: libnvidia-compute-580:amd64 (2-1)\n"


def test_a_module_that_was_installed_after_the_boot_waits_for_the_next_one(tree: Tree) -> None:
    tree.unloaded()
    tree.history(INSTALLED.format("2025-10-10"))
    verdict = why_not_loaded(tree)
    assert (verdict.status, verdict.evidence["cause"]) == ("needs-reboot", "not booted since")
    assert f"{VERSION} was installed on 2025-10-10" in verdict.message
    assert verdict.action.startswith("Reboot the node")


def test_a_module_that_no_boot_loaded_is_a_failure(tree: Tree) -> None:
    tree.unloaded()
    tree.history(INSTALLED.format("2025-09-01"))
    assert why_not_loaded(tree).status == "fail"


@pytest.mark.parametrize("boot", [True, False])
def test_after_a_first_installation_nothing_but_a_reboot_is_in_the_way(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, boot: bool
) -> None:
    tree.unloaded()
    tree.remove("boot/initrd.img-*")  # another root's are not listed
    tree.history(INSTALLED.format("2025-10-10" if boot else "2025-09-01"))
    not_loaded = {"error": {"code": 9, "name": "NVML_ERROR_DRIVER_NOT_LOADED", "text": "Driver Not Loaded"}, "gpus": []}
    monkeypatch.setattr(gpu, "query", lambda _tools: not_loaded)
    options = {
        "layers": ["driver"], "checks": ["driver", "gpus"], "driver": WANTED, "expect": {"gpus": 8},
        "sysroot": str(tree.root), "tools": "", "simulated": True, "baseline": [],
    }  # fmt: skip
    expected = "needs-reboot" if boot else "fail"
    assert bad(verify.verify(options)) == [("driver.module_not_loaded", expected), ("gpu.nvml_error", expected)]


@pytest.mark.parametrize("wrong", ["another version", "half of it", "blacklisted"])
def test_a_reboot_is_not_asked_for_where_it_would_not_help(tree: Tree, wrong: str) -> None:
    tree.unloaded()
    tree.history(INSTALLED.format("2025-10-10"))
    if wrong == "another version":
        upgrade(tree, "580.95.05")
    elif wrong == "half of it":
        tree.libraries("580.95.05")
    else:
        tree.write("/etc/modprobe.d/vfio.conf", "blacklist nvidia\n")
    assert why_not_loaded(tree).status == "fail"


def test_not_loaded_because_nouveau_holds_the_gpus(tree: Tree) -> None:
    tree.unloaded()
    tree.nouveau()
    tree.remove("etc/modprobe.d")
    verdicts = judge(tree)
    verdict = only(verdicts, "driver.module_not_loaded")
    assert (verdict.status, verdict.evidence["cause"]) == ("fail", "nouveau")
    assert "update-initramfs -u -k all" in verdict.action
    nouveau = only(verdicts, "driver.nouveau")
    assert (nouveau.status, nouveau.subject) == ("fail", "nouveau")


def test_nouveau_is_loaded_for_the_last_time(tree: Tree) -> None:
    tree.unloaded()
    tree.nouveau()
    assert bad(judge(tree)) == [("driver.module_not_loaded", "needs-reboot"), ("driver.nouveau", "needs-reboot")]


def test_not_loaded_because_dkms_built_nothing_for_the_running_kernel(tree: Tree) -> None:
    tree.unloaded()
    tree.kernel("6.8.0-90-generic", headers=False)
    tree.write("/proc/sys/kernel/osrelease", "6.8.0-90-generic\n")
    verdict = why_not_loaded(tree)
    assert (verdict.status, verdict.evidence["cause"]) == ("fail", "no module")
    assert "no module for the running kernel 6.8.0-90-generic" in verdict.message
    assert "headers of 6.8.0-90-generic" in verdict.action


def test_the_kernel_was_upgraded_and_the_next_one_has_its_module(tree: Tree) -> None:
    tree.unloaded()
    tree.remove(f"lib/modules/{KERNEL}/updates")
    tree.remove(f"boot/*{KERNEL}")
    verdicts = judge(tree)
    assert bad(verdicts) == [("driver.module_not_loaded", "needs-reboot")]
    assert only(verdicts, "driver.module_not_loaded").action == f"Reboot into {NEXT_KERNEL}."


def test_key_was_rejected_by_service(tree: Tree) -> None:
    tree.unloaded()
    tree.modules(KERNEL, VERSION, by=key("DKMS module signing key"))
    tree.efi(secure_boot=True, enrolled=(key("Debian Secure Boot CA"),))
    tree.write("/var/lib/shim-signed/mok/MOK.der", key("DKMS module signing key").der)
    verdict = why_not_loaded(tree)
    assert (verdict.status, verdict.evidence["cause"]) == ("fail", "key rejected")
    assert "signed by DKMS module signing key, whose key is not enrolled" in verdict.message
    assert "mokutil --import /var/lib/shim-signed/mok/MOK.der" in verdict.action


def test_a_module_of_another_kernel(tree: Tree) -> None:
    tree.unloaded()
    tree.modules(KERNEL, VERSION, vermagic="6.8.0-50-generic")
    verdict = why_not_loaded(tree)
    assert (verdict.status, verdict.evidence["cause"]) == ("fail", "other kernel")
    assert f"dkms install --force -k {KERNEL}" in verdict.action


def test_somebody_blacklisted_nvidia(tree: Tree) -> None:
    tree.unloaded()
    tree.write("/etc/modprobe.d/vfio.conf", "blacklist nvidia\n")
    verdict = why_not_loaded(tree)
    assert verdict.evidence["cause"] == "blacklisted"
    assert "/etc/modprobe.d/vfio.conf" in verdict.action


@pytest.mark.parametrize(("expected", "status"), [(0, "skipped"), (8, "fail"), (None, "fail")])
def test_no_gpu_on_the_bus(tree: Tree, expected: int | None, status: str) -> None:
    tree.unloaded()
    tree.remove("sys/bus/pci/devices/*")
    verdict = why_not_loaded(tree, expected_gpus=expected)
    assert (verdict.status, verdict.evidence["cause"]) == (status, "no GPU")


# Flavour


def test_proprietary_modules_for_a_blackwell_gpu(tree: Tree) -> None:
    for release in (KERNEL, NEXT_KERNEL):
        tree.modules(release, VERSION, license=PROPRIETARY)
    tree.loaded(VERSION, proprietary=True)
    first, second, loaded = [verdict for verdict in judge(tree) if verdict.code == "driver.flavour"]
    assert [first.subject, second.subject] == [f"kernel {KERNEL}", f"kernel {NEXT_KERNEL}"]
    assert first.status == second.status == loaded.status == "fail"
    assert f"/lib/modules/{KERNEL}/updates/dkms/nvidia.ko is of the proprietary kernel modules" in first.message
    assert "the GPU 10de:2bb5 needs the open ones" in first.message
    assert "driver.flavour open" in first.action


def test_the_open_module_is_there_and_the_proprietary_one_still_runs(tree: Tree) -> None:
    tree.loaded(VERSION, proprietary=True)
    verdict = only(judge(tree), "driver.flavour")
    assert (verdict.status, verdict.action) == ("needs-reboot", "Reboot the node.")


def test_a_licence_that_cannot_be_read_is_not_a_pass(tree: Tree) -> None:
    tree.write(f"/lib/modules/{NEXT_KERNEL}/updates/dkms/nvidia.ko", b"\x7fELF garbage")
    verdicts = judge(tree)
    assert ("driver.flavour", "inconclusive") in codes(verdicts)
    assert ("driver.dkms_missing", "inconclusive") in codes(verdicts)


# The next boot


def test_dkms_built_nothing_for_the_newest_kernel(tree: Tree) -> None:
    tree.kernel("6.8.0-90-generic", headers=False)
    verdict = only(judge(tree), "driver.dkms_missing")
    assert (verdict.status, verdict.subject) == ("fail", "kernel 6.8.0-90-generic")
    assert "no module nvidia and no nvidia_uvm" in verdict.message
    assert "headers are not installed" in verdict.message
    assert verdict.action.startswith("Install the headers of 6.8.0-90-generic")


def test_a_module_that_dkms_built_and_did_not_install(tree: Tree) -> None:
    tree.remove(f"lib/modules/{NEXT_KERNEL}/updates")
    tree.remove(f"var/lib/dkms/nvidia/kernel-{NEXT_KERNEL}-x86_64")
    verdict = only(judge(tree), "driver.dkms_missing")
    assert "built it and not installed it" in verdict.message
    (state,) = verdict.evidence["dkms"]
    assert (state["version"], state["kernel"], state["state"]) == (VERSION, NEXT_KERNEL, "built")


def test_the_driver_does_not_compile_for_a_newer_kernel(tree: Tree) -> None:
    tree.kernel("6.8.0-90-generic")
    tree.failed_build(VERSION, "6.8.0-90-generic")
    verdict = only(judge(tree), "driver.dkms_missing")
    assert verdict.subject == "kernel 6.8.0-90-generic"
    assert "nv-pci.c:223:9: error: too few arguments to function 'pci_resize_resource'" in verdict.message
    assert f"/var/lib/dkms/nvidia/{VERSION}/build/make.log" in verdict.action


def test_a_build_for_headers_without_a_kernel_leaves_dpkg_half_done(tree: Tree) -> None:
    tree.failed_build(VERSION, "6.8.0-91-generic")
    tree.packages(VERSION, status="install ok half-configured")
    verdict = only(judge(tree), "driver.half_installed")
    assert "DKMS could not build it for the kernel 6.8.0-91-generic: nv-pci.c:223:9: error:" in verdict.message
    assert "Remove that kernel and its headers" in verdict.action


def test_an_older_module_is_in_the_way_for_the_next_kernel(tree: Tree) -> None:
    tree.modules(NEXT_KERNEL, OLD)
    verdict = only(judge(tree), "driver.dkms_missing")
    assert (verdict.status, verdict.subject) == ("fail", f"kernel {NEXT_KERNEL}")
    assert f"which is {OLD} and not {VERSION}" in verdict.message


def test_half_of_a_module_set(tree: Tree) -> None:
    tree.module(NEXT_KERNEL, OLD, "nvidia-uvm")
    assert "nvidia-uvm.ko" in only(judge(tree), "driver.dkms_missing").message
    tree.remove(f"lib/modules/{NEXT_KERNEL}/updates/dkms/nvidia-uvm.ko")
    assert "no module nvidia_uvm" in only(judge(tree), "driver.dkms_missing").message


def test_prebuilt_modules_count_as_well(tree: Tree) -> None:
    tree.remove(f"lib/modules/{NEXT_KERNEL}/updates")
    for name in MODULES:
        tree.module(NEXT_KERNEL, VERSION, name, place="kernel/nvidia-580-open", suffix=".xz")
    assert bad(judge(tree)) == []


def test_modprobe_takes_the_module_that_modules_dep_names(tree: Tree) -> None:
    for name in MODULES:
        tree.module(NEXT_KERNEL, OLD, name, place="extra")
    tree.write(f"/lib/modules/{NEXT_KERNEL}/modules.dep", "extra/nvidia.ko:\nextra/nvidia-uvm.ko: extra/nvidia.ko\n")
    assert f"/lib/modules/{NEXT_KERNEL}/extra/nvidia.ko" in only(judge(tree), "driver.dkms_missing").message


def test_secure_boot_would_refuse_the_module_at_the_next_boot(tree: Tree) -> None:
    tree.efi(secure_boot=True, enrolled=(key("enrolled"),))
    tree.modules(KERNEL, VERSION, by=key("enrolled"))
    tree.modules(NEXT_KERNEL, VERSION, by=key("another"))
    verdict = only(judge(tree), "driver.secure_boot")
    assert (verdict.status, verdict.subject) == ("fail", f"kernel {NEXT_KERNEL}")
    assert "signed by another, whose key is not enrolled" in verdict.message
    tree.modules(NEXT_KERNEL, VERSION)
    assert "is not signed: it will not load" in only(judge(tree), "driver.secure_boot").message


def test_modules_that_are_signed_with_an_enrolled_key(tree: Tree) -> None:
    tree.efi(secure_boot=True, enrolled=(key("first"), key("enrolled")))
    for release in (KERNEL, NEXT_KERNEL):
        tree.modules(release, VERSION, by=key("enrolled"))
    verdicts = judge(tree)
    assert bad(verdicts) == []
    assert ("driver.secure_boot", "pass") in codes(verdicts)


def test_modules_that_the_distribution_signed(tree: Tree) -> None:
    tree.unloaded()
    tree.efi(secure_boot=True)
    tree.write(
        "/proc/keys",
        "0f0f I------ 1 perm 1f030000 0 0 asymmetri Canonical Ltd. Kernel Module Signing: "
        "88f752e560a1e0737e31163a466ad7b70a850c19: X509.rsa 0a850c19 []\n",
    )
    for release in (KERNEL, NEXT_KERNEL):
        tree.modules(release, VERSION, by=key("Canonical Ltd. Kernel Module Signing"))
    assert ("driver.secure_boot", "pass") in codes(judge(tree))


def test_signatures_do_not_matter_where_shim_validates_nothing(tree: Tree) -> None:
    tree.efi(secure_boot=True, validation=False)
    assert bad(judge(tree)) == []


def test_an_initramfs_with_the_firmware_of_another_driver(tree: Tree) -> None:
    tree.initramfs(NEXT_KERNEL, [f"usr/lib/firmware/nvidia/{OLD}/gsp_ga10x.bin"])
    verdict = only(judge(tree), "driver.initramfs_stale")
    assert (verdict.status, verdict.subject) == ("fail", f"kernel {NEXT_KERNEL}")
    assert f"firmware of {OLD} and not of {VERSION}" in verdict.message
    assert f"update-initramfs -u -k {NEXT_KERNEL}" in verdict.action


def test_an_initramfs_older_than_the_module_it_holds(tree: Tree) -> None:
    names = [f"usr/lib/modules/{KERNEL}/updates/dkms/nvidia.ko"]
    tree.initramfs(KERNEL, names)
    assert bad(judge(tree)) == []
    tree.initramfs(KERNEL, names, mtime=BOOT - 7200)
    assert (
        f"older than /lib/modules/{KERNEL}/updates/dkms/nvidia.ko"
        in only(judge(tree), "driver.initramfs_stale").message
    )


def test_an_initramfs_that_does_not_know_of_the_blacklist(tree: Tree) -> None:
    names = ["usr/lib/modules/x/kernel/drivers/gpu/drm/nouveau/nouveau.ko.zst"]
    tree.initramfs(NEXT_KERNEL, names, mtime=BOOT - 9000)
    verdict = only(judge(tree), "driver.initramfs_stale")
    assert "holds nouveau and is older than what blacklists it" in verdict.message


def test_an_initramfs_that_cannot_be_listed(tree: Tree) -> None:
    tree.initramfs(NEXT_KERNEL, None)
    verdict = only(judge(tree), "driver.initramfs_stale")
    assert (verdict.status, f"lsinitramfs /boot/initrd.img-{NEXT_KERNEL}" in verdict.action) == ("inconclusive", True)


def test_the_firmware_of_this_version_is_missing(tree: Tree) -> None:
    tree.remove("lib/firmware/nvidia/*")
    tree.firmware(OLD)
    verdict = only(judge(tree), "driver.firmware_missing")
    assert (verdict.status, verdict.subject) == ("fail", f"firmware {VERSION}")
    # Proprietary modules start older GPUs without it.
    assert only(judge(tree, flavour="proprietary"), "driver.firmware_missing").status == "warn"
    assert f"there is {OLD}" in verdict.message


def test_a_container_has_no_kernel_to_check(tree: Tree) -> None:
    tree.remove("boot")
    tree.remove("lib/modules")
    assert ("driver.dkms_missing", "skipped") in codes(judge(tree))


# Parameters and HMM


def test_a_parameter_that_is_live(tree: Tree) -> None:
    tree.write("/etc/modprobe.d/bedplate-nvidia.conf", "options nvidia-uvm uvm_disable_hmm=1\n")
    tree.write("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "Y\n")
    verdicts = judge(tree, cuda={**CUDA, "code": 3}, **HMM_OFF)
    assert ("driver.parameter", "pass") in codes(verdicts)
    assert "driver.hmm" not in [verdict.code for verdict in verdicts]
    assert only(verdicts, "driver.cuda_init").action.startswith("Look at `dmesg`")


def test_a_parameter_that_is_configured_and_not_live(tree: Tree) -> None:
    tree.write("/etc/modprobe.d/bedplate-nvidia.conf", "options nvidia-uvm uvm_disable_hmm=1\n")
    verdict = only(judge(tree, **HMM_OFF), "driver.parameter")
    assert (verdict.status, verdict.subject) == ("needs-reboot", "nvidia_uvm.uvm_disable_hmm")
    assert "/etc/modprobe.d/bedplate-nvidia.conf says 1" in verdict.message


@pytest.mark.parametrize(
    "options", ["", "options nvidia_uvm uvm_disable_hmm=0\n", "# options nvidia_uvm uvm_disable_hmm=1\n"]
)
def test_a_parameter_that_is_not_configured(tree: Tree, options: str) -> None:
    tree.write("/etc/modprobe.d/x.conf", options)
    verdict = only(judge(tree, **HMM_OFF), "driver.parameter")
    assert (verdict.status, "options nvidia_uvm uvm_disable_hmm=1" in verdict.action) == ("fail", True)


def test_a_parameter_of_a_module_that_loads_later(tree: Tree) -> None:
    tree.write("/etc/modprobe.d/x.conf", "options nvidia_uvm uvm_disable_hmm=1\n")
    tree.remove("sys/module/nvidia_uvm")
    verdicts = judge(tree, **HMM_OFF)
    assert bad(verdicts) == []
    (verdict,) = [v for v in verdicts if v.code == "driver.parameter"]
    assert verdict.status == "pass"
    assert verdict.message.endswith("says 1, and nvidia_uvm is not loaded yet.")


def test_a_parameter_of_nvidia_itself_is_not_in_sysfs(tree: Tree) -> None:
    tree.write("/etc/modprobe.d/x.conf", 'options nvidia NVreg_EnableMSI=0 NVreg_RegistryDwords="A=1;B=2"\n')
    wanted = {"parameters": {"nvidia": {"NVreg_EnableMSI": "0"}}}
    assert only(judge(tree, **wanted), "driver.parameter").status == "needs-reboot"


def test_cuinit_fails_with_3_while_hmm_is_on(tree: Tree) -> None:
    verdict = only(judge(tree, cuda={**CUDA, "code": 3}), "driver.hmm")
    assert (verdict.status, verdict.subject) == ("fail", "nvidia_uvm")
    assert 'driver.parameters.nvidia_uvm.uvm_disable_hmm to "1"' in verdict.action


# Automatic upgrades


@pytest.mark.parametrize(
    ("blacklist", "status"),
    [
        ('Unattended-Upgrade::Package-Blacklist {\n  "nvidia-";\n  "libnvidia-";\n};\n', "pass"),
        ('Unattended-Upgrade::Package-Blacklist:: "(lib)?nvidia.*";\n', "pass"),
        ('Unattended-Upgrade::Package-Blacklist:: "((lib)*nvidia)*";\n', "warn"),
        ('Unattended-Upgrade::Package-Blacklist:: "lib";\nUnattended-Upgrade::Package-Blacklist:: "nvidia";\n', "pass"),
        ('Unattended-Upgrade::Package-Blacklist {\n//  "nvidia-";\n//  "libnvidia-";\n};\n', "warn"),
        ("", "warn"),
    ],
)
def test_unattended_upgrades_may_change_the_driver(tree: Tree, blacklist: str, status: str) -> None:
    tree.unattended_upgrades(blacklist)
    (verdict,) = [verdict for verdict in judge(tree) if verdict.code == "driver.unattended_upgrades"]
    assert (verdict.status, verdict.subject) == (status, "unattended-upgrades")
    if status == "warn":
        assert "Package-Blacklist" in verdict.action


def test_packages_that_may_lag_behind_the_driver_do_not_matter(tree: Tree) -> None:
    tree.unattended_upgrades('Unattended-Upgrade::Package-Blacklist { "^nvidia-(utils|dkms)-580"; "libnvidia-"; };\n')
    status = tree.at("/var/lib/dpkg/status").read_text()
    stanza = "\nPackage: nvidia-settings\nStatus: install ok installed\nVersion: 510.47.03-0ubuntu4\n"
    tree.write("/var/lib/dpkg/status", status + stanza)
    assert ("driver.unattended_upgrades", "pass") in codes(judge(tree))
    wanted = judge(tree, packages={"nvidia-settings": "510.47.03-0ubuntu4"})
    assert ("driver.unattended_upgrades", "warn") in codes(wanted)


def test_held_packages_are_safe_from_automatic_upgrades(tree: Tree) -> None:
    tree.unattended_upgrades("")
    tree.packages(VERSION, status="hold ok installed")
    assert ("driver.unattended_upgrades", "pass") in codes(judge(tree))


# What cannot be read


def test_what_cannot_be_read_is_said(tree: Tree) -> None:
    tree.remove("proc/driver/nvidia/version")
    tree.at("/proc/driver/nvidia/version").mkdir()
    os.mkfifo(tree.at("/boot/vmlinuz-x"))
    verdict = only(judge(tree), "driver.unreadable")
    assert (verdict.status, verdict.subject) == ("inconclusive", "/proc/driver/nvidia/version")


def test_a_module_whose_version_is_not_to_be_had(tree: Tree) -> None:
    tree.write("/proc/driver/nvidia/version", "")
    tree.write("/sys/module/nvidia/version", "")
    assert ("driver.version", "inconclusive") in codes(judge(tree))


def test_a_module_of_nvidias_own_installer_is_found(tree: Tree) -> None:
    tree.remove(f"lib/modules/{NEXT_KERNEL}/updates")
    for name in MODULES:
        tree.module(NEXT_KERNEL, VERSION, name, place="kernel/drivers/video")
    assert bad(judge(tree)) == []


def test_a_live_value_that_cannot_be_read_is_not_taken_for_another_one(tree: Tree) -> None:
    tree.write("/etc/modprobe.d/x.conf", "options nvidia_uvm uvm_disable_hmm=1\n")
    tree.remove("sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
    tree.at("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm").mkdir()
    verdict = only(judge(tree, **HMM_OFF), "driver.parameter")
    assert (verdict.status, "does not show its value" in verdict.message) == ("warn", True)
