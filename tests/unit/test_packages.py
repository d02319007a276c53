"""Transactions are judged on what apt and dnf really print: see data/packages for where it comes from."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.node.packages import apt_query
from bedplate.node.packages import manage as packages
from bedplate.node.packages.apt_query import Apt, Candidate, PackageError, Plan, Record, Step

DATA = Path(__file__).parent / "data" / "packages"
DRIVER = (
    "nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libcuda1", "libnvidia-ml1", "libnvidia-cfg1", "nvidia-smi",
    "libnvidia-ptxjitcompiler1", "nvidia-persistenced", "nvidia-modprobe", "nvidia-kernel-support",
    "firmware-nvidia-gsp",
)  # fmt: skip


def text(name: str) -> str:
    return (DATA / f"{name}.txt").read_text()


def wanted(version: str) -> dict[str, str]:
    return dict.fromkeys(DRIVER, version)


def dpkg_line(name: str, version: str, status: str = "installed", essential: str = "no") -> str:
    return f"{name}\t{version}\t{status}\t{essential}\t1024\n"


@dataclass(frozen=True)
class Canned(Apt):
    """Answers commands from a table: the first key that the command line contains."""

    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def run(self, *command: str) -> tuple[int, str, str]:
        line = " ".join(command)
        self.asked.append(line)
        for part, (code, out) in self.answers.items():
            if part in line:
                return code, out, ""
        return 0, "", ""


def canned(simulation: str = "", *, code: int = 0, **answers: str) -> Canned:
    table = {"apt-get -s": (code, simulation)}
    names = {"dpkg": "dpkg-query", "show": "apt-cache show", "hold": "apt-mark showhold", "audit": "--audit"}
    names |= {"madison": "madison", "policy": "apt-cache policy"}
    return Canned(answers={**{names[key]: (0, value) for key, value in answers.items()}, **table})


@pytest.fixture(autouse=True)
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about apt whatever runs them."""
    monkeypatch.setattr(apt_query, "is_rpm", lambda: False)
    monkeypatch.setattr(packages, "is_rpm", lambda: False)


# ---- versions ----


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("580.82.07-0ubuntu1", "580.82.07"),
        ("580.82.07-1", "580.82.07"),
        ("1:535.216.03-2~bpo12+1", "535.216.03"),
        ("3:580.82.07-1.el9", "580.82.07"),
        ("13.0.2.14-1", "13.0.2.14"),
        ("20220217+3", "20220217+3"),
        ("1.0-beta-3", "1.0-beta"),
    ],
)
def test_upstream(version: str, expected: str) -> None:
    assert apt_query.upstream(version) == expected


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("575.57.08-1", "580.82.07-1"),
        ("580.82.07-1", "580.126.20-1"),
        ("535.216.03-2~bpo12+1", "535.216.03-2"),
        ("580.82.07-0ubuntu0.24.04.1", "580.82.07-0ubuntu1"),
        ("9:1.0", "10:0.1"),
        ("1.0~rc1", "1.0"),
        ("1.0a", "1.0+"),
    ],
)
def test_compare(older: str, newer: str) -> None:
    assert apt_query.compare(older, newer) == -1
    assert apt_query.compare(newer, older) == 1
    assert apt_query.compare(newer, newer) == 0


VERSIONS = st.from_regex(r"(?:[0-9]:)?[0-9][0-9a-c.+~]{0,6}(?:-[0-9a-c.+~]{1,4})?", fullmatch=True)


@pytest.mark.skipif(not shutil.which("dpkg"), reason="compares with dpkg, which is not installed")
@settings(max_examples=60, deadline=None)
@given(VERSIONS, VERSIONS)
def test_compare_agrees_with_dpkg(one: str, other: str) -> None:
    relation = {-1: "lt", 0: "eq", 1: "gt"}[apt_query.compare(one, other)]
    assert subprocess.run(["dpkg", "--compare-versions", one, relation, other], check=False).returncode == 0


# ---- what apt prints ----


