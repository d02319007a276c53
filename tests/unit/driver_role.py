"""Run the role nvidia_driver with a stand-in for every module, and return what it did, in order.

The stand-in writes down the task and its arguments, and answers what the host's `answers` say for that task. What the
modules themselves do is tested elsewhere; here it is which of them run, in which order, and after which refusal.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from run_ansible import ROOT, ansible_playbook

KEPT = "assert|debug|fail|import_tasks|include_tasks|meta|set_fact"  # what changes no node
ACTION = """
import json
from pathlib import Path
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        name, log = self._task.get_name().rpartition(" : ")[2], Path(task_vars["log"])
        lines = log.read_text().splitlines() if log.exists() else []
        calls = [json.loads(line)["task"] for line in lines].count(name)
        environment = self._templar.template(self._task.environment)
        entry = {"task": name, "arguments": self._task.args, "environment": environment}
        with log.open("a") as stream:
            stream.write(json.dumps(entry, default=dict) + "\\n")
        answer = self._templar.template(task_vars["answers"].get(name, {}))
        if isinstance(answer, list):
            answer = answer[min(calls, len(answer) - 1)]
        common = {"changed": False, "rc": 0, "stdout": "", "stdout_lines": [], "stderr": "", "verdicts": [],
                  "status": "pass", "msg": "", "matched": 0, "files": []}
        return {**common, **answer}
"""
FOUND = ("libcuda1", "libnvidia-ml1", "nvidia-driver-cuda", "nvidia-kernel-open-dkms")


@dataclass(frozen=True)
class Call:
    """One module that the role ran."""

    task: str
    arguments: dict[str, Any]
    environment: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """What the role did on a host."""

    calls: list[Call]
    code: int
    output: str

    @property
    def tasks(self) -> list[str]:
        return [call.task for call in self.calls]

    def of(self, task: str) -> list[Call]:
        return [call for call in self.calls if call.task == task]


def driver(version: str, names: tuple[str, ...] = FOUND, **more: Any) -> dict[str, Any]:
    """Return a record, or with no names what a profile wants."""
    packages = dict.fromkeys(names, f"{version}-1")
    return {"version": version, "flavour": "open", "source": "nvidia", "parameters": {}, "packages": packages, **more}


def verdict(code: str, status: str = "fail", **evidence: Any) -> dict[str, Any]:
    return {
        "code": code, "status": status, "layer": "driver", "subject": code, "message": f"{code} it is.",
        "evidence": evidence, "action": "Do so.",
    }  # fmt: skip


def run_role(
    folder: Path,
    *,
    installed: dict[str, str],
    answers: dict[str, Any] | None = None,
    journal: dict[str, Any] | None = None,
    entry: str = "main",
    system: tuple[str, str] = ("Debian", "12"),
    **variables: Any,
) -> Outcome:
    """Run the role to 580.82.07 on a host with ``installed`` packages; ``journal`` is of its driver."""
    role = folder / "roles" / "nvidia_driver"
    shutil.copytree(ROOT / "roles" / "nvidia_driver", role)
    for path in [*role.glob("tasks/*.yml"), *role.glob("handlers/*.yml")]:
        text = re.sub(rf"(?m)^( *)ansible\.builtin\.(?!(?:{KEPT}):)\w+:", r"\1stand_in:", path.read_text())
        path.write_text(re.sub(r"(?m)^( *)bedplate_\w+:$", r"\1stand_in:", text))
    (folder / "action").mkdir()
    (folder / "action" / "stand_in.py").write_text(ACTION)
    distribution, major = system
    manager = "apt" if distribution in ("Debian", "Ubuntu") else "dnf"
    lines = [f"installed\t{name}\t{version}" for name, version in installed.items()]
    # The plan of a transaction is whatever was asked for.
    plan = {"packages": dict.fromkeys(FOUND, "580.82.07-1"), "plan": {"steps": []}, "verdicts": []}
    asked = f"Ask {'dpkg' if manager == 'apt' else 'rpm'} for the driver's packages"
    given = {asked: {"stdout_lines": lines}, "Ask apt what it would do": plan, **(answers or {})}
    shared = {
        "ansible_connection": "local", "ansible_python_interpreter": sys.executable, "log": str(folder / "log"),
        "answers": {"Facts": {"ansible_facts": {
            "distribution": distribution, "distribution_major_version": major, "distribution_version": major,
            "distribution_release": "bookworm", "pkg_mgr": manager}}, **given},
        "bedplate_driver_source": "nvidia", "bedplate_expected_gpus": -1, "bedplate_run": {"run_id": "r"},
        "bedplate_plan": {"driver": {"version": "580.82.07", "flavour": "open"}, "expect": {}},
        "bedplate_root": "/r", "bedplate_state_dir": "/s", "bedplate_sysroot": "/", "bedplate_simulated": False,
        "bedplate_before": {"state": {"layers": {"driver": journal} if journal else {}}}, **variables,
    }  # fmt: skip
    include = {"ansible.builtin.include_role": {"name": "nvidia_driver", "tasks_from": entry}}
    tasks = [{"name": "Facts", "stand_in": {}}, {"name": "Role", **include}]
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"gpu-01": shared}}}))
    (folder / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    done = ansible_playbook(
        "-i", folder / "hosts.yml", folder / "play.yml", cwd=folder, ANSIBLE_ROLES_PATH=str(folder / "roles"),
        ANSIBLE_ACTION_PLUGINS=str(folder / "action"),
    )  # fmt: skip
    calls = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    found = [Call(call["task"], call["arguments"], _merged(call["environment"])) for call in calls]
    return Outcome(found, done.returncode, done.stdout + done.stderr)


def _merged(environment: list[dict[str, str]]) -> dict[str, str]:
    """Return the environment of a task, which Ansible keeps as a list of dicts."""
    return {name: value for part in environment or [] for name, value in part.items()}
