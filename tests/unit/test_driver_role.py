"""What the role nvidia_driver does on a node, and in which order; each module has a stand-in (driver_role.py)."""

from __future__ import annotations

from base64 import b64encode
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


# ---- a change of the parameters alone ----

NOW = dict.fromkeys(FOUND, "580.82.07-1")
HMM = {"nvidia_uvm": {"uvm_disable_hmm": "1"}}
WANTED = {"driver": {"version": "580.82.07", "flavour": "open", "parameters": HMM}, "expect": {}}
UNWRITTEN = verdict("driver.parameter", loaded=True, live="N", wanted="1")
ANNOUNCE, WRITE = "Write down what the driver changes to", "Set the parameters of the kernel modules"
LIVE, IDLE = "Ask which of them are live, and which of the wanted ones", "Ask whether processes use the GPUs"
BOOTS = "Ask whether what is installed is what would boot"
BUSY = {"failed": True, "status": "fail", "msg": "in use", "verdicts": [verdict("driver.gpu_in_use")]}
AHEAD = {LIVE: {"verdicts": [UNWRITTEN]}, BOOTS: {"verdicts": [verdict("driver.parameter", "needs-reboot")]}}


def test_parameters_are_announced_before_they_are_written(tmp_path: Path) -> None:
    """Without that, a failure after the boot finds nothing to undo."""
    journal = {"is": driver("580.82.07"), "to": None}
    done = run_role(
        tmp_path, installed=NOW, journal=journal, answers=AHEAD, bedplate_plan=WANTED, nvidia_driver_reboot=True
    )
    assert done.code == 0, done.output
    (announced,) = done.of(ANNOUNCE)
    assert announced.arguments["record"]["parameters"] == HMM
    places = [done.tasks.index(task) for task in (IDLE, ANNOUNCE, WRITE, BOOTS, "Reboot", "Verify")]
    assert places == sorted(places)
    assert done.tasks.count(IDLE) == 2, "before anything is written, and before the boot"


@pytest.mark.parametrize(
    ("packages", "journal"),
    [
        ({}, {"is": driver("580.82.07"), "to": None}),
        (HMM, {"is": driver("575.57.08"), "to": driver("580.82.07", parameters=HMM)}),
    ],
    ids=["parameters", "the-run-after-reboot-required"],
)
def test_no_boot_while_processes_use_the_gpus(
    tmp_path: Path, packages: dict[str, object], journal: dict[str, object]
) -> None:
    done = run_role(
        tmp_path, installed=NOW, journal=journal, answers={**AHEAD, IDLE: BUSY}, bedplate_plan=WANTED,
        nvidia_driver_reboot=True,
    )  # fmt: skip
    assert done.code == 2
    assert done.tasks[-1] == IDLE
    assert not {ANNOUNCE, WRITE, "Reboot"} & set(done.tasks), "nothing to undo"


def test_processes_that_came_during_the_installation_keep_the_node_from_its_boot(tmp_path: Path) -> None:
    waits = {BOOTS: {"verdicts": [verdict("driver.reboot_pending", "needs-reboot")]}}
    done = run_role(tmp_path, installed=OLD, answers={**waits, IDLE: BUSY}, nvidia_driver_reboot=True)
    assert done.code == 2
    assert done.tasks[-1] == IDLE
    assert INSTALL in done.tasks
    assert "Reboot" not in done.tasks


def test_a_driver_taken_over_as_it_is_may_be_in_use(tmp_path: Path) -> None:
    done = run_role(tmp_path, installed=NOW, answers={IDLE: BUSY}, nvidia_driver_reboot=True)
    assert done.code == 0, done.output
    assert ANNOUNCE in done.tasks
    assert IDLE not in done.tasks


@pytest.mark.parametrize("live", ["Y", "N"])
def test_the_way_back_takes_away_a_parameter_and_boots_where_it_is_live(tmp_path: Path, live: str) -> None:
    """It is in no record that is verified: only the file that is about to change tells."""
    text = b64encode(b"# comment\noptions nvidia_uvm uvm_disable_hmm=1\n").decode()
    dropped = verdict("driver.parameter", "pass" if live == "Y" else "needs-reboot", live=live)
    answers = {
        "Read the parameters that are configured": {"content": text},
        LIVE: {"verdicts": [{**dropped, "subject": "nvidia_uvm.uvm_disable_hmm"}]},
        IDLE: BUSY,
    }
    done = run_role(
        tmp_path, installed=NOW, entry="rollback", answers=answers, nvidia_driver_reboot=True,
        nvidia_driver_wanted=driver("580.82.07"),
    )  # fmt: skip
    assert done.code == 0, done.output
    (asked,) = done.of(LIVE)
    assert asked.arguments["driver"]["parameters"] == HMM
    assert "Remove parameters that the profile no longer has" in done.tasks
    assert ("Reboot" in done.tasks) is (live == "Y")