@pytest.mark.parametrize(
    ("name", "actions", "before", "after"),
    [
        ("install", {"install": 11}, "", "580.82.07-1"),
        ("upgrade", {"upgrade": 11}, "580.82.07-1", "580.95.05-1"),
        ("downgrade", {"downgrade": 11}, "580.82.07-1", "575.57.08-1"),
        ("held", {"upgrade": 11}, "580.82.07-1", "580.95.05-1"),
        ("foreign", {"remove": 1, "install": 11}, "", "580.82.07-1"),
        ("kernel", {"install": 12}, "", "580.82.07-1"),
    ],
)
def test_parse_simulation(name: str, actions: dict[str, int], before: str, after: str) -> None:
    steps = apt_query.parse_simulation(text(name))
    found = [step.action for step in steps]
    assert {action: found.count(action) for action in found} == actions
    step = next(step for step in steps if step.name == "libcuda1")
    assert (step.before, step.after, step.origin) == (before, after, "NVIDIA CUDA:127.0.0.1")


def test_nothing_to_do_has_no_steps() -> None:
    assert apt_query.parse_simulation(text("nothing")) == ()


@given(st.text(alphabet="Inst Remv[]()\nabc-1.0 ", max_size=120))
def test_parse_simulation_takes_anything(output: str) -> None:
    for step in apt_query.parse_simulation(output):
        assert step.name
        assert step.before or step.after


@pytest.mark.parametrize(
    ("name", "code", "subject", "said"),
    [
        ("version_not_found", "packages.not_available", "nvidia-driver-cuda", "nvidia-driver-cuda 580.82.08-1"),
        ("unknown", "packages.not_available", "nope", "nope"),
        ("conflict", "packages.conflict", "nvidia-driver-cuda", "libcuda1 (= 580.95.05-1) but 590.44.01-1"),
    ],
)
def test_refusal(name: str, code: str, subject: str, said: str) -> None:
    with pytest.raises(PackageError) as error:
        apt_query.simulate({"nvidia-driver-cuda": "1"}, apt=canned(text(name), code=100))
    assert (error.value.code, error.value.subject) == (code, subject)
    assert said in error.value.message
    assert error.value.verdict("driver").status == "fail"


def test_simulate_takes_no_lock_and_changes_nothing() -> None:
    apt = canned(text("install"))
    apt_query.simulate(wanted("580.82.07-1"), apt=apt)
    command = apt.asked[0].split(" ")
    assert command[:2] == ["apt-get", "-s"]
    assert "Debug::NoLocking=true" in command
    assert "nvidia-driver-cuda=580.82.07-1" in command
    assert not any("allow-downgrades" in word for word in command)


def test_simulate_knows_sizes_and_sources() -> None:
    there = "".join(dpkg_line(name, "580.82.07-1") for name in DRIVER)
    plan = apt_query.simulate(wanted("580.95.05-1"), apt=canned(text("upgrade"), dpkg=there, show=text("show")))
    assert plan.records["nvidia-driver-cuda"].source == "nvidia-graphics-drivers"
    assert plan.download_bytes == 744 + 906
    assert plan.disk_bytes == 2 * 1024 - 11 * 1024 * 1024
    assert plan.installed == wanted("580.82.07-1")


def test_show_without_source_is_its_own_source() -> None:
    assert (
        apt_query.parse_show(text("show"), {"cuda-nvcc-13-0": "13.0.88-1"})["cuda-nvcc-13-0"].source == "cuda-nvcc-13-0"
    )


def test_madison() -> None:
    found = apt_query.candidates("nvidia-smi", canned(madison=text("madison")))
    assert [candidate.version for candidate in found] == ["590.44.01-1", "580.95.05-1", "580.82.07-1", "575.57.08-1"]
    assert found[0].site == "http://127.0.0.1:8099/debian12/x86_64 ./"


