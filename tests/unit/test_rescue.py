"""What provision.yml does when a change has failed: its own rescue, run with stand-ins for the roles.

What the roles do is tested on nodes; here it is which of them run, and in which case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_ansible import ansible_playbook

from bedplate.node.verdicts import Verdict

ROOT = Path(__file__).resolve().parents[2]
GPU = Verdict(
    "gpu.count", "fail", "driver", "GPUs", "NVML sees 7, and 8 are expected.", {}, "Look at `dmesg`."
).to_dict()
SEEN = {**GPU, "status": "pass"}
IMPORT = Verdict("import.error", "fail", "stack", "torch", "It raised.", {}, "Look there.").to_dict()
LOADS = Verdict("import.ok", "pass", "stack", "torch", "It imports.").to_dict()
WAITS = Verdict("driver.reboot_pending", "needs-reboot", "driver", "driver", "Older.", {}, "Reboot.").to_dict()

# host: what fails (verdicts, or a message), what is live, what its proof says (None: it breaks off), and who acts:
# the way back, the journal's `fail`, or, where the way back fails, both.
CASES: dict[str, tuple[Any, str | None, Any, str]] = {
    "hardware": ([GPU], "old-1", [GPU, LOADS], "fail"),
    "hardware-of-the-new-profile-only": ([GPU], "old-1", [SEEN, LOADS], "undo"),
    "hardware-and-a-stack-that-does-not-load": ([GPU], "old-1", [GPU, IMPORT], "undo"),
    "hardware-that-cannot-be-looked-at-again": ([GPU], "old-1", None, "undo"),
    "hardware-on-a-bare-node": ([GPU], None, [], "undo"),
    "the-stack": ([GPU, IMPORT], "old-1", [GPU, LOADS], "undo"),
    "a-reboot": ([WAITS], "old-1", [LOADS], "fail"),
    "a-task": ("no room", "old-1", [GPU], "undo"),
    "a-way-back-that-fails": ("no room", "old-1", [GPU], "fail"),
}

STUB = """#!/usr/bin/python
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule(argument_spec={{"verdicts": {{"type": "list", "elements": "raw", "default": []}}, {more}}}, \
supports_check_mode=True)
{body}
"""
FAILS = 'more = {"verdicts": p["verdicts"]} if p["verdicts"] else {}\nmodule.fail_json(msg=p["msg"], **more)'


def task(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"name": name, **arguments}]


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rescue")
    (provision,) = yaml.safe_load((ROOT / "playbooks" / "provision.yml").read_text())
    names = [item["name"] for item in provision["tasks"]]
    change = provision["tasks"][names.index("Change the layers, bottom up")]
    change["block"] = task("Verify", stub_fail={"msg": "{{ case.msg }}", "verdicts": "{{ case.failed }}"})
    after = provision["tasks"][names.index("Change the layers, bottom up") + 1 :]
    note = {"content": "{{ said | to_json }}", "dest": f"{folder}/{{{{ inventory_hostname }}}}.json", "mode": "0600"}
    said = {
        "who": "{{ 'undo' if rollback_outcome is defined else ansible_facts['stopped'] | default('nobody') }}",
        "outcome": "{{ bedplate_report_outcome }}",
        "generation": "{{ bedplate_report_generation }}",
    }
    write(
        folder / "library" / "stub_fail.py",
        STUB.format(more='"msg": {"type": "str"}', body=f"p = module.params\n{FAILS}"),
    )
    nothing = '"action": {}, "run_id": {}, "reason": {}, "root": {}, "state_dir": {}'
    body = 'module.exit_json(ansible_facts={"stopped": module.params["action"]})'
    write(folder / "library" / "bedplate_state.py", STUB.format(more=nothing, body=body))
    for role, tasks in {
        "bedplate/tasks/evidence": task("Gather", **{"ansible.builtin.debug": {"msg": "evidence"}}),
        "bedplate/tasks/report": task("Report", **{"ansible.builtin.copy": note}, vars={"said": said}),
        "rollback/tasks/undo": task("Point at the old one", **{"ansible.builtin.fail": {"msg": "no room either"}},
                                    when="inventory_hostname == 'a-way-back-that-fails'")
        + task("Undo", **{"ansible.builtin.set_fact": {"rollback_outcome": {
            "current": "{{ bedplate_begun.current }}", "verdicts": [], "simulated": False}}}),
        "python_stack/tasks/verify": [
            *task("Break off", **{"ansible.builtin.fail": {"msg": "no interpreter"}}, when="case.live is none"),
            *task("Say", **{"ansible.builtin.set_fact": {
                "python_stack_abi": {"verdicts": []}, "python_stack_verified": {"verdicts": "{{ case.live }}"}}}),
        ],
    }.items():  # fmt: skip
        write(folder / "roles" / f"{role}.yml", tasks)
    hosts = {
        host: {
            "case": {"msg": failed if isinstance(failed, str) else "x", "live": live,
                     "failed": [] if isinstance(failed, str) else failed},
            "bedplate_begun": {"current": current, "generation": "new-1"},
        }
        for host, (failed, current, live, _) in CASES.items()
    }  # fmt: skip
    shared = {
        "ansible_connection": "local", "ansible_python_interpreter": sys.executable, "bedplate_root": "/r",
        "bedplate_state_dir": "/s", "bedplate_run": {"run_id": "r"}, "bedplate_plan": {"id": "new-1"},
        "bedplate_layers_now": ["driver", "toolkit", "stack"],
    }  # fmt: skip
    write(folder / "hosts.yml", {"all": {"hosts": hosts, "vars": shared}})
    play = {"name": "Provision", "hosts": "all", "gather_facts": False, "tasks": [change, *after]}
    write(folder / "play.yml", [play])
    done = ansible_playbook(
        "-i", folder / "hosts.yml", folder / "play.yml", cwd=folder, ANSIBLE_LIBRARY=str(folder / "library"),
        ANSIBLE_ROLES_PATH=str(folder / "roles"), ANSIBLE_CALLBACK_RESULT_FORMAT="json",
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("fatal: [")]
    ends = {line.split("[")[1].split("]")[0]: line.partition("=> ")[2] for line in lines if "did not go live" in line}
    assert set(ends) == set(CASES), done.stdout
    return {
        host: {**json.loads((folder / f"{host}.json").read_text()), "msg": json.loads(ends[host])["msg"]}
        for host in CASES
    }


@pytest.mark.parametrize("host", CASES)
def test_who_acts_after_a_failure(outcome: dict[str, dict[str, Any]], host: str) -> None:
    _, current, _, who = CASES[host]
    assert outcome[host]["who"] == who
    assert outcome[host]["generation"] == (current or "")


def test_what_is_said_of_a_node_that_stays(outcome: dict[str, dict[str, Any]]) -> None:
    assert outcome["hardware"]["outcome"] == "needs_person"
    assert "Nothing went back, since going back cures no hardware. The node is on old-1" in outcome["hardware"]["msg"]
    assert outcome["a-reboot"]["outcome"] == "failed"
    assert "Nothing went back, since nothing is broken" in outcome["a-reboot"]["msg"]
    assert outcome["the-stack"]["outcome"] == "rolled_back"
    assert "Nothing went back" not in outcome["the-stack"]["msg"]


def test_what_is_said_when_going_back_fails(outcome: dict[str, dict[str, Any]]) -> None:
    there = outcome["a-way-back-that-fails"]
    assert there["outcome"] == "needs_person"
    told = ["no room\n", "Going back failed in: Point at the old one", "no room either", "this node needs a person"]
    places = [there["msg"].index(words) for words in told]
    assert places == sorted(places)
