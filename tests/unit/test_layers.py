"""Driver and toolkit in the journal: a run that changes them, goes back, is interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from generation_tools import HOLDER, A, B, check_settled, install, paths_in, provision
from hypothesis import given
from hypothesis import strategies as st

from bedplate.controller.nodes import baseline, layers_to_go_back, layers_to_prove
from bedplate.node.state import generations as module
from bedplate.node.state import layers
from bedplate.node.state.generations import Generations, StateError
from bedplate.node.state.journal import Paths, load

OLD = {"version": "575.57.08", "source": "nvidia", "packages": {"nvidia-open-575": "575.57.08-0ubuntu1"}}
NEW = {"version": "580.82.07", "source": "nvidia", "packages": {"nvidia-open-580": "580.82.07-0ubuntu1"}}
PINS = {"version": "580.82.07"}
CUDA = {"version": "13.0.1", "source": "wheels", "default": True}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return paths_in(tmp_path)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages of the records are installed as recorded."""
    monkeypatch.setattr(module, "installed", lambda _: {**OLD["packages"], **NEW["packages"]})


@pytest.fixture
def node(paths: Paths) -> Generations:
    return Generations(paths)


def change(node: Generations, run_id: str, layer: str, record: dict[str, Any], found: Any = None) -> None:
    node.layer(run_id, layer, "begin", record, found)
    node.layer(run_id, layer, "done")


def layers_run(node: Generations, run_id: str, layer: str, record: dict[str, Any]) -> None:
    node.begin(run_id, kind="layers", holder=HOLDER)
    change(node, run_id, layer, record)
    node.end(run_id)


def test_back_on_demand_from_a_change_that_was_left_unverified(node: Generations, paths: Paths) -> None:
    """The live generation stays, and the driver below it goes back to what it pins."""
    provision(node, "r1", A)
    layers_run(node, "r2", "driver", OLD)
    node.begin("r3", B, holder=HOLDER)
    node.layer("r3", "driver", "begin", NEW)
    node.fail("r3", "a GPU is lost")
    assert load(paths.state)["layers"]["driver"]["to"] == NEW

    begun = node.begin("r4", A, kind="rollback", holder=HOLDER)
    assert (begun["generation"], begun["changed"]) == (A, True)
    back = node.rollback("r4", A, kind="rollback", hold=True)
    assert (back["current"], back["changed"]) == (A, False)
    change(node, "r4", "driver", OLD)
    node.end("r4")
    state = check_settled(paths)
    assert (state["active"], state["runs"][-1]["result"]) == (A, "active")
    assert (state["layers"]["driver"]["is"], state["layers"]["driver"]["to"]) == (OLD, None)
    assert not node.begin("r5", A, kind="rollback", holder=HOLDER)["changed"]


def test_back_on_demand_from_a_driver_that_was_changed_alone(node: Generations, paths: Paths) -> None:
    """The live generation goes back to the driver that it was verified on, however well the other one works."""
    layers_run(node, "r1", "driver", OLD)
    provision(node, "r2", A)
    layers_run(node, "r3", "driver", NEW)
    assert node.begin("r4", A, kind="rollback", holder=HOLDER)["changed"]
    node.rollback("r4", A, kind="rollback", hold=True)
    change(node, "r4", "driver", OLD)
    node.end("r4")
    assert check_settled(paths)["layers"]["driver"]["is"] == OLD
    assert not node.begin("r5", A, kind="rollback", holder=HOLDER)["changed"]