def test_policy() -> None:
    policies = apt_query.parse_policy(text("policy"))
    driver = policies["nvidia-driver-cuda"]
    assert (driver.installed, driver.candidate) == ("580.82.07-1", "580.82.07-1")
    assert driver.priorities["580.82.07-1"] == 1000
    assert driver.priorities["590.44.01-1"] == 500
    assert policies["cuda-nvcc-13-0"].installed == ""


def test_audit() -> None:
    assert apt_query.parse_audit(text("audit")) == ["nvidia-settings"]
    assert apt_query.parse_audit("") == []


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("install", {"install": 5}),
        ("upgrade", {"upgrade": 3}),
        ("downgrade", {"downgrade": 3}),
        ("remove", {"remove": 5}),
        ("nothing", {}),
        ("wrapped", {"install": 5}),
    ],
)
def test_parse_dnf(name: str, actions: dict[str, int]) -> None:
    steps = apt_query.parse_dnf(text(f"dnf_{name}"))
    found = [step.action for step in steps]
    assert {action: found.count(action) for action in found} == actions


def test_parse_dnf_versions() -> None:
    steps = apt_query.parse_dnf(text("dnf_downgrade"))
    assert Step("downgrade", "nvidia-driver-cuda", "", "3:575.57.08-1.el9", "cuda-rhel9-x86_64") in steps


def test_dnf_simulation_is_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt_query, "is_rpm", lambda: True)
    apt = Canned(answers={"dnf --assumeno": (1, text("dnf_install"))})
    names = {"nvidia-driver-cuda": "3:580.82.07-1.el9"}
    plan = apt_query.simulate(names, apt=apt)
    verdicts = packages.judge(plan, names, layer="driver")
    assert [verdict.code for verdict in verdicts] == ["packages.kernel_change"]
    assert verdicts[0].subject == "kernel-core"


# ---- one exact version ----

NVIDIA = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64  "
ARCHIVE = "http://archive.ubuntu.com/ubuntu noble-updates/restricted amd64"
KNOWN = [
    Candidate("580.126.20-1ubuntu1", NVIDIA),
    Candidate("580.82.07-0ubuntu1", NVIDIA),
    Candidate("580.82.07-0ubuntu0.24.04.1", ARCHIVE),
]


def test_choose_by_site_or_exact_version() -> None:
    assert apt_query.choose("x", "580.82.07", KNOWN, "developer.download.nvidia.com") == "580.82.07-0ubuntu1"
    assert apt_query.choose("x", "580.82.07-0ubuntu0.24.04.1", KNOWN) == "580.82.07-0ubuntu0.24.04.1"


@pytest.mark.parametrize(
    ("version", "known", "said"),
    [
        ("580.82.07", KNOWN, "several packages of version 580.82.07: 580.82.07-0ubuntu0.24.04.1, 580.82.07-0ubuntu1"),
        ("575.57.08", KNOWN, "There are: 580.126.20-1ubuntu1"),
        ("575.57.08", [], "No repository of the node has it."),
        # A prefix is not a version.
        ("580.82", KNOWN, "no version 580.82."),
    ],
)
def test_choose_refuses(version: str, known: list[Candidate], said: str) -> None:
    with pytest.raises(PackageError) as error:
        apt_query.choose("nvidia-open-580", version, known)
    assert error.value.code == "packages.not_available"
    assert said in error.value.message


def test_what_is_installed_needs_no_repository() -> None:
    """Mirrors prune; a node that has the version stays as it is."""
    exact, errors = apt_query.resolve_all(
        {"a": "580.82.07", "b": "580.82.07-1", "c": "575.57.08"},
        {"a": "580.82.07-1", "b": "580.82.07-1", "c": "580.82.07-1"},
        apt=canned(madison=""),
    )
    assert exact == {"a": "580.82.07-1", "b": "580.82.07-1"}
    assert [error.subject for error in errors] == ["c"]


# ---- judgements ----


