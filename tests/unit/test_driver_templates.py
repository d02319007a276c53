"""What the role nvidia_driver writes and asks for, on each system: its variables and templates as Ansible renders them.

RHEL and Ubuntu have no node in the tests; this is where their names, versions and files are held to what is known.
"""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import filter_loader
from ansible.template import Templar, trust_as_template
from bedplate_apt import bedplate_archive_sources, bedplate_driver_found
from bedplate_parameters import bedplate_dropped_parameters
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "nvidia_driver"
LOADER = DataLoader()
FILES = {
    name: LOADER.load_from_file(str(ROLE / name / "main.yml"), trusted_as_template=True)
    for name in ("defaults", "vars")
}
filter_loader.add_directory(str(ROOT / "filter_plugins"))

SYSTEMS = {
    "debian12": ("Debian", "12", "12.15", "apt"),
    "debian13": ("Debian", "13", "13.2", "apt"),
    "ubuntu2204": ("Ubuntu", "22", "22.04", "apt"),
    "ubuntu2404": ("Ubuntu", "24", "24.04", "apt"),
    "rhel9": ("RedHat", "9", "9.6", "dnf"),
    "rocky9": ("Rocky", "9", "9.6", "dnf"),
    "fedora42": ("Fedora", "42", "42", "dnf5"),
}
NOTHING = {"version": "", "flavour": "", "packages": {}, "prebuilt": {}, "broken": {}, "built": []}


def host(system: str, version: str = "580.82.07", **variables: Any) -> Templar:
    """Return a templar with the role's variables for one host."""
    distribution, major, full, manager = SYSTEMS[system]
    profile = {"version": version, "flavour": "open", "parameters": {"nvidia_uvm": {"uvm_disable_hmm": "1"}}}
    given_variables = {
        "ansible_facts": {
            "distribution": distribution,
            "distribution_major_version": major,
            "distribution_version": full,
            "pkg_mgr": manager,
        },
        "ansible_managed": "Written by Bedplate.",
        "ansible_check_mode": False,
        "inventory_hostname": "gpu-01",
        "bedplate_driver_source": "nvidia",
        "bedplate_plan": {"driver": profile, "expect": {"gpus": 8}},
        "bedplate_expected_gpus": -1,
        "__nvidia_driver_found": NOTHING,
        **variables,
    }
    everything = {**FILES["defaults"], **FILES["vars"], **given_variables}
    everything.setdefault("__nvidia_driver_record", everything["__nvidia_driver_target"])
    return Templar(loader=LOADER, variables=everything)


def value(templar: Templar, name: str) -> Any:
    return templar.template(trust_as_template("{{ " + name + " }}"))


def render(templar: Templar, name: str) -> str:
    text: str = templar.template(trust_as_template((ROLE / "templates" / name).read_text()))
    return text


def record(
    version: str = "580.82.07-1", names: tuple[str, ...] = ("libcuda1", "nvidia-kernel-open-dkms")
) -> dict[str, Any]:
    parameters = {"nvidia_uvm": {"uvm_disable_hmm": "1"}, "nvidia": {"b": "2", "a": "1"}}
    return {"version": version.split("-")[0], "parameters": parameters, "packages": dict.fromkeys(names, version)}


# ---- packages and repositories ----


