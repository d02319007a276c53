"""What the role cuda_toolkit asks apt for and pins: its variables and templates as Ansible renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from bedplate.node.packages.apt_query import Candidate, choose

ROLE = Path(__file__).resolve().parents[2] / "roles" / "cuda_toolkit"
LOADER = DataLoader()


def load(name: str) -> Any:
    return LOADER.load_from_file(str(ROLE / name), trusted_as_template=True)


def render(text: str, **variables: Any) -> Any:
    given = {"ansible_managed": "Written by Bedplate.", **variables}
    templar = Templar(loader=LOADER, variables={**load("defaults/main.yml"), **load("vars/main.yml"), **given})
    return templar.template(trust_as_template(text))


@pytest.mark.parametrize(
    ("repository", "shown"),
    [
        ("https://developer.download.nvidia.com/compute/cuda/repos", "https://developer.download.nvidia.com/compute/"),
        ("http://127.0.0.1:8099", "http://127.0.0.1:8099/debian12/x86_64"),
        ("https://user:p%40w@mirror:8443/cuda", "https://mirror:8443/cuda/debian12/x86_64"),
        ("https://user:p@w@mirror/cuda", "https://mirror/cuda/debian12/x86_64"),
        ("https://user@mirror/cuda", "https://mirror/cuda/debian12/x86_64"),
        ("file:/srv/mirror", "file:/srv/mirror/debian12/x86_64"),
    ],
)
def test_the_site_is_part_of_what_apt_shows(repository: str, shown: str) -> None:
    """`apt-cache madison` (apt 2.6) leaves out the user and password that an address has."""
    known = [Candidate("13.0.88-1", f"{shown}  ")]
    site = render("{{ __cuda_toolkit_site }}", cuda_toolkit_repository=repository)
    assert choose("cuda-cudart-13-0", "13.0.88-1", known, site) == "13.0.88-1"


@pytest.mark.parametrize(
    ("installed", "in_place"),
    [
        ({}, True),
        ({"cuda-toolkit-config-common": "13.0.88-1", "cuda-toolkit-13-config-common": "13.0.88-1"}, True),
        ({"cuda-cudart-12-8": "12.8.57-1"}, False),
    ],
)
def test_what_a_newer_toolkit_shares_is_no_difference(installed: dict[str, str], in_place: bool) -> None:
    recorded = {"cuda-cudart-12-8": "12.8.90-1"}
    found = render(
        "{{ __cuda_toolkit_in_place }}",
        cuda_toolkit_source="nvidia",
        __cuda_toolkit_now={"packages": recorded},
        __cuda_toolkit_installed={"installed": {**recorded, **installed}},
    )
    assert found is in_place
    missing = render(
        "{{ __cuda_toolkit_in_place }}",
        cuda_toolkit_source="nvidia",
        __cuda_toolkit_now={"packages": recorded},
        __cuda_toolkit_installed={"installed": {}},
    )
    assert missing is False


def test_what_apt_has_unpacked_is_finished_and_not_asked_for() -> None:
    """A disk that was full, a script that failed: apt's answer has no step for these, which is no other version."""
    asked = {
        "cuda-nvcc-13-0": "13.0.88",
        "cuda-crt-13-0": "13.0.88-1",
        "cuda-cudart-13-0": "13.0.88",
        "cuda-nvtx-13-0": "1",
    }
    lines = [
        "unpacked cuda-nvcc-13-0=13.0.88-1",
        "half-configured cuda-crt-13-0=13.0.88-1",
        "installed cuda-cudart-13-0=13.0.88-1",
        "unpacked cuda-nvtx-13-0=13.0.85-1",
    ]
    given = {"__cuda_toolkit_asked": asked, "__cuda_toolkit_dpkg": {"stdout_lines": lines}}
    unfinished = {"cuda-nvcc-13-0": "13.0.88-1", "cuda-crt-13-0": "13.0.88-1"}
    assert render("{{ __cuda_toolkit_unfinished }}", **given) == unfinished
    rest = {"cuda-cudart-13-0": "13.0.88-1"}
    planned = render("{{ __cuda_toolkit_planned }}", **given, __cuda_toolkit_plan={"packages": rest})
    assert planned == {**unfinished, **rest}