def plan_of(name: str, show: str = "", **more: Any) -> Plan:
    steps = apt_query.parse_simulation(text(name))
    records = apt_query.parse_show(text(show), {s.name: s.after for s in steps}) if show else {}
    there = {step.name: step.before for step in steps if step.before}
    return Plan(steps, there, records, **more)


def codes(plan: Plan, names: dict[str, str], layer: str = "driver", **options: Any) -> list[str]:
    return [verdict.code for verdict in packages.judge(plan, names, layer=layer, **options)]


COMPUTE = dict.fromkeys(
    ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-kernel-support", "firmware-nvidia-gsp"), "580.82.07-1"
)


@pytest.mark.parametrize(
    ("plan", "names", "options", "expected"),
    [
        (plan_of("install"), wanted("580.82.07-1"), {}, ["packages.ok"]),
        (plan_of("upgrade"), wanted("580.95.05-1"), {}, ["packages.ok"]),
        (plan_of("downgrade"), wanted("575.57.08-1"), {}, ["packages.downgrade"]),
        (plan_of("downgrade"), wanted("575.57.08-1"), {"allow_downgrade": True}, ["packages.ok"]),
        # The meta package alone: what it brings is of the same version.
        (plan_of("install"), {"nvidia-driver-cuda": "580.82.07-1"}, {}, ["packages.ok"]),
        (plan_of("install"), wanted("580.95.05-1"), {}, ["packages.version_differs"]),
        (plan_of("kernel"), wanted("580.82.07-1"), {}, ["packages.kernel_change"]),
        (
            plan_of("kernel"),
            wanted("580.82.07-1"),
            {"allow_kernel_change": True},
            ["packages.kernel_change", "packages.ok"],
        ),
        (plan_of("foreign"), wanted("580.82.07-1"), {}, ["packages.removes_foreign"]),
        (plan_of("held", held=frozenset(["libcuda1"])), wanted("580.95.05-1"), {}, ["packages.held"]),
        (plan_of("transitional", "transitional_show"), COMPUTE, {}, ["packages.transitional"]),
        (plan_of("transitional_575"), {"nvidia-driver-575-open": "580.95.05-0ubuntu1"}, {}, ["packages.transitional"]),
    ],
)
def test_judge(plan: Plan, names: dict[str, str], options: dict[str, Any], expected: list[str]) -> None:
    assert codes(plan, names, **options) == expected


def test_a_meta_package_of_the_toolkit_drifts() -> None:
    verdict = packages.judge(plan_of("drift"), {"cuda-toolkit-13-0": "13.0.1-1"}, layer="toolkit")[0]
    assert verdict.code == "packages.unpinned"
    assert "49 packages" in verdict.message
    found = {step["name"]: step["after"] for step in verdict.evidence["packages"]}
    assert found["cuda-cudart-13-0"] == "13.0.96-1"


def test_every_leaf_named_is_accepted() -> None:
    plan = plan_of("drift")
    assert codes(plan, {step.name: step.after for step in plan.steps}, "toolkit") == ["packages.ok"]


def step(action: str, name: str, before: str = "", after: str = "") -> Step:
    return Step(action, name, before, after)


WANT = {"nvidia-driver-cuda": "580.82.07-1"}
COMES = step("install", "nvidia-driver-cuda", "", "580.82.07-1")


