"""What --tags and --skip-tags leave of provision.yml, as Ansible says it: the frame of a change is in each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from run_ansible import ansible_playbook

ROOT = Path(__file__).resolve().parents[2]
FRAME = {
    "bedplate : Write the intent",
    "Run the operator's hook before the change",
    "node_tools : Create the probe user",
    "See what works before the change",
    "Prove the stack that is live above what changed",
    "End a change that leaves the stack alone",
    "Report",
    "Stop the rollout at this host",
}
LAYERS = {"Driver": "driver", "Toolkit": "toolkit", "python_stack : Go live with one rename": "stack"}


@pytest.mark.parametrize("option", ["--tags", "--skip-tags"])
@pytest.mark.parametrize("layer", LAYERS.values())
def test_a_tag_chooses_layers_and_never_their_frame(option: str, layer: str) -> None:
    done = ansible_playbook("-i", "gpu_nodes,", ROOT / "playbooks" / "provision.yml", "--list-tasks", option, layer)
    assert done.returncode == 0, done.stderr
    listed = done.stdout
    names = {line.partition("\tTAGS:")[0].strip() for line in listed.splitlines()}
    assert names >= FRAME
    chosen = {tag for name, tag in LAYERS.items() if name in names}
    assert chosen == ({layer} if option == "--tags" else set(LAYERS.values()) - {layer})


def tasks(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all tasks of a list, those of its blocks too."""
    found = []
    for item in items:
        found.append(item)
        for key in ("tasks", "block", "rescue", "always"):
            found += tasks(item.get(key) or [])
    return found


@pytest.mark.parametrize("playbook", sorted((ROOT / "playbooks").glob("*.yml")), ids=lambda path: path.name)
def test_what_is_included_under_a_tag_runs_under_it(playbook: Path) -> None:
    """An include has its own tags only: without `apply` the tasks that it brings are filtered out."""
    for task in tasks(yaml.safe_load(playbook.read_text())):
        for action in ("ansible.builtin.include_tasks", "ansible.builtin.include_role"):
            if action in task and task.get("tags"):
                assert task[action].get("apply", {}).get("tags"), task["name"]