@pytest.mark.parametrize(
    ("system", "version", "source", "expected"),
    [
        ("debian12", "580.82.07", "nvidia", ["nvidia-driver-cuda", "nvidia-kernel-open-dkms"]),
        ("debian12", "535.261.03", "distro", ["libcuda1", "libnvidia-ml1", "nvidia-open-kernel-dkms", "nvidia-smi"]),
        (
            "ubuntu2404",
            "580.82.07",
            "nvidia",
            [
                "libnvidia-cfg1-580",
                "libnvidia-compute-580",
                "nvidia-compute-utils-580",
                "nvidia-dkms-580-open",
                "nvidia-utils-580",
            ],
        ),
        (
            "ubuntu2404",
            "590.44.01",
            "nvidia",
            ["libnvidia-cfg1", "libnvidia-compute", "nvidia-compute-utils", "nvidia-dkms-open", "nvidia-utils"],
        ),
        (
            "ubuntu2404",
            "590.44.01",
            "distro",
            [
                "libnvidia-cfg1-590",
                "libnvidia-compute-590",
                "nvidia-compute-utils-590",
                "nvidia-dkms-590-open",
                "nvidia-utils-590",
            ],
        ),
    ],
)  # fmt: skip
def test_names_of_packages(system: str, version: str, source: str, expected: list[str]) -> None:
    """From branch 590 on NVIDIA's names have no branch, and Canonical's still do; the wrong ones find nothing."""
    assert value(host(system, version, bedplate_driver_source=source), "__nvidia_driver_names") == expected


def test_names_given_by_the_operator() -> None:
    templar = host(
        "ubuntu2404",
        nvidia_driver_packages=["nvidia-headless-{branch}-open"],
        nvidia_driver_extra_packages=["libnvidia-decode-{branch}"],
    )
    assert value(templar, "__nvidia_driver_names") == ["libnvidia-decode-580", "nvidia-headless-580-open"]


@pytest.mark.parametrize(
    ("system", "path", "fingerprint"),
    [
        ("ubuntu2204", "ubuntu2204/x86_64/", "EB693B3035CD5710E231E123A4B469963BF863CC"),
        ("ubuntu2404", "ubuntu2404/x86_64/", "EB693B3035CD5710E231E123A4B469963BF863CC"),
        ("debian12", "debian12/x86_64/", "EB693B3035CD5710E231E123A4B469963BF863CC"),
        ("debian13", "debian13/x86_64/", "02182E60104FCDC26EAE1B8597A5D4CB8793F200"),
        ("rhel9", "rhel9/x86_64/", "610C7B14E068A878070DA4E99CD0A493D42D0685"),
        ("rocky9", "rhel9/x86_64/", "610C7B14E068A878070DA4E99CD0A493D42D0685"),
    ],
)
def test_repository_of_each_system(system: str, path: str, fingerprint: str) -> None:
    templar = host(system)
    assert (
        value(templar, "__nvidia_driver_repository_url")
        == f"https://developer.download.nvidia.com/compute/cuda/repos/{path}"
    )
    assert value(templar, "__nvidia_driver_fingerprint") == fingerprint


def test_a_mirror_and_its_own_key() -> None:
    templar = host(
        "debian12", nvidia_driver_repository="http://mirror/x/", nvidia_driver_key_fingerprint="ab cd" + "0" * 36
    )
    text = render(templar, "nvidia.sources.j2")
    assert "URIs: http://mirror/x/debian12/x86_64/\nSuites: /\n" in text
    assert "Signed-By: /etc/apt/keyrings/bedplate-nvidia.asc\n" in text
    assert value(templar, "__nvidia_driver_fingerprint") == "ABCD" + "0" * 36


@pytest.mark.parametrize(
    ("system", "source", "flavour", "words"),
    [
        ("ubuntu2404", "nvidia", "open", ""),
        ("debian13", "distro", "open", ""),
        ("rhel9", "nvidia", "open", ""),
        ("rhel9", "distro", "open", "from the source nvidia only"),
        ("rhel9", "nvidia", "proprietary", "the open kernel modules"),
        ("fedora42", "nvidia", "open", "for rhel42. Set nvidia_driver_source to none"),
    ],
)
def test_refusals(system: str, source: str, flavour: str, words: str) -> None:
    templar = host(system, bedplate_driver_source=source, nvidia_driver_flavour=flavour)
    refusal = value(templar, "__nvidia_driver_refusal")
    assert words in refusal
    assert bool(words) == bool(refusal)


# ---- what holds the driver ----