@pytest.mark.parametrize(
    ("steps", "more", "expected"),
    [
        # the driver's own package of the other flavour may go
        ([COMES, step("remove", "nvidia-kernel-dkms", "580.82.07-1")], {}, "packages.ok"),
        # ... but not one that the system needs, whatever its name
        (
            [COMES, step("remove", "nvidia-base", "1")],
            {"essential": frozenset(["nvidia-base"])},
            "packages.removes_foreign",
        ),
        # the container toolkit has the name of a driver's package
        ([COMES, step("remove", "nvidia-container-toolkit", "1.19.0-1")], {}, "packages.removes_foreign"),
        ([COMES, step("remove", "linux-image-amd64", "6.1.192-3")], {}, "packages.kernel_change"),
        # headers are what DKMS needs
        ([COMES, step("upgrade", "linux-headers-amd64", "6.1.1-1", "6.1.192-3")], {}, "packages.ok"),
        ([COMES, step("install", "linux-modules-nvidia-580-6.8.0-79-generic", "", "6.8.0-79.79")], {}, "packages.ok"),
        ([COMES, step("install", "linux-modules-6.8.0-80-generic", "", "6.8.0-80.80")], {}, "packages.kernel_change"),
        ([COMES, step("install", "cuda-cudart-13-0", "", "13.0.96-1")], {}, "packages.other_layer"),
        # helpers beside the driver have versions of their own
        ([COMES, step("install", "nvidia-support", "", "20220217+3~deb12u1")], {}, "packages.ok"),
        ([COMES, step("install", "nvidia-modprobe", "", "580.65.06-1")], {}, "packages.ok"),
        # the same driver's library at another version, as its source says
        (
            [COMES, step("install", "libcuda1", "", "580.95.05-1")],
            {"records": {n: Record("nvidia-graphics-drivers", "", 1, 1) for n in ("nvidia-driver-cuda", "libcuda1")}},
            "packages.version_differs",
        ),
        # another branch, whatever its source
        ([COMES, step("install", "libcuda1", "", "590.44.01-1")], {}, "packages.version_differs"),
        # the wanted one goes
        ([step("remove", "nvidia-driver-cuda", "580.82.07-1")], {}, "packages.version_differs"),
        ([], {"installed": {"nvidia-driver-cuda": "580.82.07-1"}}, "packages.ok"),
        ([], {}, "packages.version_differs"),
    ],
)  # fmt: skip
def test_rules(steps: list[Step], more: dict[str, Any], expected: str) -> None:
    assert codes(Plan(tuple(steps), **more), WANT)[0] == expected


@pytest.mark.parametrize(
    ("download", "disk", "said"),
    [
        (0, 0, "0.0 kB to download, +0.0 kB on disk."),
        (12_345, -27_600, "12.3 kB to download, -27.6 kB on disk."),
        (740_000_000, 2_100_000_000, "740.0 MB to download, +2.1 GB on disk."),
    ],
)
def test_a_plan_says_its_sizes(download: int, disk: int, said: str) -> None:
    plan = Plan((Step("install", "libcuda1", "", "580.82.07-1"),), download_bytes=download, disk_bytes=disk)
    assert packages.summary(plan) == f"1 package: 1 to install; {said}"


def test_a_toolkit_brings_no_driver() -> None:
    names = {"cuda-13-0": "13.0.1-1"}
    steps = (
        step("install", "cuda-13-0", "", "13.0.1-1"),
        step("install", "cuda-drivers-580", "", "580.95.05-0ubuntu1"),
    )
    assert codes(Plan(steps), names, "toolkit") == ["packages.other_layer"]


def test_own_patterns_replace_the_built_in_ones() -> None:
    steps = (COMES, step("remove", "site-gpu-monitor", "1.0-1"))
    assert codes(Plan(steps), WANT) == ["packages.removes_foreign"]
    assert codes(Plan(steps), WANT, own=["site-*"]) == ["packages.ok"]


def test_every_refusal_says_what_to_do() -> None:
    plan = plan_of("kernel")
    verdict = packages.judge(plan, wanted("580.82.07-1"), layer="driver")[0]
    assert verdict.subject == "linux-image-6.99.0-1-amd64"
    assert verdict.evidence["packages"][0]["after"] == "6.99.0-1"
    assert verdict.action


# ---- what keeps dpkg from working ----


def test_interrupted(tmp_path: Path) -> None:
    (tmp_path / "0001").write_text("")
    (tmp_path / "tmp.ci").write_text("")
    found = apt_query.interrupted(canned(audit=text("audit")), str(tmp_path))
    assert found == [f"{tmp_path}/0001", "nvidia-settings"]
    verdicts = packages.readiness("driver", canned(audit=text("audit")), updates=str(tmp_path), locks=())
    assert [verdict.code for verdict in verdicts] == ["packages.dpkg_interrupted"]
    assert "dpkg --configure -a" in verdicts[0].action