def test_a_way_back_that_fails_lets_the_node_go(node: Generations, paths: Paths) -> None:
    """Of both kinds: a run has one record, and what is not finished stays written down."""
    layers_run(node, "r1", "driver", OLD)
    provision(node, "r2", A)
    node.begin("r3", B, holder=HOLDER)
    change(node, "r3", "driver", NEW)
    node.rollback("r3", reason="it does not load", hold=True)
    node.layer("r3", "driver", "begin", OLD)
    node.fail("r3", "apt has no room")
    state = load(paths.state)
    assert (state["intent"], state["active"], state["layers"]["driver"]["to"]) == (None, A, OLD)
    assert [run["result"] for run in state["runs"]] == ["active", "active", "failed"]
    assert state["runs"][-1]["reason"] == "apt has no room"

    node.begin("r4", A, kind="rollback", holder=HOLDER)
    node.rollback("r4", A, kind="rollback", hold=True)
    node.layer("r4", "driver", "begin", OLD)
    node.fail("r4", "apt has no room again")
    assert load(paths.state)["intent"] is None
    provision(node, "r5", B)
    node.begin("r6", A, kind="rollback", holder=HOLDER)
    node.rollback("r6", A, kind="rollback", hold=True)
    node.layer("r6", "driver", "begin", OLD)
    node.fail("r6", "still no room")
    state = load(paths.state)
    assert (state["intent"], state["active"], state["runs"][-1]["result"]) == (None, A, "failed")


def test_the_way_back_of_a_first_change_survives_the_run_that_began_it(node: Generations, paths: Paths) -> None:
    """The driver waits for its reboot, and the next run finds the new packages: the older ones are still known."""
    provision(node, "r1", A)
    node.begin("r2", B, holder=HOLDER)
    node.layer("r2", "driver", "begin", NEW, found=OLD)
    node.fail("r2", "a reboot is needed")
    node.begin("r3", B, holder=HOLDER)
    change(node, "r3", "driver", NEW, found=NEW)
    assert node.rollback("r3", reason="it does not load", hold=True)["to_undo"] == [{"layer": "driver", "record": OLD}]