@pytest.mark.parametrize("name", ["install_nvidia", "rollback_nvidia"])
def test_dpkg_is_settled_before_apt_is_asked(name: str) -> None:
    """Else what apt left half done is refused by the run that would mend it, and by the way back."""
    included = [task.get("ansible.builtin.include_tasks") for task in load(f"tasks/{name}.yml")]
    assert included.index("settle.yml") < included.index("simulate.yml")
    asking, *_, refusing = (task for task in load("tasks/simulate.yml") if "bedplate_packages" in task)
    assert asking["bedplate_packages"]["strict"] is False
    assert "packages.locked" in asking["until"]
    assert "packages.dpkg_interrupted" in refusing["when"][0]
    assert {**refusing["bedplate_packages"], "strict": False} == asking["bedplate_packages"]


OTHER, OURS, NEXT = "/usr/local/cuda-12.4", "/usr/local/cuda-13.0", "/usr/local/cuda-13.1"


@pytest.mark.parametrize(
    ("default", "names", "last", "before"),
    [
        (False, OTHER, {}, ""),
        (True, OTHER, {}, OTHER),
        (True, "", {"default": False, "path": OTHER}, ""),
        (
            True,
            OURS,
            {"default": True, "path": OURS, "default_before": OTHER},
            OTHER,
        ),  # a second run, an interrupted one
        (True, NEXT, {"default": True, "path": NEXT, "default_before": ""}, ""),
        (True, OTHER, {"default": True, "path": OURS, "default_before": NEXT}, OTHER),  # somebody moved it
    ],
)
def test_the_record_has_what_the_default_named_before(
    default: bool, names: str, last: dict[str, Any], before: str
) -> None:
    record = load("vars/main.yml")["__cuda_toolkit_record"]["default_before"]
    found = render(
        record,
        cuda_toolkit_plan={"default": default},
        __cuda_toolkit_found={"default_names": names},
        __cuda_toolkit_last=last,
    )
    assert found == before


@pytest.mark.parametrize(
    ("left", "names", "moves"),
    [
        ({"default": True, "path": OURS, "default_before": ""}, OURS, True),
        ({"default": True, "path": OURS, "default_before": OTHER}, OTHER, False),
        ({"default": False, "path": OURS, "default_before": ""}, OURS, False),
        ({"default": True, "path": OURS}, OURS, False),
        ({}, OURS, False),
    ],
)
def test_only_a_default_that_the_failed_toolkit_made_is_taken_back(
    left: dict[str, Any], names: str, moves: bool
) -> None:
    given = {"__cuda_toolkit_left": left, "__cuda_toolkit_links": {"toolkit": {"default_names": names}}}
    when = load("tasks/unpoint.yml")[-1]["when"]
    assert moves is all(render("{{ " + condition + " }}", **given) for condition in when)


def pins(packages: dict[str, str]) -> str:
    """Return the preferences of a way back, with what a rollback knows: it has not read the node's toolkits."""
    back = load("tasks/rollback.yml")[0]
    move = next(task for task in load("tasks/rollback_nvidia.yml") if task["name"] == "Move the pin back")
    wanted = {"version": "12.8.1", "packages": packages}
    template = (ROLE / "templates" / move["ansible.builtin.template"]["src"]).read_text()
    text: str = render(template, **back["vars"], **move["vars"], cuda_toolkit_wanted=wanted)
    return text


def test_a_way_back_pins_the_leaves_and_not_what_toolkits_share() -> None:
    """Pinned at 12.8's version, the shared ones would go down below a 13.0 that came again."""
    shared = {"cuda-toolkit-config-common": "12.8.90-1", "cuda-toolkit-12-config-common": "12.8.90-1"}
    leaves = {"cuda-cudart-12-8": "12.8.90-1", "cuda-toolkit-12-8-config-common": "12.8.90-1"}
    text = pins({**shared, **leaves})
    assert [line.split()[1] for line in text.splitlines() if line.startswith("Package:")] == sorted(leaves)
    assert text.count("Pin: version 12.8.90-1\nPin-Priority: 1000\n") == 2
