"""What an operator may write into an inventory, and that plugins say what they do."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bedplate.controller.inventory import PLAY_VARIABLES, known_variables, problems
from bedplate.controller.plain import plain

ROOT = Path(__file__).resolve().parents[2]
KNOWN = {
    "bedplate_profile": {"type": "str", "required": True},
    "bedplate_wheels_source": {"type": "str", "choices": ["index", "mirror", "directory"]},
    "bedplate_wheels_location": {"type": "str"},
    "bedplate_backend": {"type": "str", "choices": ["", "nccl", "gloo"]},
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"ansible_host": "x", "other": 1, "bedplate_plan": {}}, []),
        ({"bedplate_profil": "x"}, ["nothing reads the variable `bedplate_profil`; did you mean `bedplate_profile`?"]),
        ({"bedplate_zzz": "x"}, ["nothing reads the variable `bedplate_zzz`."]),
        (
            {"bedplate_backend": "ncll"},
            ["bedplate_backend is `ncll`; did you mean `nccl`? Allowed: (empty), nccl, gloo."],
        ),
        ({"bedplate_backend": ""}, []),
        (
            {"bedplate_wheels_source": "mirror"},
            ["bedplate_wheels_source is mirror: bedplate_wheels_location must be a URL, is ``."],
        ),
        ({"bedplate_wheels_source": "mirror", "bedplate_wheels_location": "http://w/"}, []),
        (
            {"bedplate_wheels_source": "directory", "bedplate_wheels_location": "wheels"},
            ["bedplate_wheels_source is directory: bedplate_wheels_location must be an absolute path on the node"],
        ),
        ({"bedplate_wheels_source": "directory", "bedplate_wheels_location": "/srv/wheels"}, []),
    ],
)
def test_problems(variables: dict[str, Any], expected: list[str]) -> None:
    found = problems({"bedplate_profile": "x", **variables}, KNOWN)
    assert [one.partition(", is `wheels`")[0] for one in found] == expected


@pytest.mark.parametrize("variables", [{}, {"bedplate_profile": ""}])
def test_profile_is_required(variables: dict[str, Any]) -> None:
    assert problems(variables, KNOWN) == [
        "bedplate_profile is not set: name a profile (`bedplate profile list` shows them)."
    ]


@given(st.dictionaries(st.text(), st.one_of(st.none(), st.text(), st.integers(), st.lists(st.text()))))
def test_any_inventory_is_judged(variables: dict[str, Any]) -> None:
    assert all(isinstance(problem, str) for problem in problems(variables, KNOWN))


def test_the_roles_own_specs_are_the_list() -> None:
    known = known_variables(ROOT / "roles")
    assert known["bedplate_wheels_source"]["choices"] == ["index", "mirror", "directory"]
    assert all(name.startswith("bedplate_") for name in known)
    assert not PLAY_VARIABLES & set(known)


def test_what_plays_set_is_known() -> None:
    """A variable set by the first play of a run must not be a mistake to the second."""
    found: set[str] = set()
    for folder in ("roles", "playbooks"):
        for path in (ROOT / folder).rglob("*.yml"):
            text = path.read_text()
            found |= set(re.findall(r"^\s*register: (bedplate_\w+)", text, re.MULTILINE))
            for block in re.findall(r"set_fact:\n((?:\s+\w+:.*\n(?:\s{6,}.*\n)*)+)", text):
                found |= set(re.findall(r"^\s+(bedplate_\w+):", block, re.MULTILINE))
    assert found
    assert found <= PLAY_VARIABLES | set(known_variables(ROOT / "roles"))


def test_the_inventories_of_this_repository_are_right() -> None:
    known = known_variables(ROOT / "roles")
    group = yaml.safe_load((ROOT / "inventories/example/group_vars/gpu_nodes.yml").read_text())
    canary = yaml.safe_load((ROOT / "inventories/example/group_vars/canary.yml").read_text())
    assert problems(group | canary, known) == []


@pytest.mark.parametrize("plugin", ["bedplate_run", "bedplate_inventory"])
def test_every_filter_is_documented(plugin: str) -> None:
    module = import_module(plugin)
    if not hasattr(module, "FilterModule"):  # the lookup of the same name was imported first
        pytest.skip(f"{plugin} is a lookup here")
    for name, function in module.FilterModule().filters().items():
        document = yaml.safe_load((ROOT / "filter_plugins" / f"{name}.yml").read_text())
        assert document["DOCUMENTATION"]["name"] == name
        assert function.__doc__


def test_plain_undoes_tagged_values() -> None:
    class Tagged(str):
        __slots__ = ()

        def __str__(self) -> str:
            return self

    value = plain({Tagged("a"): [Tagged("b"), 1, 2.5, True, None, (Tagged("c"),)], "path": Path("/x")})
    assert value == {"a": ["b", 1, 2.5, True, None, ["c"]], "path": "/x"}
    assert type(next(iter(value))) is str
    assert type(value["a"][0]) is str
    assert yaml.safe_dump(value)