def test_nothing_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("")
    assert packages.readiness("driver", canned(), updates=str(tmp_path), locks=(str(tmp_path / "lock"),)) == []


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A lock file that another process holds."""
    path = tmp_path / "lock-frontend"
    path.write_text("")
    program = (
        "import fcntl,sys;f=open(sys.argv[1],'r+');fcntl.lockf(f,fcntl.LOCK_EX);print(1,flush=True);sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    yield path, holder.pid
    holder.communicate(b"")


def test_lock_holder_is_named_and_left_alone(locked: tuple[Path, int]) -> None:
    path, pid = locked
    holder = apt_query.lock_holder([str(path)])
    assert holder is not None
    assert holder["pid"] == pid
    assert holder["command"].startswith("python")
    verdict = packages.readiness("toolkit", canned(), updates=str(path.parent / "none"), locks=(str(path),))[0]
    assert (verdict.code, verdict.layer) == ("packages.locked", "toolkit")
    with path.open("r+") as file, pytest.raises(BlockingIOError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---- commands ----


def test_a_command_that_hangs_is_killed_with_its_children() -> None:
    started = time.monotonic()
    with pytest.raises(PackageError, match="did not end within"):
        # The grandchild holds the pipe, as apt's download methods do.
        Apt(timeout_s=0.3).ask("sh", "-c", "sleep 60 & sleep 60")
    assert time.monotonic() - started < 10


def test_a_command_that_fails_is_quoted() -> None:
    with pytest.raises(PackageError, match=r"sh: It ended with exit code 3: bad luck") as error:
        Apt().ask("sh", "-c", "echo bad luck >&2; exit 3")
    assert error.value.code == "packages.query_failed"


def test_a_command_that_is_missing() -> None:
    with pytest.raises(PackageError, match="cannot be run"):
        Apt().ask("bedplate-no-such-command")


def test_commands_speak_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de")
    out = Apt().ask("sh", "-c", "env")
    assert "LC_ALL=C\n" in out
    assert "LANG" not in out


# ---- afterwards ----


def test_installed_leaves_out_what_is_only_unpacked() -> None:
    there = dpkg_line("nvidia-smi", "1") + dpkg_line("libcuda1:amd64", "2") + dpkg_line("x", "3", "config-files")
    assert apt_query.installed(["nvidia-smi", "libcuda1", "x", "y"], canned(dpkg=there)) == {
        "nvidia-smi": "1",
        "libcuda1": "2",
    }


def test_installed_on_an_rpm_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt_query, "is_rpm", lambda: True)
    out = "package nope is not installed\nnvidia-driver-cuda\t3:580.82.07-1.el9\n"
    apt = Canned(answers={"rpm -q": (1, out)})
    assert apt_query.installed(["nvidia-driver-cuda", "nope"], apt) == {"nvidia-driver-cuda": "3:580.82.07-1.el9"}


def test_assert_installed() -> None:
    there = canned(dpkg=dpkg_line("nvidia-driver-cuda", "580.95.05-1"))
    verdict = packages.assert_installed(WANT, layer="driver", apt=there)[0]
    assert verdict.code == "packages.version_differs"
    assert "is 580.95.05-1, not 580.82.07-1" in verdict.message
    there = canned(dpkg=dpkg_line("nvidia-driver-cuda", "580.82.07-1"))
    assert packages.assert_installed(WANT, layer="driver", apt=there)[0].code == "packages.ok"


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (WANT, "packages.ok"),
        ({"nvidia-driver-cuda": "580.95.05-1"}, "packages.not_pinned"),
        # the only candidate, but nothing keeps it
        ({"cuda-nvcc-13-0": "13.0.88-1"}, "packages.not_pinned"),
        ({"nvidia-unheard-of": "1"}, "packages.not_pinned"),
    ],
)
def test_assert_pinned(names: dict[str, str], code: str) -> None:
    verdict = packages.assert_pinned(names, layer="driver", apt=canned(policy=text("policy")))[0]
    assert verdict.code == code
    assert verdict.status == ("pass" if code == "packages.ok" else "fail")


# ---- the module ----


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, str]]:
    """What the module's commands answer, by a part of the command line."""
    table: dict[str, tuple[int, str]] = {}
    # For a module the package has another name, as on a node.
    for name in ("apt_query", "manage"):
        monkeypatch.setattr(import_module(f"ansible.module_utils.bedplate.packages.{name}"), "is_rpm", lambda: False)
    judged = import_module("ansible.module_utils.bedplate.packages.manage")
    monkeypatch.setattr(judged.Apt, "run", lambda _, *command: Canned(answers=table).run(*command))
    monkeypatch.setattr(judged, "readiness", lambda *_: [])
    return table


