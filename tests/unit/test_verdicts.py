from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.verdicts import (
    ACCEPTED_STATUSES,
    CODES,
    LAYERS,
    SEVERITIES,
    STATUSES,
    Verdict,
    blame,
    failing,
    layers_of,
    sentence,
    worst,
)


def make(status: str = "pass", code: str = "import.ok", **kwargs: object) -> Verdict:
    return Verdict(code=code, status=status, layer="stack", subject="torch", message="It imports.", **kwargs)


def test_unknown_code_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown verdict code 'import\.fine'; known: .*import\.ok"):
        make(code="import.fine")


@pytest.mark.parametrize(("field", "value"), [("status", "passed"), ("layer", "kernel")])
def test_unknown_status_and_layer_are_refused(field: str, value: str) -> None:
    values = {"code": "import.ok", "status": "pass", "layer": "stack", "subject": "x", "message": "y"}
    with pytest.raises(ValueError, match=f"unknown verdict {field} '{value}'"):
        Verdict(**{**values, field: value})


@pytest.mark.parametrize("code", CODES)
def test_codes_say_what_they_mean_in_values_that_exist(code: str) -> None:
    info = CODES[code]
    assert info.description.endswith(".")
    assert info.severity in SEVERITIES
    assert info.statuses
    assert set(info.statuses) <= set(STATUSES)
    assert layers_of(code)
    assert set(layers_of(code)) <= set(LAYERS)
    may_fail = not set(info.statuses) <= {"pass", "skipped"}
    assert (info.severity != "info") == may_fail, "info is for what never says that something is wrong"
    assert may_fail or not info.rollback_helps, "there is nothing to cure"


def test_the_layer_of_a_code_is_that_of_its_prefix() -> None:
    assert layers_of("abi.ok") == ("stack",)
    assert layers_of("gpu.nvml_error") == ("driver",)
    assert layers_of("toolkit.not_managed") == ("toolkit",)


@pytest.mark.parametrize("mark", ["simulated", "preexisting"])
def test_marks_are_in_the_dict_only_when_set(mark: str) -> None:
    assert mark not in make().to_dict()
    assert make(**{mark: True}).to_dict()[mark] is True


@given(st.sampled_from(STATUSES), st.sampled_from(sorted(CODES)), st.booleans(), st.booleans(), st.text())
def test_round_trip_through_json(status: str, code: str, simulated: bool, old: bool, text: str) -> None:
    verdict = make(status, code, simulated=simulated, preexisting=old, evidence={"text": text}, action=text)
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict


@given(st.lists(st.tuples(st.sampled_from(STATUSES), st.booleans())), st.booleans())
def test_worst_is_order_free_and_agrees_with_failing(kinds: list, preexisting: bool) -> None:
    verdicts = [make(status, preexisting=old) for status, old in kinds]
    assert worst(verdicts, preexisting=preexisting) == worst(reversed(verdicts), preexisting=preexisting)
    in_the_way = failing(verdicts, preexisting=preexisting)
    assert bool(in_the_way) == (worst(verdicts, preexisting=preexisting) not in ACCEPTED_STATUSES)
    assert preexisting or not any(verdict.preexisting for verdict in in_the_way)


def test_worst_of_nothing_is_skipped_and_skipped_does_not_hide_a_pass() -> None:
    assert worst([]) == "skipped"
    assert worst([make("skipped"), make("pass")]) == "pass"
    assert worst([make("fail"), make("needs-reset")]) == "fail"


def test_an_inconclusive_check_stands_in_the_way() -> None:
    assert failing([make("inconclusive")])


def test_sentence_has_no_trailing_space_without_action() -> None:
    assert sentence(make()) == "torch: It imports."
    assert sentence(make(action="Do nothing.")) == "torch: It imports. Do nothing."


# ---- blame ------------------------------------------------------------------------------------------------------


def test_what_failed_before_is_reported_and_in_nobodys_way() -> None:
    old = make("fail", "import.error")
    (after,) = blame([old], [old])
    assert after.preexisting
    assert after.status == "fail"
    assert failing([after]) == []
    assert failing([after], preexisting=True) == [after]
    assert worst([after]) == "warn"
    assert worst([after], preexisting=True) == "fail"


@pytest.mark.parametrize("field", ["code", "layer", "subject"])
def test_another_check_is_no_excuse(field: str) -> None:
    values = {"code": "import.error", "status": "fail", "layer": "stack", "subject": "torch", "message": ""}
    other = {"code": "import.crash", "layer": "node", "subject": "numpy"}[field]
    (after,) = blame([Verdict(**values)], [Verdict(**{**values, field: other})])
    assert not after.preexisting


def test_a_pass_before_is_no_excuse_and_a_pass_after_needs_none() -> None:
    well, broken = make("pass", "gpu.count"), make("fail", "gpu.count")
    assert failing(blame([broken], [well])) == [broken]
    assert blame([well], [broken]) == [well]


@pytest.mark.parametrize(
    ("before", "after", "old"),
    [("inconclusive", "fail", False), ("needs-reset", "fail", False), ("fail", "needs-reset", True)],
)
def test_what_got_worse_is_new(before: str, after: str, old: bool) -> None:
    (found,) = blame([make(after, "gpu.nvml_error")], [make(before, "gpu.nvml_error")])
    assert found.preexisting is old


CHECKS = st.builds(
    Verdict,
    code=st.sampled_from(["gpu.count", "gpu.ids"]),
    status=st.sampled_from(STATUSES),
    layer=st.sampled_from(["driver", "node"]),
    subject=st.sampled_from(["GPUs", "GPU 1"]),
    message=st.just("."),
    preexisting=st.booleans(),
)


@given(st.lists(CHECKS), st.lists(CHECKS))
def test_blame_marks_and_changes_nothing_else(after: list[Verdict], before: list[Verdict]) -> None:
    marked = blame(after, before)
    assert [replace(verdict, preexisting=False) for verdict in marked] == [
        replace(verdict, preexisting=False) for verdict in after
    ]
    assert blame(marked, before) == marked
    assert not any(verdict.preexisting for verdict in blame(after, []))
    assert failing(blame(after, after)) == []
