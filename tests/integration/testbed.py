"""A container node for the tests, and the playbooks that run on it.

Assertions read what the node shows (podman exec), not what a task printed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOK_LIMIT_S = 1800  # there and back, with two real builds of a driver's modules on a busy machine
KEPT = "/root/kept.tar"


@dataclass
class Play:
    """A finished ansible-playbook: exit code and everything it printed."""

    code: int
    output: str


@dataclass
class Node:
    """One container node and the inventory that reaches it."""

    name: str
    inventory: Path
    profiles: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    # ---- what the node shows ----

    def sh(self, command: str, check: bool = True) -> str:
        """Run a shell command on the node as root and return its output, stripped."""
        done = subprocess.run(
            ["podman", "exec", self.name, "sh", "-c", command], capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def state(self) -> dict[str, Any]:
        """Return the node's journal, or an empty one when there is none yet."""
        text = self.sh("cat /var/lib/bedplate/state.json 2>/dev/null || true")
        empty = {"active": None, "previous": None, "generations": {}, "intent": None, "runs": []}
        return json.loads(text) if text else empty

    def current(self) -> str:
        """Return the id that the link names, or an empty string."""
        return self.sh('basename "$(readlink /opt/bedplate/current || true)"')

    def statuses(self) -> dict[str, str]:
        """Return the status of each profile's generation."""
        return {g["profile"]: g["status"] for g in self.state()["generations"].values()}

    def live_torch(self) -> str:
        """Import torch and the kernels by way of `current`, as a service would; return torch's version."""
        program = "import torch, sgl_kernel; print(torch.__version__)"
        return self.sh(f"/opt/bedplate/current/venv/bin/python -c '{program}'")

    # ---- what is done to it ----

    def command(self, playbook: str, profile: str, **variables: Any) -> list[str]:
        extra = {"bedplate_profile": profile, "bedplate_profiles": [str(self.profiles)], **variables}
        return [
            "ansible-playbook", "-i", str(self.inventory), "-l", self.name, "-e", json.dumps(extra),
            str(ROOT / "playbooks" / playbook),
        ]  # fmt: skip

    def play(self, playbook: str, profile: str, *arguments: str, **variables: Any) -> Play:
        """Run a playbook to its end."""
        done = subprocess.run(
            [*self.command(playbook, profile, **variables), *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=PLAYBOOK_LIMIT_S,
        )  # fmt: skip
        return Play(done.returncode, done.stdout)

    def start(self, playbook: str, profile: str, **variables: Any) -> subprocess.Popen[str]:
        """Start a playbook in a process group of its own, as a terminal would."""
        process = subprocess.Popen(
            self.command(playbook, profile, **variables),
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.running.append(process)
        return process

    def interrupt(self, profile: str, task: str, how: signal.Signals, after_s: float, **variables: Any) -> Play:
        """Run site.yml and send a signal to its process group a moment after a task has begun."""
        process = self.start("site.yml", profile, **variables)
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if line.startswith("TASK [") and f"{task}]" in line:
                time.sleep(after_s)
                os.killpg(process.pid, how)
                break
        else:
            pytest.fail(f"the task {task!r} never ran:\n{output}")
        rest, _ = process.communicate(timeout=PLAYBOOK_LIMIT_S)
        return Play(process.returncode, output + rest)

    def keep(self) -> None:
        """Keep what Bedplate has on the node now, for `restore`."""
        self.sh(f"tar -C / -cf {KEPT} opt/bedplate var/lib/bedplate etc/ansible")

    def restore(self) -> None:
        """Bring that back; quicker than provisioning again, and the same."""
        self.wipe()
        self.sh(f"tar -C / -xpf {KEPT}")

    def wipe(self) -> None:
        """Make the node bare again, apart from packages."""
        self.sh(
            "umount /opt/bedplate/generations 2>/dev/null; pkill -f '^/opt/bedplate';"
            " rm -rf /opt/bedplate /var/lib/bedplate /etc/ansible/facts.d /etc/fakegpu.conf; true"
        )


def run(*command: str | Path) -> None:
    """Run a command of the set-up, loudly when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}"


def wheel_cache() -> Path:
    """Return where real wheels are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bedplate" / "wheels"


def make_nodes(
    folder: Path, prefix: str, count: int, wheels: Path, profiles: Path, kind: str = "plain"
) -> Iterator[list[Node]]:
    """Create nodes of a kind (playbooks/nodes/vars), yield them, remove them."""
    (folder / "group_vars").symlink_to(ROOT / "inventories" / "demo" / "group_vars")
    (folder / "hosts.yml").symlink_to(ROOT / "inventories" / "demo" / "hosts.yml")
    variables = json.dumps(
        {
            "nodes_prefix": prefix,
            "nodes_count": count,
            "nodes_kind": kind,
            "nodes_inventory_dir": str(folder),
            "nodes_wheels_dir": str(wheels),
        }
    )
    run("ansible-playbook", ROOT / "playbooks" / "nodes" / "create.yml", "-e", variables)
    nodes = [Node(f"{prefix}-{number}", folder, profiles) for number in range(1, count + 1)]
    yield nodes
    for process in (process for node in nodes for process in node.running):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    run("ansible-playbook", ROOT / "playbooks" / "nodes" / "destroy.yml", "-e", variables)
