"""What the role nvidia_driver does on a node, and in which order; each module has a stand-in (driver_role.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver_role import FOUND, driver, run_role, verdict

OLD = dict.fromkeys(FOUND, "575.57.08-1")
INSTALL = "Install exactly these packages in one transaction"
BUILD = "Build the modules for each of them"


# ---- modules for every kernel that can boot ----


@pytest.mark.parametrize("system", [("Debian", "12"), ("Rocky", "9")])
def test_modules_are_built_for_every_kernel_that_can_boot(tmp_path: Path, system: tuple[str, str]) -> None:
    """DKMS by itself builds for the running and the newest one; the kernel before that is kept by most hosts."""
    lacks = verdict("driver.dkms_missing", kernel="6.1.0-40-amd64", dkms=[{"module": "nvidia"}])
    prebuilt = verdict("driver.dkms_missing", kernel="6.1.0-41-amd64", dkms=[])
    done = run_role(
        tmp_path,
        installed=OLD,
        system=system,
        answers={"Ask which kernels that can boot lack the modules": {"verdicts": [lacks, prebuilt]}},
    )
    assert done.code == 0, done.output
    assert [call.arguments["argv"] for call in done.of(BUILD)] == [["dkms", "autoinstall", "-k", "6.1.0-40-amd64"]]
    after, initramfs = done.tasks.index(BUILD), done.tasks.index("Rebuild the initramfs of every kernel")
    assert done.tasks.index(INSTALL) < after < initramfs < done.tasks.index("Verify")


def test_dkms_is_told_to_build_for_all_kernels(tmp_path: Path) -> None:
    audit = {"stdout": "nvidia-kernel-open-dkms is only half configured"}
    done = run_role(tmp_path, installed=OLD, answers={"Ask dpkg what is not finished": audit})
    assert done.code == 0, done.output
    for task in (INSTALL, "Finish it"):
        (call,) = done.of(task)
        assert call.environment == {"DEBIAN_FRONTEND": "noninteractive", "autoinstall_all_kernels": "yes"}


def test_nothing_is_built_where_no_package_changed(tmp_path: Path) -> None:
    done = run_role(tmp_path, installed=dict.fromkeys(FOUND, "580.82.07-1"), journal={"is": driver("580.82.07")})
    assert done.code == 0, done.output
    assert not {BUILD, INSTALL, "Ask which kernels that can boot lack the modules"} & set(done.tasks)