def test_layers_go_back_after_a_commit_that_found_no_room(
    node: Generations, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    provision(node, "r1", A)
    layers_run(node, "r2", "driver", OLD)
    install(node.begin("r3", B, holder=HOLDER)["directory"])
    change(node, "r3", "driver", NEW)
    node.built("r3")
    with monkeypatch.context() as full:
        full.setattr("bedplate.node.state.change.switch_link", no_room)
        with pytest.raises(StateError, match="no room"):
            node.commit("r3")
    result = node.rollback("r3", reason="no room", hold=True, holder=HOLDER)
    assert result["to_undo"] == [{"layer": "driver", "record": OLD}]
    assert (result["current"], result["state"]["intent"]["holder"]) == (A, HOLDER)
    change(node, "r3", "driver", OLD)
    node.end("r3")
    assert check_settled(paths)["layers"]["driver"]["is"] == OLD


def no_room(*_: Any) -> float:
    raise StateError("no_space", "no room")


@pytest.mark.parametrize(
    ("pins", "layers", "told"),
    [
        ({}, {}, {}),
        ({"driver": None, "toolkit": None}, {"driver": {"is": OLD}}, {}),
        ({"driver": PINS}, {}, {"driver": {**PINS, "source": "nvidia", "packages": {}}}),
        (
            {"driver": PINS, "toolkit": {"version": "13.0.1"}},
            {"driver": {"is": NEW}, "toolkit": {"is": {**CUDA, "path": "/usr/local/cuda-13.0"}}},
            {
                "driver": {**PINS, "source": "nvidia", "packages": NEW["packages"]},
                "toolkit": {"version": "13.0.1", "source": "none", "path": "/usr/local/cuda-13.0"},
            },
        ),
    ],
)
def test_what_is_proved_of_the_layers_below(pins: dict[str, Any], layers: dict[str, Any], told: dict[str, Any]) -> None:
    sources = {"driver": "nvidia", "toolkit": "none"}
    assert layers_to_prove(pins, {"layers": layers}, sources, ["driver", "toolkit"]) == told


def test_a_layer_that_a_run_leaves_alone_is_the_hosts_own() -> None:
    sources = {"driver": "nvidia", "toolkit": "nvidia"}
    told = layers_to_prove({"driver": PINS, "toolkit": {"version": "13.0.1"}}, {"layers": {}}, sources, ["toolkit"])
    assert {layer: found["source"] for layer, found in told.items()} == {"driver": "none", "toolkit": "nvidia"}


def test_a_run_of_layers_leaves_the_generations_alone(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    layers_run(node, "r2", "driver", NEW)
    state = check_settled(paths)
    assert state["layers"]["driver"]["is"] == NEW
    assert (state["active"], state["runs"][-1]["kind"], state["runs"][-1]["result"]) == (A, "layers", "active")
    fact = json.loads(Path(paths.fact).read_text())
    assert fact["layers"] == {"driver": {"is": "580.82.07", "to": None}}


def test_on_a_bare_node_too(node: Generations, paths: Paths) -> None:
    layers_run(node, "r1", "driver", NEW)
    state = check_settled(paths)
    assert (state["active"], state["generations"]) == (None, {})
    assert node.read(layers={"driver": {"version": "580.82.07"}})["clean"]
    assert not node.read()["clean"]


def test_a_failing_run_is_told_what_to_undo_and_holds_the_node_meanwhile(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    layers_run(node, "r2", "driver", OLD)
    node.begin("r3", B, holder=HOLDER)
    change(node, "r3", "driver", NEW)
    node.layer("r3", "toolkit", "begin", CUDA)
    result = node.rollback("r3", reason="it does not load", hold=True)
    assert result["to_undo"] == [{"layer": "toolkit", "record": None}, {"layer": "driver", "record": OLD}]
    with pytest.raises(StateError, match="is being changed by ops@deploy1"):
        node.begin("r4", B)
    change(node, "r3", "driver", OLD)
    again = node.rollback("r3", hold=True)
    assert again["to_undo"] == [{"layer": "toolkit", "record": None}], "the driver is what it was"
    node.layer("r3", "toolkit", "done")
    node.end("r3")
    state = check_settled(paths)
    assert state["layers"]["driver"]["is"] == OLD
    assert [run["result"] for run in state["runs"]] == ["active", "active", "failed"]
    assert state["runs"][-1]["reason"] == "it does not load"


def test_after_the_commit_too(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    install(node.begin("r2", B, holder=HOLDER)["directory"])
    change(node, "r2", "driver", NEW, found=OLD)
    node.built("r2")
    node.commit("r2")
    result = node.rollback("r2", reason="the service does not start", hold=True)
    assert result["to_undo"] == [{"layer": "driver", "record": OLD}], "what was found is gone back to"
    assert result["current"] == A
    change(node, "r2", "driver", OLD)
    node.end("r2")
    state = check_settled(paths)
    assert (state["active"], state["runs"][-1]["result"]) == (A, "rolled_back")
    assert state["generations"][B]["status"] == "failed"


def test_a_rollback_on_demand_holds_the_node_until_the_layers_are_back(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    provision(node, "r2", B)
    node.begin("r3", kind="rollback", holder=HOLDER)
    assert node.rollback("r3", kind="rollback", hold=True)["to_undo"] == []
    change(node, "r3", "driver", OLD)
    node.end("r3")
    state = check_settled(paths)
    assert (state["active"], state["layers"]["driver"]["is"]) == (A, OLD)
    assert state["runs"][-1]["result"] == "rolled_back"


def test_nothing_is_held_when_the_run_changed_no_layer(node: Generations, paths: Paths) -> None:
    node.begin("r1", A, holder=HOLDER)
    assert node.rollback("r1", reason="no", hold=True)["state"]["intent"] is None
    assert node.end("r1")["message"] == "Run r1 has ended already."
    check_settled(paths)


def test_an_interrupted_change_of_the_driver_is_settled_and_not_forgotten(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    layers_run(node, "r2", "driver", OLD)
    node.begin("r3", kind="layers", holder=HOLDER)
    node.layer("r3", "driver", "begin", NEW)
    told = node.settle(take_over=True)["settled"]
    assert "the change of the driver is not finished" in told
    wanted = {"driver": {"version": "575.57.08"}}
    seen = node.read(layers=wanted)
    assert not seen["clean"]
    assert seen["drift"] == ["a change of the driver to 580.82.07 was not finished"]
    layers_run(node, "r4", "driver", OLD)
    assert load(paths.state)["layers"]["driver"]["is"] == OLD


def test_a_second_run_after_an_interruption_goes_back_to_what_was_verified_last(
    node: Generations, paths: Paths
) -> None:
    layers_run(node, "r1", "driver", OLD)
    node.begin("r2", kind="layers", holder=HOLDER)
    node.layer("r2", "driver", "begin", NEW)
    node.begin("r3", kind="layers", take_over=True, holder=HOLDER)
    node.layer("r3", "driver", "begin", NEW)
    result = node.rollback("r3", reason="no", hold=True)
    assert result["to_undo"] == [{"layer": "driver", "record": OLD}]
    assert load(paths.state)["runs"][-1]["result"] == "failed"


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"version": "580.82.07", "source": "nvidia"}, None),
        ({"version": "580.95.05"}, "version of the driver is 580.82.07, and 580.95.05 is wanted"),
        ({"version": "580.82.07", "parameters": {}}, None),
        (
            {"version": "580.82.07", "parameters": {"nvidia_uvm": {"uvm_disable_hmm": "1"}}},
            "parameters of the driver is None, and {'nvidia_uvm': {'uvm_disable_hmm': '1'}} is wanted",
        ),
    ],
)
def test_layers_as_wanted(node: Generations, wanted: dict[str, Any], problem: str | None) -> None:
    provision(node, "r1", A)
    layers_run(node, "r2", "driver", NEW)
    seen = node.read(A, layers={"driver": wanted})
    assert (seen["clean"], seen["drift"]) == (problem is None, [] if problem is None else [problem])


def test_packages_and_directories_that_changed_are_drift(
    node: Generations, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "installed", lambda _: {})
    provision(node, "r1", A)
    layers_run(node, "r2", "driver", NEW)
    layers_run(node, "r3", "toolkit", {**CUDA, "path": str(tmp_path / "cuda-13.0")})
    seen = node.read(A, layers={"driver": {"version": "580.82.07"}, "toolkit": {"version": "13.0.1"}})
    assert seen["drift"] == [
        "package nvidia-open-580 of the driver is not installed, was 580.82.07-0ubuntu1",
        f"{tmp_path}/cuda-13.0 of the toolkit is gone",
    ]
    assert seen["drift_counts"] == {"layers": 2}


def test_a_layer_that_nobody_installed_is_not_clean(node: Generations) -> None:
    provision(node, "r1", A)
    seen = node.read(A, layers={"driver": {"version": "580.82.07"}})
    assert seen["drift"] == ["the driver was not installed by Bedplate; 580.82.07 is wanted"]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda node: node.layer("r1", "driver", "done"), "has not begun to change the driver"),
        (lambda node: node.layer("r1", "driver", "begin", {}), "record needs the version"),
        (lambda node: node.layer("r9", "driver", "begin", NEW), "is being changed by"),
        (lambda node: node.commit("r1"), "changes layers and no generation: end it"),
        (lambda node: node.built("r1"), "changes layers and no generation: end it"),
        (lambda node: node.end("r9"), "is being changed by"),
    ],
)
def test_what_is_refused(node: Generations, act: Any, message: str) -> None:
    node.begin("r1", kind="layers", holder=HOLDER)
    with pytest.raises(StateError, match=message):
        act(node)


