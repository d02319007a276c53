"""Is a node what the inventory asks for, and still what was built?"""

from __future__ import annotations

from typing import Any

import pytest

from bedplate.controller.report_drift import drift

LIVE = "cu130-0123456789ab"
BEFORE = {"current": LIVE, "drift": [], "drift_counts": {}, "state": {}}


def found(before: dict[str, Any], layers: Any = (), plan: Any = None) -> list[tuple[str, str, str]]:
    return [(v.code, v.status, v.message) for v in drift({**BEFORE, **before}, list(layers), plan)]


def test_an_untouched_node_at_its_profile() -> None:
    assert [(code, status) for code, status, _ in found({}, plan={"id": LIVE})] == [
        ("stack.drift", "pass"),
        ("stack.profile", "pass"),
    ]


def test_changed_files_are_named() -> None:
    ((code, status, message), _) = found({"drift": ["a is gone", "b is new"]})
    assert (code, status) == ("stack.drift", "fail")
    assert message == "It was changed after it was verified: a is gone (and 1 more)."


@pytest.mark.parametrize(
    ("plan", "status", "words"),
    [
        (None, "skipped", "cannot be read here"),
        ({"id": "cu130-ffffffffffff"}, "warn", "another lock of the same profile"),
        ({"id": "cu128-0123456789ab"}, "warn", "cu128-0123456789ab"),
    ],
)
def test_the_profile_that_is_live(plan: Any, status: str, words: str) -> None:
    (_, (code, got, message)) = found({}, plan=plan)
    assert (code, got) == ("stack.profile", status)
    assert words in message


def test_a_bare_node_fails_and_a_damaged_link_is_no_bare_node() -> None:
    assert found({"current": None}) == [("stack.absent", "fail", "The node has no live generation.")]
    assert found({"current": None, "drift": ["current is not a link"]}) == [
        ("stack.drift", "fail", "The node has no live generation: current is not a link.")
    ]


def layer(name: str, items: list[str], count: int) -> dict[str, Any]:
    return {"item": {"key": name}, "drift": items, "drift_counts": {"layers": count} if count else {}}


def test_layers_below_the_stack_answer_for_themselves() -> None:
    before = {"drift": ["file x"]}
    layers = [layer("driver", ["file x"], 0), layer("toolkit", ["file x", "package y is gone", "z"], 2)]
    assert found(before, layers)[:2] == [
        ("driver.drift", "pass", "The driver is what the profile pins and what was installed."),
        ("toolkit.drift", "fail", "Package y is gone. (2 differences.)"),
    ]


def test_a_layer_behind_a_long_list_is_not_forgotten() -> None:
    items = [f"file {number}" for number in range(20)]
    ((code, status, message), *_) = found({"drift": items}, [layer("driver", items, 3)])
    assert (code, status, message) == ("driver.drift", "fail", "3 things are not as recorded.")


def test_drift_of_a_simulated_node_says_so() -> None:
    assert all(verdict.simulated for verdict in drift(BEFORE, [], None, True))
