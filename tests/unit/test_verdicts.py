from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.verdicts import CODES, STATUSES, Verdict, failing, sentence, worst


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


def test_codes_are_documented_in_one_sentence_and_passes_need_no_rollback() -> None:
    for code, info in CODES.items():
        assert info.description.endswith("."), code
        if code.endswith((".ok", ".not_managed", ".absent")):
            assert not info.rollback_helps, code


def test_simulated_is_in_the_dict_only_when_set() -> None:
    assert "simulated" not in make().to_dict()
    assert make(simulated=True).to_dict()["simulated"] is True


@given(st.sampled_from(STATUSES), st.sampled_from(sorted(CODES)), st.booleans(), st.text())
def test_round_trip_through_json(status: str, code: str, simulated: bool, text: str) -> None:
    verdict = make(status, code, simulated=simulated, evidence={"text": text}, action=text)
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict


@given(st.lists(st.sampled_from(STATUSES)))
def test_worst_is_order_free_and_agrees_with_failing(statuses: list) -> None:
    verdicts = [make(status) for status in statuses]
    assert worst(verdicts) == worst(reversed(verdicts))
    assert bool(failing(verdicts)) == (worst(verdicts) not in ("skipped", "pass", "warn"))


def test_worst_of_nothing_is_skipped_and_skipped_does_not_hide_a_pass() -> None:
    assert worst([]) == "skipped"
    assert worst([make("skipped"), make("pass")]) == "pass"
    assert worst([make("fail"), make("needs-reset")]) == "fail"


def test_an_inconclusive_check_stands_in_the_way() -> None:
    assert failing([make("inconclusive")])


def test_sentence_has_no_trailing_space_without_action() -> None:
    assert sentence(make()) == "torch: It imports."
    assert sentence(make(action="Do nothing.")) == "torch: It imports. Do nothing."
