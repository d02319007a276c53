"""What an operator may write into an inventory, and that plugins say what they do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import filter_loader
from ansible.template import Templar
from hypothesis import given
from hypothesis import strategies as st

from bedplate.controller.holder import current_run
from bedplate.controller.inventory import PLAY_VARIABLES, known_variables, problems
from bedplate.controller.plain import plain

ROOT = Path(__file__).resolve().parents[2]
FILTER_FILES = sorted((ROOT / "filter_plugins").glob("*.py"))
KNOWN = {
    "bedplate_profile": {"type": "str", "required": True},
    "bedplate_wheels_source": {"type": "str", "choices": ["index", "mirror", "directory"]},
    "bedplate_wheels_location": {"type": "str"},
    "bedplate_backend": {"type": "str", "choices": ["", "nccl", "gloo"]},
    "bedplate_layers": {"type": "list", "elements": "str", "choices": ["driver", "toolkit", "stack"]},
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
        ({"bedplate_layers": ["driver", "stack"]}, []),
        (
            {"bedplate_layers": ["driver", "stak"]},
            ["bedplate_layers is `stak`; did you mean `stack`? Allowed: driver, toolkit, stack."],
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


def set_by(tasks: Any) -> set[str]:
    """Return the variables that tasks register or set, blocks and plays included."""
    found: set[str] = set()
    for task in tasks if isinstance(tasks, list) else []:
        if isinstance(task, dict):
            found |= {task["register"]} if isinstance(task.get("register"), str) else set()
            found |= set(task.get("ansible.builtin.set_fact", {}))
            for inner in ("tasks", "pre_tasks", "post_tasks", "handlers", "block", "rescue", "always"):
                found |= set_by(task.get(inner))
    return found


def test_what_plays_set_is_known() -> None:
    """A variable set by the first play of a run must not be a mistake to the second."""
    files = [path for folder in ("roles", "playbooks") for path in (ROOT / folder).rglob("*.yml")]
    found = {name for path in files for name in set_by(yaml.safe_load(path.read_text()))}
    found = {name for name in found if name.startswith("bedplate_")}
    assert "bedplate_run" in found
    assert found <= PLAY_VARIABLES | set(known_variables(ROOT / "roles"))


def test_the_inventories_of_this_repository_are_right() -> None:
    known = known_variables(ROOT / "roles")
    group = yaml.safe_load((ROOT / "inventories/example/group_vars/gpu_nodes.yml").read_text())
    canary = yaml.safe_load((ROOT / "inventories/example/group_vars/canary.yml").read_text())
    assert problems(group | canary, known) == []


def filters_of(path: Path) -> dict[str, Callable[..., Any]]:
    """Load a file of filters by its path: a lookup may have the same name."""
    spec = spec_from_file_location(f"filters_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    filters: dict[str, Callable[..., Any]] = module.FilterModule().filters()
    return filters


FILTERS = {name: found for path in FILTER_FILES for name, found in filters_of(path).items()}


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_every_filter_is_documented(name: str) -> None:
    document = yaml.safe_load((ROOT / "filter_plugins" / f"{name}.yml").read_text())
    told = document["DOCUMENTATION"]
    assert told["name"] == name
    assert FILTERS[name].__doc__
    first, *others = inspect.signature(FILTERS[name]).parameters.values()
    assert first.kind is not inspect.Parameter.VAR_KEYWORD
    if all(other.kind is not inspect.Parameter.VAR_KEYWORD for other in others):
        assert set(told["options"]) == {"_input", *(other.name for other in others)}
    assert name in document["EXAMPLES"]
    assert document["RETURN"]["_value"]["description"]


def test_no_document_is_left_over() -> None:
    assert {path.stem for path in (ROOT / "filter_plugins").glob("*.yml")} == set(FILTERS)


def test_the_filters_take_what_ansible_hands_them() -> None:
    verdict = {"code": "import.error", "status": "fail", "layer": "stack", "subject": "torch", "message": "No."}
    assert "FAIL  torch  import.error (stack)" in FILTERS["bedplate_report"]([verdict])
    host = FILTERS["bedplate_record"]([verdict], host="gpu-01", reason="x")
    assert (host["host"], host["outcome"]) == ("gpu-01", "failed")
    with pytest.raises(AnsibleFilterError, match=r"bedplate_record: unknown verdict code 'no\.such'"):
        FILTERS["bedplate_record"]([{**verdict, "code": "no.such"}])
    with pytest.raises(AnsibleFilterError, match="bedplate_record: "):
        FILTERS["bedplate_record"]([{}])
    before = {"current": None, "drift": [], "drift_counts": {}}
    assert [verdict["code"] for verdict in FILTERS["bedplate_drift"](before, [], None, True)] == ["stack.absent"]
    assert FILTERS["bedplate_run_age"](current_run()["holder"]) >= 0


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


@pytest.mark.parametrize(
    ("source", "location", "wheels"),
    [
        ("index", "", []),
        ("index", "https://user@index/simple", ["--default-index", "https://user@index/simple"]),
        ("mirror", "http://mirror/", ["--no-index", "--find-links", "http://mirror/"]),
        ("directory", "/srv/wheels", ["--offline", "--no-index", "--find-links", "/srv/wheels"]),
    ],
)
def test_where_uv_finds_locked_wheels(source: str, location: str, wheels: list[str]) -> None:
    found = FILTERS["bedplate_uv"]("/opt/b", "/var/lib/b", source, location)
    assert found["wheels"] == wheels
    assert found["command"][0] == "flock"
    assert found["command"][-2:] == ["/var/lib/b/lock", "/opt/b/tools/bin/uv"]
    assert found["environment"]["UV_CACHE_DIR"] == "/opt/b/cache/uv"


@pytest.mark.parametrize(
    ("tasks", "name"),
    [
        ("python_stack/tasks/install.yml", "Say what would be built"),
        ("python_stack/tasks/install.yml", "Stop when wheels are missing, changed or not reachable"),
        ("cuda_toolkit/tasks/install_wheels.yml", "Stop when wheels are missing, changed or not reachable"),
        ("cuda_toolkit/vars/main.yml", "__cuda_toolkit_outlook"),
    ],
)
def test_what_is_said_of_a_location_has_no_password(tasks: str, name: str) -> None:
    """The command is not logged then; what is said of it afterwards would tell all the same."""
    loader = DataLoader()
    content = loader.load_from_file(str(ROOT / "roles" / tasks), trusted_as_template=True)
    (text,) = texts_named(content, name)
    location = "https://user:secret@mirror/wheels"
    uv = {"stderr": f"failed: {location}/a.whl", "rc": 2}
    filter_loader.add_directory(str(ROOT / "filter_plugins"))
    plan = {"packages": 1, "target": "x", "bytes": 1, "name": "p", "version": "13.0.1", "system_packages": {"apt": []}}
    found = {"ready": "", "default_names": ""}
    known = {
        "python_stack_generation": "g",
        "python_stack_plan": plan,
        "python_stack_wheels_source": "index",
        "python_stack_wheels_location": location,
        "__python_stack_sync": uv,
        "cuda_toolkit_plan": {**plan, "default": False},
        "cuda_toolkit_source": "wheels",
        "cuda_toolkit_prefix": "/usr/local",
        "cuda_toolkit_wheels_source": "index",
        "cuda_toolkit_wheels_location": location,
        "__cuda_toolkit_unpacked": uv,
        "__cuda_toolkit_found": found,
        "__cuda_toolkit_path": "/usr/local/cuda-13.0",
        "__cuda_toolkit_read": {"wanted": {"files": [], "bytes": 1}},
    }
    said = Templar(loader=loader, variables=known).template(text)
    assert "mirror/wheels" in said
    assert "secret" not in said


def texts_named(content: Any, name: str) -> list[Any]:
    """Return the message of the task of a name, in blocks as well, or the variable of that name."""
    if isinstance(content, dict):
        if content.get("name") == name:
            return [task["msg"] for task in content.values() if isinstance(task, dict) and "msg" in task]
        return [content[name]] if name in content else texts_named(content.get("block", []), name)
    return [text for part in content for text in texts_named(part, name)]


def test_wheels_come_from_nowhere_else() -> None:
    with pytest.raises(AnsibleFilterError, match="index, mirror, directory, and not from `indx`"):
        FILTERS["bedplate_uv"]("/opt/b", "/var/lib/b", "indx", "")
