"""Tasks that fail in a real play, as a rescue sees them: each failure has a code and a next step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from generation_tools import HOLDER, paths_in
from run_ansible import ansible_playbook

from bedplate.node.state.generations import Generations

ROOT = Path(__file__).resolve().parents[2]
FAILURE = "{{ ansible_failed_result | bedplate_failure(ansible_failed_task.name, ansible_failed_task.action) }}"

# A task, and the code, the start of the message and a word of the next step that it ends in.
TASKS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "assert": (
        {"ansible.builtin.assert": {"that": "false", "fail_msg": "It is no key. Set another."}},
        "run.refused",
        "It is no key. Set another.",
        "Put that right",
    ),
    "fail": ({"ansible.builtin.fail": {"msg": "No wheel fits."}}, "run.refused", "No wheel fits.", "Put that right"),
    "a module of ours that has a name for it": (
        {"bedplate_state": {"root": "/nowhere", "state_dir": "relative", "action": "begin", "run_id": "r"}},
        "run.refused",
        "",
        "Put that right",
    ),
    "a program": (
        {"ansible.builtin.command": {"argv": ["sh", "-c", "echo no room >&2; exit 3"]}},
        "run.task_failed",
        "non-zero return code\nno room",
        "-vvv",
    ),
    "an item of a loop": (
        {"ansible.builtin.command": {"argv": ["ls", "{{ item }}"]}, "loop": ["/", "/nowhere"]},
        "run.task_failed",
        "non-zero return code\nls: ",
        "-vvv",
    ),
    "a download": (
        {"ansible.builtin.get_url": {"url": "http://127.0.0.1:9/x", "dest": "/nowhere"}},
        "run.task_failed",
        "Request failed",
        "reaches that address",
    ),
    "apt": ({"ansible.builtin.apt": {"deb": "/nowhere.deb"}}, "run.task_failed", "", "/var/log/apt/term.log"),
    "too slow": (
        {"ansible.builtin.command": {"argv": ["sleep", "30"]}, "timeout": 1},
        "run.timeout",
        "Task failed: Timed out after 1 second",
        "what it waits for",
    ),
    "an undefined variable": (
        {"ansible.builtin.debug": {"msg": "{{ nowhere.x }}"}},
        "run.task_failed",
        "Task failed: ",
        "-vvv",
    ),
}


def play(folder: Path, tasks: list[dict[str, Any]], **variables: Any) -> None:
    """Run tasks here as a play, which must come to its end."""
    head = {"name": "Play", "hosts": "localhost", "connection": "local", "gather_facts": False, "vars": variables}
    (folder / "play.yml").write_text(yaml.safe_dump([{**head, "tasks": tasks}], sort_keys=False))
    arguments = ["-i", "localhost,", "-e", f"ansible_python_interpreter={sys.executable}", str(folder / "play.yml")]
    base = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    done = ansible_playbook(*arguments, base=base)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("play")
    tasks = []
    for name, (task, *_) in TASKS.items():
        keep = {"ansible.builtin.copy": {"content": FAILURE, "dest": f"{folder}/{name}.json", "mode": "0600"}}
        tasks.append({"block": [{"name": name, **task}], "rescue": [{"name": "Keep it", **keep}]})
    play(folder, tasks)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in TASKS}


@pytest.mark.parametrize("name", TASKS)
def test_a_failed_task_has_a_code_and_a_next_step(failures: dict[str, Any], name: str) -> None:
    _, code, message, step = TASKS[name]
    (verdict,) = failures[name]["verdicts"]
    assert (verdict["code"], verdict["status"], verdict["subject"]) == (code, "fail", name)
    assert verdict["message"].startswith(message)
    assert verdict["message"]
    assert step in verdict["action"]
    assert verdict["action"] in failures[name]["reason"]
    assert not failures[name]["needs_reboot"]
    assert not failures[name]["hardware"]


def test_verify_goes_on_without_the_package_database(tmp_path: Path) -> None:
    """The tasks of the playbook that read the state, on a node whose dpkg ends with 2, as one that is damaged does."""
    node = Generations(paths_in(tmp_path))
    node.begin("r1", kind="layers", holder=HOLDER)
    node.layer("r1", "driver", "begin", {"version": "580.82.07", "packages": {"--no-such-option": "1"}})
    node.layer("r1", "driver", "done")
    node.end("r1")
    (verify,) = yaml.safe_load((ROOT / "playbooks" / "verify.yml").read_text())
    tasks = [task for task in verify["tasks"] if "bedplate_state" in task]
    told = "{{ bedplate_before | bedplate_drift(verify_layers.results) }}"
    tasks.append({"ansible.builtin.copy": {"content": told, "dest": f"{tmp_path}/told.json", "mode": "0600"}})
    wanted = {"driver": {"version": "580.82.07"}, "toolkit": {"version": "13.0.1"}}
    play(
        tmp_path,
        tasks,
        bedplate_root=f"{tmp_path}/opt",
        bedplate_state_dir=f"{tmp_path}/var",
        bedplate_wanted=wanted,
    )
    driver, toolkit, stack = json.loads((tmp_path / "told.json").read_text())
    assert (driver["code"], driver["status"], driver["layer"]) == ("packages.query_failed", "fail", "driver")
    assert "exit code 2" in driver["message"]
    assert [toolkit["code"], stack["code"]] == ["toolkit.drift", "stack.absent"]