# ---- what is refused leaves nothing ----

REFUSE, PIN = (
    "Refuse what is more, less or other than the pinned driver",
    "Move the pin before any source can offer something newer",
)
REFUSED = {
    "Ask apt what it would do": {
        "packages": {},
        "plan": {"steps": []},
        "verdicts": [verdict("packages.kernel_change")],
    },
    REFUSE: {"failed": True, "msg": "no"},
}


def test_what_apt_refuses_is_not_announced(tmp_path: Path) -> None:
    """What is announced is undone: the way back would write pins for a driver that is the operator's."""
    done = run_role(tmp_path, installed=OLD, answers=REFUSED)
    assert done.code == 2
    assert done.tasks[-1] == REFUSE
    assert not {ANNOUNCE, PIN} & set(done.tasks)


@pytest.mark.parametrize("variables", [{}, {"nvidia_driver_source": "distro"}], ids=["nvidia", "distro"])
def test_a_change_is_announced_right_before_the_pin_moves(tmp_path: Path, variables: dict[str, str]) -> None:
    done = run_role(tmp_path, installed=OLD, **variables)
    assert ANNOUNCE in done.tasks, done.output
    first = done.of(ANNOUNCE)[0].arguments
    assert done.tasks[done.tasks.index(ANNOUNCE) + 1] == PIN
    assert first["found"]["packages"] == OLD
    assert first["record"]["packages"] == ({} if variables else NOW)


@pytest.mark.parametrize(
    ("installed", "found"),
    [({}, {}), (dict.fromkeys(("nvidia-driver-cuda", "libnvidia-ml"), "3:575.57.08-1.el9"), "575.57.08")],
    ids=["bare", "older"],
)
def test_rhel_announces_after_the_key_was_checked(tmp_path: Path, installed: dict[str, str], found: object) -> None:
    done = run_role(tmp_path, installed=installed, system=("Rocky", "9"))
    assert done.code == 0, done.output
    (announced,) = done.of(ANNOUNCE)
    was = announced.arguments["found"]
    assert (was["version"] if was else was) == found, "a node without a driver has none to go back to"
    places = [
        done.tasks.index(task)
        for task in ("Put the key into place, once it is the pinned one", ANNOUNCE, "Add the repository")
    ]
    assert places == sorted(places)


# ---- headers ----

ASK, FETCH = (
    "Ask what stands in the way, headers aside",
    "Fetch the package lists, which a host may lack or have from before its kernel",
)
JUDGE, HEADERS = "Judge whether the driver may be changed now", "Install the headers of each kernel"
MISSING = [verdict("driver.headers_missing", package=f"linux-headers-6.1.0-{number}-amd64") for number in (40, 41)]


def test_headers_are_installed_one_by_one_from_lists_that_were_fetched(tmp_path: Path) -> None:
    """One kernel's headers that have left the archive keep those of the others from nothing."""
    answers = {ASK: {"verdicts": MISSING}, HEADERS: [{"failed": True, "msg": "no package"}, {}]}
    done = run_role(tmp_path, installed=OLD, answers=answers, nvidia_driver_wait_for_gpus_s=60)
    assert done.code == 0, done.output
    assert [call.arguments["name"] for call in done.of(HEADERS)] == [item["evidence"]["package"] for item in MISSING]
    places = [done.tasks.index(task) for task in (ASK, FETCH, HEADERS, JUDGE)]
    assert places == sorted(places)
    assert [done.of(task)[0].arguments["gpu_wait"] for task in (ASK, JUDGE)] == [60, 0]


def test_headers_are_not_installed_for_a_change_that_is_refused(tmp_path: Path) -> None:
    refused = {"failed": True, "msg": "in use"}
    answers = {ASK: {"verdicts": [*MISSING, verdict("driver.gpu_in_use")]}, JUDGE: refused}
    done = run_role(tmp_path, installed=OLD, answers=answers)
    assert done.code == 2
    assert done.tasks[-1] == JUDGE
    assert not {FETCH, HEADERS} & set(done.tasks)


# ---- what is left of the driver before ----


def test_each_leftover_is_judged_alone(tmp_path: Path) -> None:
    """One that somebody's package needs stays, and keeps none of the others."""
    installed = {**OLD, "nvidia-firmware-575-575.57.08": "575.57.08-1", "libnvidia-extra-575": "575.57.08-1"}
    drags = {"stdout_lines": ["Remv libnvidia-extra-575 [575.57.08-1]", "Remv somebodys-own [1]"]}
    alone = {"stdout_lines": ["Remv nvidia-firmware-575-575.57.08 [575.57.08-1]"]}
    done = run_role(tmp_path, installed=installed, answers={"Ask apt what else would go with it": [drags, alone]})
    assert done.code == 0, done.output
    removed = [call.arguments["name"] for call in done.of("Remove it, unless something else would go")]
    assert removed == ["nvidia-firmware-575-575.57.08"]
