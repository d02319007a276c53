#!/usr/bin/env python3
"""The main job, once, on one container node: provision, an upgrade whose ABI does not fit, and back."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bedplate"
INVENTORY = ROOT / "inventories" / "demo"
NODE = "bedplate-demo-1"
TARGET = "cp311-x86_64"
console = Console(highlight=False)


@dataclass(frozen=True)
class Stack:
    """Which profiles the demonstration uses, where their wheels are, and what it costs."""

    good: str
    bad: str
    profiles: Path
    wheels: Path
    disk_gb: int
    cost: str


STACKS = {
    "real": Stack(
        good="cu128-torch2.9.1",
        bad="incident-torch2.10",
        profiles=ROOT / "profiles",
        wheels=CACHE / "wheels",
        disk_gb=30,
        cost="about 6 GB of wheels the first time (kept in {wheels}), 30 GB of disk, 3 to 15 minutes by network",
    ),
    "tiny": Stack(
        good="tiny-good",
        bad="tiny-incident",
        profiles=ROOT / ".cache" / "tiny" / "profiles",
        wheels=ROOT / ".cache" / "tiny" / "wheels",
        disk_gb=3,
        cost="no downloads but the node image's Debian packages, about 2 minutes",
    ),
}


class UnexpectedError(Exception):
    """A step ended otherwise than the demonstration says it must."""


def run(*command: str | Path, expect: int = 0) -> None:
    """Run a command in view of the person; raise UnexpectedError when it exits with another code than expected."""
    words = [str(word) for word in command]
    console.print(f"[dim]$ {shlex.join(words)}[/dim]")
    started = time.monotonic()
    code = subprocess.run(words, cwd=ROOT, check=False).returncode
    console.print(f"[dim]  {time.monotonic() - started:.0f} s, exit code {code}[/dim]")
    if code != expect:
        raise UnexpectedError(f"{shlex.join(words)} exited with {code}, expected {expect}")


def playbook(name: str, *arguments: str, expect: int = 0) -> None:
    """Run one of the project's playbooks on the demo inventory."""
    run("ansible-playbook", "-i", INVENTORY, ROOT / "playbooks" / name, *arguments, expect=expect)


def step(number: int, title: str) -> None:
    """Print a heading."""
    console.print()
    console.rule(f"[bold]{number}. {title}", align="left")


def node_state() -> dict[str, Any]:
    """Return the journal of the node, read from its disk and not from what a playbook printed."""
    command = ["podman", "exec", NODE, "cat", "/var/lib/bedplate/state.json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    state: dict[str, Any] = json.loads(done.stdout)
    return state


def show_outcome(stack: Stack) -> None:
    """Print the generations as the node records them; raise UnexpectedError when it is not back on the good one."""
    state = node_state()
    table = Table(title=f"{NODE} (simulated GPU node), from its own journal", title_justify="left")
    for column in ("generation", "status", "live", "why"):
        table.add_column(column, overflow="fold")
    for name, generation in state["generations"].items():
        live = "live" if name == state["active"] else ""
        reasons = (generation["reason"] or "").splitlines()
        more = f" ({len(reasons) - 1} more files say the like.)" if len(reasons) > 1 else ""
        table.add_row(name, generation["status"], live, "".join(reasons[:1]) + more)
    console.print(table)
    statuses = {generation["profile"]: generation["status"] for generation in state["generations"].values()}
    if not str(state["active"]).startswith(f"{stack.good}-") or statuses.get(stack.bad) != "failed":
        raise UnexpectedError(
            f"expected {stack.good} live and {stack.bad} failed, the node says {state['active']}, {statuses}"
        )


def story(stack: Stack, tiny: bool) -> None:
    """Tell the whole story; raise UnexpectedError at the first step that goes otherwise."""
    site = ["-e", json.dumps({"bedplate_profiles": [str(stack.profiles)]})]

    step(1, "Wheels")
    if tiny:
        run(sys.executable, ROOT / "tests" / "tiny" / "build.py", ROOT / ".cache" / "tiny")
    else:
        for profile in (stack.good, stack.bad):
            run("bedplate", "fetch", profile, "--target", TARGET, "--to", stack.wheels)

    step(2, "One container node that simulates eight RTX PRO 6000 Blackwell GPUs")
    playbook("nodes/create.yml", "-e", f"nodes_wheels_dir={stack.wheels}")

    step(3, f"Provision {stack.good}: build, ask the files, import, all-reduce, go live")
    playbook("site.yml", *site, "-e", f"bedplate_profile={stack.good}")

    step(4, f"{stack.bad} is refused on the controller, before the node is touched")
    playbook("site.yml", *site, "-e", f"bedplate_profile={stack.bad}", expect=2)

    step(5, f"{stack.bad} forced: the node catches it and stays on {stack.good}")
    playbook(
        "site.yml",
        *site,
        "-e",
        f"bedplate_profile={stack.bad}",
        "-e",
        "bedplate_allow_refused=true",
        expect=2,
    )

    step(6, "What the node says")
    show_outcome(stack)


def main() -> int:
    """Run the demonstration and clean up, whatever happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stack", choices=STACKS, default="real", help="real wheels, or tiny ones built here")
    parser.add_argument("--keep", action="store_true", help="leave the node running at the end")
    arguments = parser.parse_args()
    stack = STACKS[arguments.stack]

    console.print(
        Panel(
            f"A bare node goes to the verified stack [bold]{stack.good}[/bold]; an upgrade to "
            f"[bold]{stack.bad}[/bold] does not fit its own torch, is diagnosed from the files, and the node stays on "
            "what worked.\n"
            f"Cost: {stack.cost.format(wheels=stack.wheels)}.",
            title="Bedplate demo",
        )
    )
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < stack.disk_gb:
        console.print(f"[red]The demo needs {stack.disk_gb} GB of free disk, {ROOT} has {free_gb:.0f} GB.[/red]")
        return 1

    started = time.monotonic()
    try:
        story(stack, tiny=arguments.stack == "tiny")
        outcome = "[green]done[/green]: the bad upgrade was caught, explained and undone"
        code = 0
    except UnexpectedError as error:
        outcome, code = f"[red]failed[/red]: {error}", 1
    except KeyboardInterrupt:
        outcome, code = "[yellow]interrupted[/yellow]", 130
    finally:
        if not arguments.keep:
            step(7, "Clean up")
            playbook("nodes/destroy.yml")
    console.print(f"\nDemo {outcome} ({time.monotonic() - started:.0f} s).")
    return code


if __name__ == "__main__":
    sys.exit(main())
