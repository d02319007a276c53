"""Every module says what it takes: documentation and argument_spec agree, examples and results parse."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import ansible.module_utils
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (ROOT / "library").glob("*.py"))
RESERVED = {"rc", "warnings", "deprecations", "invocation", "failed", "skipped", "path", "dest"}

if str(ROOT / "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(str(ROOT / "module_utils"))


def comparable(option: dict[str, Any]) -> dict[str, Any]:
    """What a caller depends on, with what both sides leave out written out."""
    found = {
        "type": option.get("type", "str"),
        "required": option.get("required", False),
        "default": option.get("default"),
        "choices": option.get("choices"),
        "elements": option.get("elements"),
        "aliases": sorted(option.get("aliases", [])),
    }
    inner = option.get("suboptions", option.get("options"))
    if inner:
        found["options"] = {name: comparable(value) for name, value in inner.items()}
    return found


def undescribed(options: dict[str, Any], inner: str) -> list[str]:
    names = [name for name, option in options.items() if not option.get("description")]
    for name, option in options.items():
        names += [f"{name}.{below}" for below in undescribed(option.get(inner) or {}, inner)]
    return names


def test_there_are_modules() -> None:
    assert "bedplate_state" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_documentation_is_the_argument_spec(name: str) -> None:
    module = import_module(name)
    documented = yaml.safe_load(module.DOCUMENTATION)
    assert documented["module"] == name
    assert documented["short_description"]
    assert not documented["short_description"].endswith(".")
    assert {key: comparable(value) for key, value in documented["options"].items()} == {
        key: comparable(value) for key, value in module.argument_spec().items()
    }
    assert undescribed(documented["options"], "suboptions") == []


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_tasks_that_use_known_options(name: str) -> None:
    module = import_module(name)
    tasks = yaml.safe_load(module.EXAMPLES)
    used = [task[name] for task in tasks if name in task]
    assert used
    assert all(task.get("name") for task in tasks)
    known = module.argument_spec()
    required = {option for option, spec in known.items() if spec.get("required")}
    for options in used:
        assert required <= set(options or {}) <= set(known)


@pytest.mark.parametrize("name", MODULES)
def test_results_are_described(name: str) -> None:
    returned = yaml.safe_load(import_module(name).RETURN)
    assert undescribed(returned, "contains") == []
    assert all(entry.get("type") and entry.get("returned") for entry in returned.values())
    assert not RESERVED & set(returned), "Ansible gives these keys a meaning of its own"


@pytest.mark.parametrize("name", MODULES)
def test_check_mode_is_supported_and_said(name: str) -> None:
    """Without supports_check_mode Ansible skips the task silently."""
    tree = ast.parse((ROOT / "library" / f"{name}.py").read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("AnsibleModule")
    ]
    assert len(calls) == 1
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in calls[0].keywords}
    assert given["supports_check_mode"] == "True"
    assert given["argument_spec"] == "argument_spec()"
    attributes = yaml.safe_load(import_module(name).DOCUMENTATION).get("attributes", {})
    assert attributes.get("check_mode", {}).get("support") in ("full", "partial")
