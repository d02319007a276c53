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
        ("https://user@mirror/cuda", "https://mirror/cuda/debian12/x86_64"),
        ("file:/srv/mirror", "file:/srv/mirror/debian12/x86_64"),
    ],
)
def test_the_site_is_part_of_what_apt_shows(repository: str, shown: str) -> None:
    """`apt-cache madison` (apt 2.6) leaves out the user and password that an address has."""
    known = [Candidate("13.0.88-1", f"{shown}  ")]
    site = render("{{ __cuda_toolkit_site }}", cuda_toolkit_repository=repository)
    assert choose("cuda-cudart-13-0", "13.0.88-1", known, site) == "13.0.88-1"