def test_module_reports_the_plan(answers: dict[str, tuple[int, str]], run_module: Any) -> None:
    answers.update({"apt-get -s": (0, text("install")), "madison": (0, text("madison"))})
    names = {"nvidia-driver-cuda": "580.82.07", "nvidia-smi": "580.82.07-1"}
    result = run_module("bedplate_packages", layer="driver", packages=names, check=True, diff=True)
    assert result["changed"] is True
    assert result["packages"] == {"nvidia-driver-cuda": "580.82.07-1", "nvidia-smi": "580.82.07-1"}
    assert result["verdicts"][0]["code"] == "packages.ok"
    assert result["msg"].startswith("11 packages: 11 to install; ")
    assert "libcuda1 580.82.07-1\n" in result["diff"]["after"]


def test_module_fails_with_the_first_refusal(answers: dict[str, tuple[int, str]], run_module: Any) -> None:
    answers.update({"apt-get -s": (0, text("kernel")), "madison": (0, text("madison"))})
    names = {"nvidia-driver-cuda": "580.82.07-1"}
    result = run_module("bedplate_packages", layer="driver", packages=names)
    assert result["failed"] is True
    assert result["msg"].startswith("linux-image-6.99.0-1-amd64: The transaction would change a kernel")
    assert result["plan"]["steps"]
    assert not run_module("bedplate_packages", layer="driver", packages=names, strict=False).get("failed")


def test_module_lists_what_there_is(answers: dict[str, tuple[int, str]], run_module: Any) -> None:
    answers.update({"madison": (0, text("madison"))})
    names = {"nvidia-driver-cuda": "580.82.08", "nvidia-smi": "580.82.07"}
    result = run_module("bedplate_packages", action="resolve", layer="driver", packages=names, strict=False)
    assert result["packages"] == {"nvidia-smi": "580.82.07-1"}
    assert [verdict["code"] for verdict in result["verdicts"]] == ["packages.not_available"]
    assert "575.57.08-1" in result["msg"]
    assert result["changed"] is False


def test_module_compares_after_a_change(answers: dict[str, tuple[int, str]], run_module: Any) -> None:
    answers.update({"dpkg-query": (0, dpkg_line("nvidia-driver-cuda", "580.82.07-1"))})
    answers.update({"apt-cache policy": (0, text("policy"))})
    result = run_module("bedplate_packages", action="assert", layer="driver", packages=WANT, pinned=True)
    assert [verdict["code"] for verdict in result["verdicts"]] == ["packages.ok", "packages.ok"]
    assert result["installed"] == WANT


def test_module_says_what_it_could_not_ask(answers: dict[str, tuple[int, str]], run_module: Any) -> None:
    answers.update({"dpkg-query": (2, "dpkg-query: error: parsing file '/var/lib/dpkg/status'")})
    result = run_module("bedplate_packages", action="installed", layer="driver", packages=WANT)
    assert result["failed"] is True
    assert result["verdicts"][0]["code"] == "packages.query_failed"
    assert os.sep + "var" in result["msg"]
