"""The module bedplate_state, run in this process as Ansible would run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from generation_tools import HOLDER, A, B, check_settled, install, paths_in

from conftest import RunModule


@pytest.fixture
def state(run_module: RunModule, tmp_path: Path) -> Any:
    """state("begin", run_id="r1", ...) on a node below tmp_path."""
    places = {
        "root": str(tmp_path / "opt"),
        "state_dir": str(tmp_path / "var"),
        "facts_dir": str(tmp_path / "facts"),
    }

    def act(action: str, **options: Any) -> dict[str, Any]:
        return run_module("bedplate_state", action=action, **places, **options)

    return act


def test_a_whole_run_and_back(state: Any, tmp_path: Path) -> None:
    for run, name in (("r1", A), ("r2", B)):
        begun = state("begin", run_id=run, generation=name, profile=name[:7], target="cp311-x86_64", holder=HOLDER)
        assert (begun["changed"], begun["reused"], begun["generation"]) == (True, False, name)
        install(begun["directory"])
        assert state("step", run_id=run, step="imports")["state"]["intent"]["step"] == "imports"
        assert state("built", run_id=run)["manifest"]["dists"] == 2
        assert state("commit", run_id=run, verdicts=[{"code": "import.ok"}])["current"] == name
    seen = state("read", generation=B)
    assert (seen["clean"], seen["changed"], seen["drift"], seen["drift_counts"]) == (True, False, [], {})
    entry = seen["state"]["generations"][B]
    assert (entry["profile"], entry["target"], entry["status"]) == ("stack-b", "cp311-x86_64", "verified")
    back = state("rollback", run_id="r2", reason="hangs", verdicts=[{"code": "collective.timeout"}])
    assert (back["current"], back["changed"]) == (A, True)
    assert back["switch_ms"] < 50
    assert state("rollback", run_id="r2", reason="hangs")["changed"] is False
    assert state("settle")["changed"] is False
    assert state("prune", keep=1)["removed"] == [B]
    check_settled(paths_in(tmp_path))


def test_results_hold_no_key_that_ansible_uses_itself(state: Any) -> None:
    """``path`` and ``dest`` make Ansible add file attributes, one of which is called state; rc and warnings fail."""
    for result in (state("begin", run_id="r1", generation=A), state("read"), state("fail", run_id="r1", reason="x")):
        assert not {"path", "dest", "rc", "warnings", "failed", "skipped", "ansible_facts"} & set(result)
        assert isinstance(result["state"], dict)


def test_diff_shows_what_changes(state: Any) -> None:
    diff = state("begin", run_id="r1", generation=A, diff=True)["diff"]
    assert diff["before"]["intent"] is None
    assert diff["after"]["intent"]["to"] == A
    diff = state("read", diff=True)["diff"]
    assert diff["before"] == diff["after"]


def test_check_mode(state: Any, tmp_path: Path) -> None:
    for options in (
        {"action": "begin", "generation": A},
        {"action": "step", "step": "build"},
        {"action": "built", "generation": A},
        {"action": "commit", "generation": A},
    ):
        assert state(run_id="r1", check=True, **options)["changed"], options
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"action": "begin", "run_id": "r2", "generation": B}, "busy", "ops@deploy1 (pid 4711, run r1)"),
        ({"action": "commit", "run_id": "r1"}, "refused", "is building"),
        ({"action": "begin", "run_id": "r1", "generation": "../etc"}, "invalid", "is not a generation id"),
        ({"action": "step", "run_id": "r1"}, "invalid", "step is needed"),
        ({"action": "prune", "keep": 0}, "invalid", "keep: 0"),
        ({"action": "built", "run_id": "r1"}, "missing", "no installed distribution"),
    ],
)
def test_refusals(state: Any, options: dict[str, Any], code: str, words: str) -> None:
    state("begin", run_id="r1", generation=A, holder=HOLDER)
    refused = state(**options)
    assert (refused["failed"], refused["error"]) == (True, code)
    assert words in refused["msg"]


def test_a_damaged_journal(state: Any, tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "state.json").write_text("{")
    refused = state("read")
    assert (refused["failed"], refused["error"]) == (True, "corrupt")
    assert str(tmp_path / "var" / "state.json") in refused["msg"]


def test_unknown_options_are_refused_by_ansible(state: Any) -> None:
    assert "Unsupported parameters" in state("read", generations=A)["msg"]
    assert "value of action must be one of" in state("repair")["msg"]


def test_a_package_database_that_cannot_be_asked_is_a_verdict(state: Any) -> None:
    state("begin", run_id="r1", kind="layers", holder=HOLDER)
    record = {"version": "580.82.07", "packages": {"--no-such-option": "1"}}
    state("layer", run_id="r1", layer="driver", phase="begin", record=record)
    state("layer", run_id="r1", layer="driver", phase="done")
    result = state("read", layers={"driver": {"version": "580.82.07"}})
    assert result["failed"]
    (verdict,) = result["verdicts"]
    assert (verdict["code"], verdict["status"], verdict["layer"]) == ("packages.query_failed", "fail", "driver")
    assert verdict["message"] in result["msg"]
