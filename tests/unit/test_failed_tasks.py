"""Tasks that fail in a real play, as a rescue sees them: each failure has a code and a next step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

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


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("play")
    tasks = []
    for name, (task, *_) in TASKS.items():
        keep = {"ansible.builtin.copy": {"content": FAILURE, "dest": f"{folder}/{name}.json", "mode": "0600"}}
        tasks.append({"block": [{"name": name, **task}], "rescue": [{"name": "Keep it", **keep}]})
    play = {"name": "Fail", "hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}
    (folder / "play.yml").write_text(yaml.safe_dump([play], sort_keys=False))
    arguments = ["-i", "localhost,", "-e", f"ansible_python_interpreter={sys.executable}", str(folder / "play.yml")]
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), *arguments],
        cwd=ROOT, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
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