def test_pins_are_exact_and_apt_reads_them(tmp_path: Path) -> None:
    packages = {"libcuda1": "535.216.03-2~bpo12+1", "nvidia-open-kernel-dkms": "535.216.03-1"}
    text = render(
        host("debian12", __nvidia_driver_record={"version": "535.216.03", "packages": packages}), "preferences.j2"
    )
    assert re.findall(r"^Pin: (.*)$", text, re.MULTILINE) == ["version 535.216.03-1", "version 535.216.03-2~bpo12+1"]
    assert text.count("Pin-Priority: 1000\n") == 2
    assert all("src:*nvidia*:any" in line for line in re.findall(r"^Package: (.*)$", text, re.MULTILINE))
    path = tmp_path / "x.pref"
    path.write_text(text)
    done = subprocess.run(
        ["apt-cache", "-o", f"Dir::Etc::preferences={path}", "-o", "Dir::Etc::preferencesparts=/dev/null", "policy"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_before_the_exact_version_is_known_any_revision_of_it_is_pinned() -> None:
    assert value(host("ubuntu2404"), "__nvidia_driver_pinned") == ["580.82.07-*"]
    named = host("ubuntu2404", nvidia_driver_package_version="580.82.07-0ubuntu1")
    assert value(named, "__nvidia_driver_pinned") == ["580.82.07-0ubuntu1"]


def test_the_names_of_our_files_are_ones_that_apt_reads() -> None:
    """apt ignores a preferences file with another extension than .pref, and says nothing."""
    templar = host("debian12")
    assert value(templar, "__nvidia_driver_pin_file").endswith(".pref")
    assert re.fullmatch(r"[\w-]+", Path(value(templar, "__nvidia_driver_upgrades_file")).name)
    assert Path(value(templar, "__nvidia_driver_source_file")).suffix == ".sources"


def test_unattended_upgrades_is_told_and_apt_reads_it(tmp_path: Path) -> None:
    text = render(
        host("debian12", __nvidia_driver_record=record(names=("libstdc++x", "libcuda1"))), "unattended-upgrades.j2"
    )
    path = tmp_path / "52x"
    path.write_text(text)
    done = subprocess.run(["apt-config", "-c", str(path), "dump"], capture_output=True, text=True, check=True)
    patterns = re.findall(r'^Unattended-Upgrade::Package-Blacklist:: "(.*)";$', done.stdout, re.MULTILINE)
    assert [name for name in ("libcuda1", "libstdc++x", "libcuda11") if any(re.match(p, name) for p in patterns)] == [
        "libcuda1",
        "libstdc++x",
    ]


def test_parameters_of_the_modules() -> None:
    lines = render(host("debian12", __nvidia_driver_record=record()), "modprobe.conf.j2").splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "options nvidia a=1 b=2",
        "options nvidia_uvm uvm_disable_hmm=1",
    ]


def test_parameters_that_are_taken_away() -> None:
    text = render(host("debian12", __nvidia_driver_record=record()), "modprobe.conf.j2")
    assert bedplate_dropped_parameters(text, record()["parameters"]) == {"parameters": {}, "subjects": []}
    assert bedplate_dropped_parameters(text, {"nvidia-uvm": {"uvm_disable_hmm": "0"}, "nvidia": {"a": "3"}}) == {
        "parameters": {"nvidia": {"b": "2"}},
        "subjects": ["nvidia.b"],
    }
    assert bedplate_dropped_parameters("", {}) == {"parameters": {}, "subjects": []}


# ---- due or not ----


@pytest.mark.parametrize(
    ("found", "variables", "due"),
    [
        (NOTHING, {}, True),
        ({}, {}, False),
        ({"version": "575.57.08"}, {}, True),
        ({"flavour": "proprietary"}, {}, True),
        ({"packages": {"nvidia-driver-cuda": "580.82.07-1"}}, {}, True),
        ({}, {"nvidia_driver_package_version": "580.82.07-1"}, False),
        ({}, {"nvidia_driver_package_version": "580.82.07-2"}, True),
        ({}, {"nvidia_driver_wanted": {"packages": {"libcuda1": "580.82.07-1"}}}, False),
        ({}, {"nvidia_driver_wanted": {"packages": {"libcuda1": "580.82.07-2"}}}, True),
        ({}, {"nvidia_driver_wanted": {"packages": {"libnvidia-cfg1": "580.82.07-1"}}}, True),
    ],
)
def test_packages_change_only_when_they_differ(found: dict[str, Any], variables: dict[str, Any], due: bool) -> None:
    names = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libcuda1")
    there = {**NOTHING, "version": "580.82.07", "flavour": "open", "packages": dict.fromkeys(names, "580.82.07-1")}
    there |= found
    if "nvidia_driver_wanted" in variables:
        variables["nvidia_driver_wanted"] |= {"version": "580.82.07", "flavour": "open", "source": "nvidia"}
    templar = host("debian12", __nvidia_driver_found=there, **variables)
    assert value(templar, "__nvidia_driver_differs") is due


def test_only_a_rollback_or_a_variable_allows_to_go_down() -> None:
    assert value(host("debian12"), "__nvidia_driver_downgrade") is False
    assert value(host("debian12", nvidia_driver_allow_downgrade="true"), "__nvidia_driver_downgrade") is True
    assert value(host("debian12", nvidia_driver_wanted=record()), "__nvidia_driver_downgrade") is True


def test_check_mode_names_the_other_branch_of_what_is_installed() -> None:
    """The distribution's pin has not moved in check mode: without these names apt would see a conflict and no plan."""
    packages = dict.fromkeys(
        ("nvidia-firmware-575-575.57.08", "libnvidia-compute-575", "nvidia-modprobe"), "575.57.08-0ubuntu1"
    )
    there = {**NOTHING, "version": "575.57.08", "packages": packages}
    variables = {"__nvidia_driver_found": there, "ansible_check_mode": True, "nvidia_driver_source": "distro"}
    asked = value(host("ubuntu2404", **variables), "__nvidia_driver_asked")
    assert asked["nvidia-firmware-580-580.82.07"] == "580.82.07"
    assert {"libnvidia-compute-580", "nvidia-modprobe", "nvidia-dkms-580-open"} <= asked.keys()
    assert not [name for name in asked if "575" in name]
    # NVIDIA's repository is looked at with the pin that it will have: apt moves the others by itself.
    asked = value(host("ubuntu2404", **{**variables, "nvidia_driver_source": "nvidia"}), "__nvidia_driver_asked")
    assert set(asked) == set(value(host("ubuntu2404"), "__nvidia_driver_names"))


def test_a_repository_is_looked_at_before_it_is_added_but_not_on_the_way_back() -> None:
    assert value(host("debian12"), "__nvidia_driver_previewed") is True
    assert value(host("debian12", nvidia_driver_source="distro"), "__nvidia_driver_previewed") is False
    assert value(host("debian12", nvidia_driver_wanted=record()), "__nvidia_driver_previewed") is False


def test_what_dpkg_left_unpacked_is_finished_and_not_asked_for() -> None:
    """Killed between two packages: one is unpacked at the new version, and apt has no step for it."""
    packages = dict.fromkeys(("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libnvidia-ml1"), "575.57.08-1")
    there = {**NOTHING, "version": "575.57.08", "packages": packages, "broken": {"libcuda1": "580.82.07-1"}}
    plan = {"packages": dict.fromkeys(packages, "580.82.07-1"), "plan": {"steps": []}}
    templar = host("debian12", __nvidia_driver_found=there, __nvidia_driver_plan=plan)
    assert set(value(templar, "__nvidia_driver_asked")) == set(packages)
    assert value(templar, "__nvidia_driver_planned") == dict.fromkeys([*packages, "libcuda1"], "580.82.07-1")


# ---- what others installed beside it ----

COMPANIONS = ("libnvidia-nscq", "nvidia-fabricmanager", "nvidia-imex")
SET = ("libcuda1", "libnvidia-ml1", "nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-firmware-580-580.82.07")


def beside(**others: str) -> dict[str, Any]:
    """Return the driver 580.82.07 with companions and ``others``, each name with its source package."""
    sources = {**dict.fromkeys(SET, "nvidia-graphics-drivers"), **{name: name for name in COMPANIONS}}
    sources |= {name.replace("_", "-"): source for name, source in others.items()}
    return bedplate_driver_found(f"installed\t{name}\t580.82.07-1\t{source}" for name, source in sources.items())


def test_what_must_have_the_drivers_version_moves_with_it_or_is_refused_by_name() -> None:
    """nvidia-fabricmanager starts with a driver of exactly its version; apt says which of them has no such one."""
    moves = host("debian12", "580.95.05", __nvidia_driver_found=beside(nvidia_settings="nvidia-settings"),
                 nvidia_driver_package_version="580.95.05-1")  # fmt: skip
    asked = value(moves, "__nvidia_driver_asked")
    assert {name: asked[name] for name in COMPANIONS} == dict.fromkeys(COMPANIONS, "580.95.05")
    assert "nvidia-settings" not in asked
    named = bedplate_driver_found(listed({"libcuda1": "575.57.08-1", "nvidia-fabricmanager-575": "575.57.08-1"}))
    assert "nvidia-fabricmanager-580" in value(host("debian12", __nvidia_driver_found=named), "__nvidia_driver_asked")
    assert not set(COMPANIONS) & set(value(host("debian12"), "__nvidia_driver_asked"))


@pytest.mark.parametrize(("source", "gone"), [("of-others", []), ("nvidia-graphics-drivers", ["libnvidia-extra"])])
def test_only_what_is_the_drivers_own_is_left_of_it(source: str, gone: list[str]) -> None:
    found = beside(libnvidia_extra=source, nvidia_settings="nvidia-settings")
    new = {**record("580.95.05-1"), "packages": dict.fromkeys(SET[:4], "580.95.05-1")}
    plan = {"packages": {}, "plan": {"steps": []}}
    templar = host(
        "debian12", "580.95.05", __nvidia_driver_found=found, __nvidia_driver_record=new, __nvidia_driver_plan=plan
    )
    assert value(templar, "__nvidia_driver_leftover") == sorted(["nvidia-firmware-580-580.82.07", *gone])


def test_names_with_the_old_branch_are_left_of_it() -> None:
    names = ("libnvidia-compute-575", "nvidia-firmware-575-575.57.08", "nvidia-modprobe", "libnvidia-575xx")
    found = bedplate_driver_found(listed(dict.fromkeys(names, "575.57.08-0ubuntu1")))
    plan = {"packages": {}, "plan": {"steps": [{"name": "libnvidia-compute-575", "action": "remove", "after": ""}]}}
    templar = host("ubuntu2404", __nvidia_driver_found=found, __nvidia_driver_plan=plan)
    assert value(templar, "__nvidia_driver_leftover") == ["nvidia-firmware-575-575.57.08"]


# ---- RHEL ----


def test_rhel_has_exact_packages_a_stream_and_a_lock() -> None:
    templar = host("rhel9")
    versions = value(templar, "__nvidia_driver_rpm_versions")
    assert set(versions.values()) == {"3:580.82.07-1.el9"}
    assert {"nvidia-driver-cuda", "kmod-nvidia-open-dkms"} <= versions.keys()
    assert value(templar, "__nvidia_driver_stream") == "580-open"
    installed = host("rhel9", __nvidia_driver_record={"packages": versions})
    names = value(installed, "__nvidia_driver_rpm_names")
    assert "kmod-nvidia-open-dkms-3:580.82.07-1.el9.noarch" in names
    assert "nvidia-driver-cuda-3:580.82.07-1.el9.x86_64" in names
    lock = [line for line in render(installed, "versionlock.j2").splitlines() if not line.startswith("#")]
    assert "nvidia-driver-cuda-3:580.82.07-1.el9.*" in lock
    assert len(lock) == len(versions)


def test_rhel_repository_is_signed() -> None:
    repository = configparser.ConfigParser()
    repository.read_string(render(host("rhel9"), "nvidia.repo.j2"))
    section = repository["bedplate-nvidia"]
    assert section["gpgcheck"] == "1"
    assert section["gpgkey"] == "file:///etc/pki/rpm-gpg/RPM-GPG-KEY-bedplate-nvidia"
    assert section["baseurl"] == "https://developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64/"


# ---- filters ----

LINES = {
    "libcuda1": "535.261.03-1",
    "libnvidia-ml1": "535.261.03-1",
    "nvidia-open-kernel-dkms": "535.261.03-1",
    "firmware-nvidia-gsp": "535.261.03-1",
    "nvidia-modprobe": "535.161.07-1~deb12u1",
    "nvidia-support": "20220217+3~deb12u1",
    "nvidia-kernel-common": "20220217+3~deb12u1",
}


def listed(packages: dict[str, str], **states: str) -> list[str]:
    return [
        f"{states.get(name.replace('-', '_'), 'installed')}\t{name}\t{version}" for name, version in packages.items()
    ]


def test_the_driver_that_dpkg_knows() -> None:
    found = bedplate_driver_found(
        [*listed(LINES), "not-installed\tnvidia-smi\t", "config-files\tlibnvidia-cfg1\t535.216.03-1"]
    )
    assert found["version"] == "535.261.03"
    assert found["flavour"] == "open"
    assert found["packages"] == {name: version for name, version in LINES.items() if version == "535.261.03-1"}
    assert found["broken"] == {}


def test_half_a_driver_is_broken() -> None:
    assert bedplate_driver_found(listed(LINES, libcuda1="unpacked"))["broken"] == {"libcuda1": "535.261.03-1"}
    mixed = bedplate_driver_found(listed({**LINES, "libcuda1": "535.216.03-1"}))
    assert mixed["version"] == "535.261.03"
    assert mixed["broken"] == {"libcuda1": "535.216.03-1"}


def test_ubuntus_names_and_an_epoch() -> None:
    packages = {"libnvidia-compute-580": "1:580.82.07-0ubuntu1", "nvidia-dkms-580": "1:580.82.07-0ubuntu1"}
    found = bedplate_driver_found(listed(packages))
    assert (found["version"], found["flavour"], found["packages"]) == ("580.82.07", "proprietary", packages)
    assert bedplate_driver_found([]) == NOTHING


# As on an Ubuntu host that `ubuntu-drivers install --gpgpu 535-server-open` has set up.
LIBRARIES = dict.fromkeys(
    ("libnvidia-compute-535-server", "nvidia-kernel-common-535-server", "nvidia-utils-535-server"),
    "535.247.01-0ubuntu0.24.04.1",
)
PREBUILT = {
    "linux-modules-nvidia-535-server-open-6.8.0-79-generic": "6.8.0-79.79",
    "linux-modules-nvidia-535-server-open-generic": "6.8.0-79.79",
    "linux-objects-nvidia-535-server-open-6.8.0-79-generic": "6.8.0-79.79",
    "linux-signatures-nvidia-6.8.0-79-generic": "6.8.0-79.79",
}


def test_canonicals_prebuilt_modules_belong_to_the_driver() -> None:
    found = bedplate_driver_found(
        [*listed({**LIBRARIES, **PREBUILT, "linux-modules-nvidia-470-6.8.0-79-generic": "6.8.0-79.79"})]
    )
    assert (found["version"], found["flavour"], found["broken"]) == ("535.247.01", "open", {})
    assert (found["packages"], found["prebuilt"]) == (LIBRARIES, PREBUILT)
    proprietary = {name.replace("-open", ""): version for name, version in PREBUILT.items()}
    assert bedplate_driver_found(listed({**LIBRARIES, **proprietary}))["flavour"] == "proprietary"
    assert bedplate_driver_found(listed(LIBRARIES))["flavour"] == "", "nvidia-kernel-common is the same for both"


def test_the_way_back_to_prebuilt_modules_has_them_and_pins_the_rest() -> None:
    before = value(host("ubuntu2404", __nvidia_driver_found=bedplate_driver_found(listed({**LIBRARIES, **PREBUILT}))),
                   "__nvidia_driver_before")  # fmt: skip
    assert before["packages"] == {**LIBRARIES, **PREBUILT}
    assert before["flavour"] == "open"
    newer = {**NOTHING, "version": "580.82.07", "packages": {"nvidia-dkms-580-open": "580.82.07-0ubuntu1"}}
    back = host("ubuntu2404", __nvidia_driver_found=newer, nvidia_driver_wanted=before, __nvidia_driver_record=before)
    assert value(back, "__nvidia_driver_asked") == before["packages"]
    assert value(back, "__nvidia_driver_pinned") == ["535.247.01-0ubuntu0.24.04.1"]
    assert value(back, "__nvidia_driver_of_kernels") == PREBUILT
    assert "linux-" not in render(back, "unattended-upgrades.j2"), "a new kernel brings new ones"
    there = bedplate_driver_found(listed({**LIBRARIES, **PREBUILT}))
    again = host("ubuntu2404", __nvidia_driver_found=there, nvidia_driver_wanted=before)
    assert value(again, "__nvidia_driver_differs") is False


def test_libraries_alone_have_no_flavour() -> None:
    assert bedplate_driver_found(listed({"libcuda1": "580.82.07-1"}))["flavour"] == ""


@given(st.lists(st.text(max_size=30) | st.just("installed\tlibcuda1\t580.82.07-1")))
def test_any_lines_give_a_driver_or_none(lines: list[str]) -> None:
    found = bedplate_driver_found(lines)
    assert found["version"] in ("", "580.82.07")
    assert set(found) == set(NOTHING)


MIRROR, SECURITY = "http://mirror/debian/", "http://mirror/security/"
PATH = "/etc/apt/sources.list.d/debian.sources"
TEXT = f"""# the host's own
Types: deb
URIs: {MIRROR}
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian.gpg

Types: deb
URIs: {SECURITY}
Suites: bookworm-security
Components: main
"""
TARGETS = [
    f"bookworm|bookworm|main|{MIRROR}|Debian|{PATH}:1",
    f"bookworm-updates|bookworm-updates|main|{MIRROR}|Debian|{PATH}:1",
    f"bookworm-security|bookworm-security|main|{SECURITY}|Debian|{PATH}:2",
    "nodistro|nodistro|main|https://elsewhere/|Else|/etc/apt/sources.list.d/else.sources:1",
    "cloud|cloud|main|https://elsewhere/|Else|/etc/apt/sources.list:1",
]
WANTED = ["contrib", "main", "non-free"]


def test_the_hosts_own_mirror_and_key_are_taken_over() -> None:
    missing = bedplate_archive_sources(TARGETS, {PATH: TEXT}, "bookworm", "Debian", WANTED)
    assert [(source["suite"], source["uri"], source["signed_by"]) for source in missing] == [
        ("bookworm", MIRROR, "/usr/share/keyrings/debian.gpg"),
        ("bookworm-security", SECURITY, ""),
        ("bookworm-updates", MIRROR, "/usr/share/keyrings/debian.gpg"),
    ]
    assert {tuple(source["components"]) for source in missing} == {("contrib", "non-free")}
    text = render(host("debian12", __nvidia_driver_archive_sources=missing), "archive.sources.j2")
    stanzas = [part for part in text.split("\n\n") if "Types: deb" in part]
    assert len(stanzas) == 3
    assert "Suites: bookworm\nComponents: contrib non-free\nSigned-By: /usr/share/keyrings/debian.gpg" in stanzas[0]
    assert "Signed-By" not in stanzas[1]


def test_backports_come_from_the_same_mirror_unless_they_are_there() -> None:
    missing = bedplate_archive_sources(TARGETS, {PATH: TEXT}, "bookworm", "Debian", WANTED, backports=True)
    own = [source for source in missing if source["suite"] == "bookworm-backports"]
    assert own == [
        {
            "suite": "bookworm-backports",
            "uri": MIRROR,
            "components": WANTED,
            "signed_by": "/usr/share/keyrings/debian.gpg",
        }
    ]
    there = [
        *TARGETS,
        *(f"bookworm-backports|bookworm-backports|{part}|{MIRROR}|Debian Backports|{PATH}:1" for part in WANTED),
    ]
    again = bedplate_archive_sources(there, {PATH: TEXT}, "bookworm", "Debian", WANTED, backports=True)
    assert "bookworm-backports" not in [source["suite"] for source in again]


def test_every_suite_of_ubuntu_has_the_codename_of_its_release() -> None:
    """Its Release files all say `Codename: noble`; Debian's say bookworm-backports."""
    mirror, path = "http://mirror/ubuntu/", "/etc/apt/sources.list.d/ubuntu.sources"
    text = f"Types: deb\nURIs: {mirror}\nSuites: noble noble-updates noble-backports\nComponents: main\n"
    suites = ("noble", "noble-updates", "noble-security", "noble-backports")
    targets = [f"{suite}|noble|main|{mirror}|Ubuntu|{path}:1" for suite in suites]
    arguments = (targets, {path: text}, "noble", "Ubuntu", ["main", "restricted"])
    lacking = [f"{item['suite']} {' '.join(item['components'])}" for item in bedplate_archive_sources(*arguments)]
    assert lacking == ["noble restricted", "noble-security restricted", "noble-updates restricted"]
    more = [f"{item['suite']} {' '.join(item['components'])}" for item in bedplate_archive_sources(*arguments, True)]
    assert more == ["noble restricted", "noble-backports restricted", *lacking[1:]]
    proposed = [f"noble-proposed|noble|main|{mirror}|Ubuntu|{path}:1", *targets]
    assert len(bedplate_archive_sources(proposed, *arguments[1:])) == 3


def test_a_list_file_and_a_host_that_lacks_nothing() -> None:
    text = "# comment\ndeb [arch=amd64 signed-by=/usr/share/keyrings/u.gpg] http://mirror/ubuntu noble main\n"
    targets = ["noble|noble|main|http://mirror/ubuntu/|Ubuntu|/etc/apt/sources.list:2"]
    (missing,) = bedplate_archive_sources(
        targets, {"/etc/apt/sources.list": text}, "noble", "Ubuntu", ["main", "restricted"]
    )
    assert (missing["components"], missing["signed_by"]) == (["restricted"], "/usr/share/keyrings/u.gpg")
    assert bedplate_archive_sources(targets, {"/etc/apt/sources.list": text}, "noble", "Ubuntu", ["main"]) == []


def test_a_host_without_sources_and_a_key_inside_a_source_are_refused() -> None:
    with pytest.raises(Exception, match="apt knows no source of Debian bookworm"):
        bedplate_archive_sources([], {}, "bookworm", "Debian", WANTED)
    inline = TEXT.replace(
        "Signed-By: /usr/share/keyrings/debian.gpg", "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----"
    )
    with pytest.raises(Exception, match="holds its key itself"):
        bedplate_archive_sources(TARGETS, {PATH: inline}, "bookworm", "Debian", WANTED)