def test_a_run_of_a_generation_is_not_ended(node: Generations) -> None:
    node.begin("r1", A, holder=HOLDER)
    with pytest.raises(StateError, match="changes a generation: commit it or roll it back"):
        node.end("r1")


def test_check_mode_plans_past_the_intent_of_a_dead_run(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    provision(node, "r2", B)
    node.begin("dead", kind="layers", holder=HOLDER)
    before = Path(paths.state).read_text()
    planned = Generations(paths, check=True)
    planned.begin("r3", kind="rollback", take_over=True)
    assert planned.layer("r3", "driver", "begin", NEW)["changed"]
    assert planned.rollback("r3", A, kind="rollback", take_over=True, hold=True)["current"] == A
    assert planned.end("r3")["changed"]
    assert Path(paths.state).read_text() == before


def test_a_state_without_layers_is_read(node: Generations, paths: Paths) -> None:
    provision(node, "r1", A)
    state = json.loads(Path(paths.state).read_text())
    del state["layers"]
    Path(paths.state).write_text(json.dumps(state))
    assert node.read(A)["clean"]


KEYS = ("driver", "toolkit", "is", "was", "to", "run_id", "packages", "version")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["driver", "toolkit", "is", "was", "to", "run_id", "packages", "version"]), inner
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_hostile_layers_are_told_and_never_raise(value: Any) -> None:
    wrong = layers.problem(value)
    assert wrong is None or isinstance(wrong, str)
    if wrong is None:
        assert layers.to_undo({"layers": value}, "r1") is not None
        wanted = {"driver": {"version": "1"}, "toolkit": {"version": "1"}}
        layers.problems({"layers": value}, wanted, lambda _: {})


