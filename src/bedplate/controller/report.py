"""What a person reads at the end of a run: the reason of a failure, the outcome, a line per check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bedplate.node.verdicts import Verdict, failing, sentence

# Longest first words of a tool's output that still fit a terminal; the whole text is in Ansible's own output.
OUTPUT_TAIL_LINES = 12

JsonDict = Mapping[str, Any]


def failure(result: JsonDict, task: str) -> dict[str, Any]:
    """Condense a failed task.

    Args:
        result: the result of the task, as Ansible's ``ansible_failed_result``; may be empty.
        task: the name of the task, may be empty.

    Returns:
        ``task``, ``reason`` (what is recorded on the node and shown: the sentences of the failing verdicts
        when there are any, else the message and the end of the tool's error output) and ``verdicts`` (list
        of dicts).
    """
    verdicts = [Verdict.from_dict(verdict) for verdict in result.get("verdicts", [])]
    sentences = [sentence(verdict) for verdict in failing(verdicts)]
    return {
        "task": task or "a task",
        "reason": "\n".join(sentences) or _tool_output(result),
        "verdicts": [verdict.to_dict() for verdict in verdicts],
    }


def _tool_output(result: JsonDict) -> str:
    """Return the message of a failed task, with the last lines that its program wrote."""
    message = str(result.get("msg") or "failed without a message")
    output = str(result.get("stderr") or result.get("stdout") or "").strip().splitlines()
    return "\n".join([message, *output[-OUTPUT_TAIL_LINES:]])


def failure_report(failure: JsonDict, outcome: JsonDict, wanted: str) -> str:
    """Return the text that ends a failed host: what failed, why, and where the node is now.

    Args:
        failure: as `failure` returns it.
        outcome: ``current`` (generation id or None), ``verdicts`` (of the verification after going back) and
            ``simulated``, or empty when going back did not come to its end.
        wanted: id of the generation that the run wanted to make live.
    """
    lines = [f"{wanted} did not go live. Failed in: {failure['task']}", "", failure["reason"], ""]
    mark = " (simulated GPU node)" if outcome.get("simulated") else ""
    if not outcome:
        lines.append("Going back did not end either: this node needs a person. State: /var/lib/bedplate/state.json")
    elif not outcome["current"]:
        lines.append(f"The node has no live generation, as before the run{mark}.")
    else:
        after = [Verdict.from_dict(verdict) for verdict in outcome["verdicts"]]
        broken = [sentence(verdict) for verdict in failing(after)]
        if broken:
            lines += [
                f"The node is on {outcome['current']}, which does NOT verify{mark}; a person is needed:",
                *broken,
            ]
        else:
            lines.append(f"The node is on {outcome['current']}, verified again{mark}:")
            lines += report(outcome["verdicts"])
    return "\n".join(lines)


def report(verdicts: Sequence[JsonDict]) -> list[str]:
    """Return one line per verdict: status, layer, subject and message, the failing ones first."""
    ordered = [Verdict.from_dict(verdict) for verdict in verdicts]
    bad = failing(ordered)
    good = [verdict for verdict in ordered if verdict not in bad]
    return [
        f"{v.status:<12} {v.layer:<8} {v.subject}: {v.message}" + (" [simulated]" if v.simulated else "")
        for v in [*bad, *good]
    ]
