"""The lookups under a real ansible-playbook, on localhost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_ansible import ansible_playbook
from small_wheels import make_wheel, profile_data, write_profile

from bedplate.controller.locking import make_lock
from bedplate.controller.profiles import for_deploy, load_profile
from bedplate.controller.resolver import Sources, Upgrade

ROOT = Path(__file__).resolve().parents[2]


def play(
    tmp_path: Path, *tasks: dict[str, Any], hosts: str = "one,", **variables: Any
) -> subprocess.CompletedProcess[str]:
    """Run tasks with the repository's ansible.cfg; they see the repository's plugins and nothing of the machine's."""
    playbook = tmp_path / "play.yml"
    playbook.write_text(
        yaml.safe_dump([{"hosts": "all", "gather_facts": False, "vars": variables, "tasks": list(tasks)}])
    )
    return ansible_playbook(
        "-i", hosts, "-c", "local", playbook, "-e", f"ansible_python_interpreter={sys.executable}",
        ANSIBLE_FORCE_COLOR="0",
    )  # fmt: skip


def write(to: Path, **expressions: str) -> dict[str, Any]:
    """A task that writes the values of expressions as JSON to the file TO-<host>."""
    content = ", ".join(f"{name}={expression}" for name, expression in expressions.items())
    return {
        "ansible.builtin.copy": {
            "content": f"{{{{ dict({content}) | to_json }}}}",
            "dest": f"{to}-{{{{ inventory_hostname }}}}",
        }
    }


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lookups")
    make_wheel(path / "wheels", "alpha", "1.0")
    for name in ("good", "unlocked"):
        write_profile(path / "profiles", name, profile_data())
    write_profile(path / "profiles", "bad", profile_data() | {"refused": "It does not load."})
    for name in ("good", "bad"):
        profile = load_profile(name, [path / "profiles"])
        make_lock(profile, [], Sources(no_index=True, find_links=[str(path / "wheels")]), Upgrade()).write()
    return path / "profiles"


def test_profile_and_run_and_their_types(tmp_path: Path, profiles: Path) -> None:
    profile = f"lookup('bedplate_profile', name, target='cp311-x86_64', profiles=['{profiles}'])"
    bad = f"lookup('bedplate_profile', 'bad', profiles=['{profiles}'], allow_refused=true)"
    done = play(
        tmp_path,
        write(
            tmp_path / "first",
            profile=profile,
            pin=f"({profile}).stack.requirements[0]",
            refused=f"({bad}).refused",
            run="lookup('bedplate_run')",
            alive="lookup('bedplate_run').holder | bedplate_holder_alive",
            dead="lookup('bedplate_run') | bedplate_intent_is_dead",
        ),
        hosts="one,two",
        name="{{ 'go' ~ 'od' }}",
    )
    assert done.returncode == 0, done.stdout
    first, other = (json.loads((tmp_path / f"first-{host}").read_text()) for host in ("one", "two"))
    assert first == other, "every worker gives one answer"
    assert first["profile"] == for_deploy("good", "cp311-x86_64", [profiles])
    assert first["pin"] == "alpha==1.0"
    assert first["refused"] == "It does not load."
    assert first["run"]["holder"]["pid"] != os.getpid()
    assert (first["alive"], first["dead"]) == (True, False)
    # that run has ended, so its holder is surely dead now
    after = play(
        tmp_path,
        write(
            tmp_path / "second",
            dead="intent | bedplate_intent_is_dead",
            none="none | bedplate_intent_is_dead",
            id="lookup('bedplate_run').run_id",
        ),
        intent=first["run"],
    )
    assert after.returncode == 0, after.stdout
    second = json.loads((tmp_path / "second-one").read_text())
    assert (second["dead"], second["none"]) == (True, False)
    assert second["id"] != first["run"]["run_id"]


MISTAKES = {
    "'goood'": "did you mean `good`? Known: bad, good, unlocked.",
    "'../x'": "'../x' is not a profile name",
    "'unlocked'": "profile unlocked is not locked: run `bedplate lock unlocked",
    "'bad'": "profile bad is refused: It does not load.",
    "'good', target='cp313-x86_64'": "profile good has no target `cp313-x86_64`",
    "'good', 'bad'": "bedplate_profile takes the name of one profile",
    "'good', targett='x'": "bedplate_profile has no option `targett`; did you mean `target`?",
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory, profiles: Path) -> str:
    """What ansible-playbook prints when each of the mistakes is made in turn."""
    calls = [f"lookup('bedplate_profile', {call}, profiles=['{profiles}'])" for call in MISTAKES]
    tasks = [{"ansible.builtin.debug": {"msg": f"{{{{ {call} }}}}"}, "ignore_errors": True} for call in calls]
    done = play(tmp_path_factory.mktemp("refusals"), *tasks)
    assert f"ignored={len(calls)} " in done.stdout
    return done.stdout + done.stderr


@pytest.mark.parametrize("message", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_reach_the_operator_word_for_word(refusals: str, message: str) -> None:
    assert message in refusals
    assert "Traceback" not in refusals
