"""Rules that every role keeps: one place per fact, and no drift between what is said and what is done."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())
YAML_FILES = sorted(
    path for folder in ("roles", "playbooks", "inventories", "molecule") for path in (ROOT / folder).rglob("*.yml")
)
# JSON has no comments.
TEMPLATES = sorted(path for path in (ROOT / "roles").rglob("*.j2") if not path.name.endswith(".json.j2"))


def read(role: str, *parts: str) -> Any:
    path = ROOT.joinpath("roles", role, *parts)
    return yaml.safe_load(path.read_text()) if path.exists() else {}


def options(role: str) -> dict[str, dict[str, Any]]:
    specs = read(role, "meta", "argument_specs.yml")["argument_specs"]
    # Entry points may ask for more than the role's own default: the first spec, `main`, is the one that has it.
    found: dict[str, dict[str, Any]] = {}
    for spec in specs.values():
        found = {**spec.get("options", {}), **found}
    return found


@pytest.mark.parametrize("role", ROLES)
def test_defaults_are_the_spec(role: str) -> None:
    optional = {name: option for name, option in options(role).items() if not option.get("required")}
    defaults = read(role, "defaults", "main.yml")
    assert defaults == {name: option["default"] for name, option in optional.items()}


@pytest.mark.parametrize("role", ROLES)
def test_variables_carry_the_role_name(role: str) -> None:
    assert all(name.startswith(f"{role}_") for name in options(role))
    assert all(name.startswith(f"__{role}_") for name in read(role, "vars", "main.yml"))


@pytest.mark.parametrize("role", ROLES)
def test_every_entry_point_has_a_spec_and_a_readme_exists(role: str) -> None:
    specs = read(role, "meta", "argument_specs.yml")["argument_specs"]
    tasks = {path.stem for path in (ROOT / "roles" / role / "tasks").glob("*.yml")}
    assert set(specs) <= tasks, "a spec without a task file"
    assert (ROOT / "roles" / role / "README.md").read_text().startswith(f"# {role}\n")


def test_variables_document_is_generated() -> None:
    generated = subprocess.run(
        [sys.executable, ROOT / "scripts" / "variables_doc.py"], check=True, capture_output=True, text=True
    ).stdout
    assert (ROOT / "docs" / "variables.md").read_text() == generated, "run `make docs`"


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_injected_facts(path: Path) -> None:
    """Facts are read from ansible_facts: injected ones are off in ansible.cfg and go away in ansible-core 2.24."""
    allowed = (
        "facts|managed|version|check_mode|failed_result|failed_task|playbook_python|play_hosts|host|port|user|become"
        "|connection|python_interpreter|ssh_[a-z_]+|local|limit|inventory_sources|diff_mode|run_tags|skip_tags|forks"
    )
    found = re.findall(rf"\bansible_(?!(?:{allowed})\b)[a-z_]+", path.read_text())
    assert not [name for name in found if name not in ("ansible_playbook", "ansible_core")]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_say_who_wrote_them(template: Path) -> None:
    assert template.read_text().startswith("{{ ansible_managed | comment }}\n")


def test_nothing_committed_names_this_machine_or_a_registry() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    words = re.compile(
        "|".join(
            [
                "pypi" + r"\.org",
                "python" + "hosted",
                "deb" + r"\.debian",
                r"registry\.npm" + "js",
                "/wo" + "rk/",
            ]
        )
    )
    found = []
    for name in filter(None, files):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            text = path.read_bytes().decode("utf-8", "ignore")
            found += [f"{name}: {match.group()}" for match in words.finditer(text)]
    assert not found