PINS = {"version": "575.57.08", "flavour": "open"}


@pytest.mark.parametrize(
    ("entry", "record"),
    [
        (None, None),
        ({"is": {**PINS, "source": "nvidia"}, "was": None, "to": None}, None),
        (
            {"is": {**NEW, "flavour": "open"}, "was": {**OLD, "flavour": "open"}, "to": None},
            {**OLD, "flavour": "open"},
        ),
        ({"is": NEW, "was": None, "to": None}, {**PINS, "source": "nvidia"}),
        ({"is": OLD, "was": None, "to": NEW}, {**OLD, "flavour": "open"}),
        ({"is": None, "was": None, "to": NEW}, {**PINS, "source": "nvidia"}),
    ],
)
def test_which_driver_belongs_to_a_generation(entry: Any, record: Any) -> None:
    state = {"layers": {} if entry is None else {"driver": entry}, "generations": {}}
    expected = [] if record is None else [{"layer": "driver", "record": record}]
    assert layers_to_go_back(state, {"id": A, "driver": PINS, "toolkit": None}) == expected


def test_a_generation_remembers_what_it_was_verified_on(node: Generations, paths: Paths) -> None:
    """However many changes ago that was."""
    first = {**CUDA, "instance": "/opt/bedplate/toolkits/13.0.1-1"}
    others = [{"version": "12.8.1", "source": "wheels"}, {**CUDA, "instance": "/opt/bedplate/toolkits/13.0.1-2"}]
    layers_run(node, "r1", "toolkit", first)
    provision(node, "r2", A)
    for number, other in enumerate([*others, others[0]]):
        layers_run(node, f"r3{number}", "toolkit", other)
    profile = {"id": A, "driver": None, "toolkit": {"version": "13.0.1", "default": True}}
    assert layers_to_go_back(load(paths.state), profile) == [{"layer": "toolkit", "record": first}]


@pytest.mark.parametrize("hostile", [[], {"stack": CUDA}, {"toolkit": {}}, {"driver": {**OLD, "packages": {"a": 1}}}])
def test_what_a_generation_was_verified_on_is_no_place_for_anything_else(
    node: Generations, paths: Paths, hostile: Any
) -> None:
    provision(node, "r1", A)
    state = json.loads(Path(paths.state).read_text())
    state["generations"][A]["layers"] = hostile
    Path(paths.state).write_text(json.dumps(state))
    with pytest.raises(StateError, match="layers that are no records"):
        load(paths.state)


def failed(code: str, layer: str) -> dict[str, Any]:
    return {"code": code, "status": "fail", "layer": layer, "subject": "it"}


@pytest.mark.parametrize(
    ("verdict", "changed", "excuses"),
    [
        (failed("gpu.count", "driver"), ["driver", "stack"], True),  # no software brings a GPU back
        (failed("driver.module_not_loaded", "driver"), ["driver"], False),
        (failed("driver.module_not_loaded", "driver"), ["stack"], True),  # that layer is left alone
        (failed("import.undefined_symbol", "stack"), ["stack"], False),  # the new stack answers for itself
        (failed("collective.timeout", "stack"), ["stack"], True),  # a path between GPUs was broken before
    ],
)
def test_what_from_before_a_change_excuses_the_same_failure_after_it(
    verdict: dict[str, Any], changed: list[str], excuses: bool
) -> None:
    assert baseline([verdict], changed) == ([verdict] if excuses else [])
