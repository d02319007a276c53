"""Every action of a node's journal, one behaviour a test."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from generation_tools import HOLDER, A, B, C, check_settled, install, paths_in, provision

from bedplate.node.state.generations import Generations, StateError
from bedplate.node.state.journal import Paths

STACK_FAILS = [{"code": "import.undefined_symbol", "status": "fail", "layer": "stack"}]
DRIVER_FAILS = [{"code": "gpu.count", "status": "fail", "layer": "driver"}]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return paths_in(tmp_path)


@pytest.fixture
def node(paths: Paths) -> Generations:
    return Generations(paths)


def refused(code: str, action: object, *args: object, **options: object) -> str:
    with pytest.raises(StateError) as caught:
        action(*args, **options)  # type: ignore[operator]
    assert caught.value.code == code
    return str(caught.value)


def test_reading_a_bare_node_changes_nothing(node: Generations, tmp_path: Path) -> None:
    seen = node.read(A)
    assert (seen["current"], seen["clean"], seen["changed"], seen["drift"]) == (None, False, False, [])
    assert list(tmp_path.iterdir()) == []


def test_a_run_forward(node: Generations, paths: Paths) -> None:
    begun = node.begin("r1", A, profile="stack-a", target="cp311-x86_64", holder=HOLDER, step="baseline")
    assert begun["changed"]
    assert not begun["reused"]
    assert begun["directory"] == f"{paths.root}/generations/{A}"
    assert begun["state"]["intent"]["holder"] == HOLDER
    assert begun["state"]["intent"]["step"] == "baseline"
    install(begun["directory"])
    assert node.step("r1", "build")["state"]["intent"]["step"] == "build"
    sealed = node.built("r1", A)
    assert sealed["manifest"] == {
        "dists": 2,
        "files": 10,
        "bytes": sealed["manifest"]["bytes"],
        "unlike_record": 0,
    }
    assert sealed["state"]["generations"][A]["status"] == "built"
    assert not os.path.lexists(paths.current)
    done = node.commit("r1", A, [{"code": "import.ok", "status": "pass"}])
    assert 0 < done["switch_ms"] < 50
    assert os.readlink(paths.current) == f"generations/{A}"
    run = check_settled(paths)["runs"][-1]
    assert (run["run_id"], run["from"], run["to"], run["result"]) == ("r1", None, A, "active")
    assert run["verdicts"] == [{"code": "import.ok", "status": "pass"}]
    assert run["switch_ms"] == done["switch_ms"]
    assert node.read(A)["clean"]
    assert not node.read(B)["clean"]


def test_upgrade_remembers_the_one_before(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    provision(node, "r2", B)
    state = check_settled(paths)
    assert (state["active"], state["previous"]) == (B, A)


def test_provisioning_the_live_one_again_switches_nothing(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    provision(node, "r2", B)
    again = provision(node, "r3", B)
    assert again["switch_ms"] is None
    state = check_settled(paths)
    assert (state["active"], state["previous"]) == (B, A)


def test_actions_of_one_run_may_be_repeated(node: Generations) -> None:
    node.begin("r1", A)
    assert not node.begin("r1", A)["changed"]
    install(node.paths.generation(A))
    node.step("r1", "build")
    assert not node.step("r1", "build")["changed"]
    node.built("r1")
    assert not node.built("r1")["changed"]
    node.commit("r1")
    assert not node.commit("r1")["changed"]


def test_public_files_are_readable_by_all_and_the_lock_is_not(node: Generations, paths: Paths) -> None:
    old = os.umask(0o077)
    try:
        provision(node, "r1", A)
    finally:
        os.umask(old)
    modes = {path: stat.S_IMODE(os.stat(path).st_mode) for path in (paths.state, paths.fact, paths.lock)}
    assert modes == {paths.state: 0o644, paths.fact: 0o644, paths.lock: 0o600}
    for path in (paths.root, paths.state_dir, paths.facts_dir, paths.generation(A)):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o755
    assert stat.S_IMODE(os.stat(f"{paths.generation(A)}/manifest.json").st_mode) == 0o644


def test_another_run_is_refused_by_name(node: Generations) -> None:
    node.begin("r1", A, holder=HOLDER, step="build")
    said = refused("busy", node.begin, "r2", B)
    assert f"{os.uname().nodename} is being changed by ops@deploy1 (pid 4711, run r1) since 2" in said
    assert "at step build" in said
    for action in (node.step, node.commit):
        refused("busy", action, "r2", "x" if action == node.step else A)
    refused("busy", node.settle, "r2")
    assert not node.fail("r2", "never began")["changed"], "a rescue that never began touches nothing"
    assert not node.rollback("r2", reason="never began")["changed"]
    refused("busy", node.rollback, "r2", A, kind="rollback")
    assert node.read()["state"]["intent"]["run_id"] == "r1"


def test_take_over_settles_first(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    node.begin("r2", B, holder=HOLDER, step="build")
    install(paths.generation(B))
    taken = node.begin("r3", B, take_over=True)
    assert f"the half-built {B} is removed" in taken["settled"]
    assert "ops@deploy1 (pid 4711, run r2) was interrupted at step build" in taken["settled"]
    assert not taken["reused"]
    assert os.listdir(taken["directory"]) == []
    assert taken["state"]["runs"][-1]["result"] == "settled"
    assert "run r3" in refused("busy", node.step, "r2", "x")
    install(taken["directory"])
    node.built("r3")
    node.commit("r3")
    assert "last: run r3, active" in refused("refused", node.commit, "r2", B)


def test_built_but_unverified_is_kept_for_the_next_run(node: Generations, paths: Paths) -> None:
    node.begin("r1", A)
    install(paths.generation(A))
    node.built("r1")
    assert f"{A} is built and is kept" in node.settle(take_over=True)["settled"]
    assert node.begin("r2", A)["reused"]


def test_failed_before_commit(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    node.begin("r2", B)
    install(paths.generation(B))
    node.built("r2")
    failed = node.fail("r2", "torch does not load.", STACK_FAILS)
    state = check_settled(paths)
    assert state["generations"][B]["status"] == "failed"
    assert state["generations"][B]["reason"] == "torch does not load."
    assert (state["active"], state["runs"][-1]["result"]) == (A, "failed")
    assert state["runs"][-1]["verdicts"] == STACK_FAILS
    assert os.path.isdir(paths.generation(B)), "it stays for study"
    assert failed["message"] == f"{A} stays live; run r2 failed: torch does not load."
    assert not node.fail("r2", "again")["changed"]
    retry = node.begin("r3", B)
    assert not retry["reused"]
    assert os.listdir(retry["directory"]) == [], "a failed one is built anew"


def test_a_half_built_one_loses_its_files_when_it_fails(node: Generations, paths: Paths) -> None:
    node.begin("r1", A)
    install(paths.generation(A))
    assert node.fail("r1", "disk full")["removed"] == [A]
    assert not os.path.exists(paths.generation(A))
    check_settled(paths)


def test_a_verified_one_is_blamed_only_for_the_stack(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    provision(node, "r2", B)
    assert node.begin("r3", A)["reused"]
    node.fail("r3", "7 of 8 GPUs", DRIVER_FAILS)
    assert check_settled(paths)["generations"][A]["status"] == "verified"
    node.begin("r4", A)
    node.fail("r4", "no import", STACK_FAILS)
    state = check_settled(paths)
    assert (state["generations"][A]["status"], state["previous"]) == ("failed", None)


def test_failing_on_the_live_one_blames_nobody(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    node.begin("r2", A)
    node.fail("r2", "driver", STACK_FAILS)
    assert check_settled(paths)["generations"][A]["status"] == "verified"


def test_only_what_is_built_goes_live(node: Generations) -> None:
    node.begin("r1", A)
    assert f"{A} is building" in refused("refused", node.commit, "r1")
    assert "no installed distribution" in refused("missing", node.built, "r1")
    refused("refused", node.commit, "r1", B)


def test_rollback_after_commit_restores_what_was(node: Generations, paths: Paths) -> None:
    provision(node, "r1", C)
    provision(node, "r2", A)
    provision(node, "r3", B)
    refused("refused", node.fail, "r3", "too late")
    back = node.rollback("r3", reason="all-reduce hangs.", verdicts=STACK_FAILS)
    assert back["switch_ms"] > 0
    state = check_settled(paths)
    assert (state["active"], state["previous"]) == (A, C)
    assert state["generations"][B] | {"created": 0, "verified": 0} == {
        "profile": B,
        "target": "",
        "status": "failed",
        "created": 0,
        "verified": 0,
        "reason": "all-reduce hangs.",
        "layers": {},
    }
    assert [run["run_id"] for run in state["runs"]] == ["r1", "r2", "r3"]
    assert (state["runs"][-1]["result"], state["runs"][-1]["verdicts"]) == ("rolled_back", STACK_FAILS)
    assert not node.rollback("r3", reason="again")["changed"]


def test_rollback_of_the_first_leaves_a_bare_node(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    node.rollback("r1", reason="bad")
    assert not os.path.lexists(paths.current)
    assert check_settled(paths)["active"] is None


def test_rollback_before_commit_is_fail(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    node.begin("r2", B)
    node.rollback("r2", reason="bad")
    state = check_settled(paths)
    assert (state["active"], state["generations"][B]["status"]) == (A, "failed")


def test_rollback_of_a_run_that_kept_the_live_one(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    provision(node, "r2", A)
    node.rollback("r2", reason="service does not start")
    state = check_settled(paths)
    assert (state["active"], state["generations"][A]["status"]) == (A, "verified")
    assert state["runs"][-1]["result"] == "failed"


def test_rollback_on_demand(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    provision(node, "r2", B)
    begun = node.begin("r3", kind="rollback", holder=HOLDER)
    assert (begun["generation"], begun["reused"]) == (A, True)
    back = node.rollback("r3", kind="rollback")
    assert 0 < back["switch_ms"] < 50
    state = check_settled(paths)
    assert (state["active"], state["previous"]) == (A, B)
    assert not node.rollback("r3", kind="rollback")["changed"], "not back and forth"
    node.rollback("r4", B, kind="rollback")
    assert check_settled(paths)["active"] == B
    for again in (node.begin("r5", B, kind="rollback"), node.rollback("r5", B, kind="rollback")):
        assert not again["changed"]
        assert again["message"] == f"{B} is active already."


def test_rollback_says_what_there_is(node: Generations, paths: Paths) -> None:
    said = refused("refused", node.rollback, "r0", kind="rollback")
    assert "no previous verified generation" in said
    provision(node, "r1", A)
    provision(node, "r2", B)
    provision(node, "r3", C)
    said = refused("refused", node.rollback, "r4", "unknown-000000000000", kind="rollback")
    assert "unknown here" in said
    assert f"Verified: {A}, {B}." in said
    with open(f"{paths.generation(B)}/venv/lib/python3.11/site-packages/dist0/m1.py", "a") as file:
        file.write("edited")
    said = refused("refused", node.rollback, "r4", kind="rollback")
    assert "dist0/m1.py: 7 bytes, RECORD says 1" in said
    assert f"Other verified: {A}." in said
    assert check_settled(paths, damaged=B)["active"] == C


def test_a_damaged_generation_is_built_anew(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    provision(node, "r2", B)
    os.unlink(f"{paths.generation(A)}/venv/bin/dist0")
    begun = node.begin("r3", A)
    assert not begun["reused"]
    assert begun["removed"] == [A]
    assert begun["state"]["previous"] is None, "there is nothing whole to go back to meanwhile"
    node.fail("r3", "x")
    check_settled(paths)


def test_the_live_one_is_never_repaired_in_place(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    os.unlink(f"{paths.generation(A)}/venv/bin/dist0")
    assert "move" in refused("refused", node.begin, "r2", A)
    assert node.read()["state"]["intent"] is None
    shutil.move(paths.generation(A), f"{paths.root}/aside")  # what the message says
    begun = node.begin("r2", A)
    assert "is not on disk any more" in begun["settled"]
    assert not os.path.lexists(paths.current)
    install(begun["directory"])
    node.built("r2")
    node.commit("r2")
    check_settled(paths)


def test_the_operators_own_link_is_followed(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    provision(node, "r2", B)
    os.unlink(paths.current)
    os.symlink(f"{paths.root}/generations/{A}", paths.current)  # absolute, as people write it
    seen = node.read()
    assert not seen["clean"]
    assert seen["current"] == A
    assert "by hand" in node.settle()["settled"]
    state = node.read()["state"]
    assert (state["active"], state["previous"]) == (A, B)


def test_the_documented_way_by_hand_works(node: Generations, paths: Paths) -> None:
    """docs/rollback.md, word for word but for the places."""
    provision(node, "r1", A)
    provision(node, "r2", B)
    document = (Path(__file__).parents[2] / "docs" / "rollback.md").read_text()
    look, switch, journal = re.findall(r"```sh\n(.*?)```", document, re.DOTALL)

    def shell(text: str) -> str:
        for said, here in (
            ("/var/lib/bedplate", paths.state_dir),
            ("/opt/bedplate", paths.root),
            ("cu128-torch2.9.1-0123456789ab", A),
        ):
            text = text.replace(said, here)
        return subprocess.run(["sh", "-ec", text], check=True, capture_output=True, text=True).stdout

    assert f"generations/{B}" in shell(look)
    shell(switch[: switch.rindex("/opt/bedplate/current/venv/bin/python")])
    assert "by hand" in node.settle()["settled"]
    assert check_settled(paths)["active"] == A
    Path(paths.state).write_text("{")
    shell(journal)
    assert node.read()["clean"]
    provision(node, "r3", B)
    assert check_settled(paths)["previous"] == A


@pytest.mark.parametrize("target", ["generations/nowhere-000000000000", "/etc", "generations/../../etc", None])
def test_a_strange_link_is_put_right(node: Generations, paths: Paths, target: str | None) -> None:
    provision(node, "r1", A)
    os.unlink(paths.current)
    if target:
        os.symlink(target, paths.current)
    seen = node.read()
    assert not seen["clean"]
    assert seen["drift"]
    assert f"it names {A} again" in node.settle()["settled"]
    check_settled(paths)


def test_a_strange_link_with_nothing_to_put_there_is_an_error(node: Generations, paths: Paths) -> None:
    os.makedirs(paths.root)
    os.symlink("/etc", paths.current)
    said = refused("refused", node.begin, "r1", A)
    assert "names /etc, which is not a generation" in said
    assert "remove" in said
    assert os.readlink(paths.current) == "/etc"


def test_a_directory_called_current_is_left_alone(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    os.unlink(paths.current)
    os.mkdir(paths.current)
    assert "current" in refused("io", node.settle)
    assert os.path.isdir(paths.current)


def test_missing_file_system_is_not_mistaken_for_an_empty_node(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    os.rename(paths.root, paths.root + ".unmounted")
    assert "mounted?" in refused("missing", node.settle)
    os.rename(paths.root + ".unmounted", paths.root)
    assert node.read()["clean"]


def test_generations_may_not_be_a_link(node: Generations, paths: Paths, tmp_path: Path) -> None:
    os.makedirs(paths.root)
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", paths.generations)
    assert "is not a directory" in refused("io", node.begin, "r1", A)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_in_place_of_a_generation_is_not_followed(node: Generations, paths: Paths, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    os.makedirs(paths.generations)
    os.symlink(precious, paths.generation(A))
    assert "is not a directory" in refused("io", node.begin, "r1", A)
    assert (precious / "file").exists()


def test_prune(node: Generations, paths: Paths) -> None:
    names = [f"p{number}-{'0' * 12}" for number in range(6)]
    for number, name in enumerate(names[:5]):
        provision(node, f"r{number}", name)
    node.begin("r5", names[5])
    install(paths.generation(names[5]))
    node.built("r5")
    node.fail("r5", "bad", STACK_FAILS)
    planned = Generations(paths, check=True).prune(keep=3)
    assert (planned["removed"], planned["changed"]) == (names[:3], True)
    assert os.path.isdir(paths.generation(names[0]))
    pruned = node.prune(keep=3)
    assert pruned["removed"] == names[:3]
    assert set(check_settled(paths)["generations"]) == set(names[3:]), "the newest, of which one failed"
    assert not node.prune(keep=3)["changed"]
    assert node.prune(keep=1)["removed"] == [names[5]], "active and previous stay"
    refused("invalid", node.prune, 0)


def test_prune_spares_what_a_run_needs(node: Generations, paths: Paths) -> None:
    for run, name in (("r1", A), ("r2", B), ("r3", C)):
        provision(node, run, name)
    node.begin("r4", A)
    assert node.prune(keep=1)["removed"] == []
    node.fail("r4", "x")
    assert node.prune(keep=1)["removed"] == [A]


@pytest.mark.parametrize(
    "identifier",
    ["", "../x-000000000000", "a/b-000000000000", "A-000000000000", "a b-000000000000", "-000000000000",
     "a-00000000000", "a-0000000000000"[:13] + "g", "x" * 300 + "-000000000000", "a-000000000000\n", ".a-000000000000"],
)  # fmt: skip
def test_identifiers_that_are_none(node: Generations, identifier: str, tmp_path: Path) -> None:
    refused("invalid", node.begin, "r1", identifier)
    if identifier:
        refused("invalid", node.rollback, "r1", identifier, kind="rollback")
        refused("invalid", node.read, identifier)
    assert not (tmp_path / "opt").exists()


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/", "", "/a\0b"])
def test_paths_that_are_refused(path: str) -> None:
    with pytest.raises(StateError, match="absolute path below"):
        Paths.of(path, "/var/lib/x", "/etc/x")


def test_reserved_steps_and_missing_options(node: Generations) -> None:
    node.begin("r1", A)
    for word in ("commit", "switch", "undo"):
        assert "another word" in refused("invalid", node.step, "r1", word)
    refused("invalid", node.step, "r1", "")
    refused("invalid", node.begin, "", A)
    refused("refused", node.begin, "r1", B)


def test_only_twenty_runs_are_kept(node: Generations) -> None:
    for number in range(25):
        provision(node, f"r{number}", (A, B)[number % 2])
    assert [run["run_id"] for run in node.read()["state"]["runs"]] == [f"r{n}" for n in range(5, 25)]


def test_the_fact_is_small_and_public(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    node.begin("r2", B, holder=HOLDER)
    fact = json.loads(Path(paths.fact).read_text())
    assert fact["active"] == A
    assert fact["generations"][B] == {"status": "building", "profile": B, "target": ""}
    assert set(fact["intent"]) == {"run_id", "kind", "from", "to", "step", "started"}
    assert (fact["last_run"]["run_id"], fact["last_run"]["result"]) == ("r1", "active")


def test_check_mode_writes_nothing(node: Generations, paths: Paths, tmp_path: Path) -> None:
    dry = Generations(paths, check=True)
    begun = dry.begin("r1", A)
    assert begun["changed"]
    assert begun["diff"]["before"]["intent"] is None
    assert begun["diff"]["after"]["intent"]["to"] == A
    for after in (dry.step("r1", "build"), dry.built("r1", A), dry.commit("r1", A)):
        assert after["changed"], "a whole play runs in check mode, where begin wrote nothing"
    assert not dry.fail("r1", "x")["changed"]
    assert list(tmp_path.iterdir()) == []
    provision(node, "r1", A)
    provision(node, "r2", B)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    back = dry.rollback("r3", kind="rollback")
    assert (back["changed"], back["current"], back["switch_ms"]) == (True, A, None)
    assert dry.rollback("r2", reason="bad")["diff"]["after"]["active"] == A
    assert dry.begin("r3", B)["state"]["generations"][B]["status"] == "verified"
    dry.settle()
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
