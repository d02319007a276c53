"""What a person reads at the end of a run: why a host failed, where it is now, and a table of what was checked.

The text is made of lines, a line of pieces with a style each. Ansible shows them without colours, the command
`bedplate report` with colours where it writes to a terminal; both say the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bedplate.node.evidence import redact, redact_value
from bedplate.node.verdicts import ACCEPTED_STATUSES, CODES, LAYERS, STATUSES, Verdict, failing, sentence, worst

# Longest first words of a tool's output that still fit a terminal; the whole text is in Ansible's own output.
OUTPUT_TAIL_LINES = 12
SCHEMA = 1
OUTCOMES = ("verified", "failed", "rolled_back", "needs_person")
COLUMN_LIMIT = 44  # characters of a column of the table
FIGURE_LIMIT = 72

# Modules whose failure is a decision: their message says what to do.
_REFUSING = ("assert", "fail", "validate_argument_spec")
# Where a failed module's program says more than Ansible shows, by the module's name.
_APT_LOG = "Read /var/log/apt/term.log on the node, then run the playbook again."
_WHERE_MORE = {
    "apt": _APT_LOG,
    "package": _APT_LOG,
    "dnf": "Read /var/log/dnf.log on the node, then run the playbook again.",
    "get_url": "See that the node reaches that address, then run the playbook again.",
    "reboot": "See on its console whether the node is up, then run the playbook again.",
}
# The prefixes of the codes that are about what hands can touch.
_OF_HARDWARE = ("gpu.", "node.")

JsonDict = Mapping[str, Any]
Line = list[tuple[str, str]]  # pieces of text, each with a style of rich; "" for none

# Control characters but for line feed and tab, and those that change the direction of writing (Unicode, UAX 9).
_STEERING = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160), *range(8234, 8239), *range(8294, 8298)), "�")
_STYLES = {"pass": "green", "warn": "yellow", "skipped": "dim"}
_BAD_STYLE = "bold red"


# ---- a failed task ----------------------------------------------------------------------------------------------


def failure(result: JsonDict, task: str, action: str = "") -> dict[str, Any]:
    """Condense a failed task.

    Args:
        result: the result of the task, as Ansible's ``ansible_failed_result``; may be empty.
        task: the name of the task, may be empty.
        action: the name of its module, such as ``ansible.builtin.apt``; may be empty.

    Returns:
        ``task``, ``reason`` (what is recorded on the node and shown: the sentences of the failing verdicts
        when the task's module gave any, else its message, the end of its error output and the next step),
        ``verdicts`` (list of dicts; one that fails is always among them, see ``_verdict_of_task``),
        ``needs_reboot`` (nothing stands in the way but a reboot) and ``hardware`` (nothing but hardware, see
        ``only_hardware``).
    """
    verdicts = [Verdict.from_dict(verdict) for verdict in result.get("verdicts", [])]
    reason = "\n".join(sentence(verdict) for verdict in failing(verdicts))
    if not failing(verdicts):
        verdicts.append(_verdict_of_task(result, task or "a task", action))
        reason = f"{verdicts[-1].message}\n{verdicts[-1].action}"
    return {
        "needs_reboot": {verdict.status for verdict in failing(verdicts)} == {"needs-reboot"},
        "hardware": only_hardware(verdicts),
        "task": task or "a task",
        # Every user of the node can read its journal.
        "reason": redact(reason),
        "verdicts": [redact_value(verdict.to_dict()) for verdict in verdicts],
    }


def _verdict_of_task(result: JsonDict, task: str, action: str) -> Verdict:
    """Return the verdict on a failed task whose module gives none: Ansible's own modules, and errors before a check.

    A task that refuses (assert, fail, the validation of a role's arguments, an error that a module of Bedplate has a
    name for) says itself what to do; of any other the operator gets the place where more is said.
    """
    evidence = {"module": action, "exit_code": result.get("rc")}
    if action.rpartition(".")[2] in _REFUSING or "error" in result:
        code, step = "run.refused", "Put that right, then run the playbook again."
    elif "timedout" in result:
        code, step = "run.timeout", "See on the node what it waits for, then run the playbook again."
    else:
        code = "run.task_failed"
        step = _WHERE_MORE.get(action.rpartition(".")[2], "Run the playbook again with -vvv to see all of its output.")
    return Verdict(code, "fail", "node", task, _tool_output(result), evidence, step)


def only_hardware(verdicts: Sequence[Verdict]) -> bool:
    """Tell whether something fails, and nothing but hardware: what no older driver, toolkit or stack could cure.

    That is what the checks of GPUs and node find, by the table of codes. A GPU that is on the bus and that NVML
    does not see is no such case: the driver may be at fault.
    """
    codes = {verdict.code for verdict in failing(verdicts)}
    return (
        bool(codes)
        and all(code.startswith(_OF_HARDWARE) and not CODES[code].rollback_helps for code in codes)
        and not any(_unseen(verdict) for verdict in failing(verdicts))
    )


def same_hardware(failed: Sequence[JsonDict], live: Sequence[JsonDict]) -> bool:
    """Tell whether a change failed for nothing but hardware that what is live misses as well.

    Args:
        failed: the verdicts with which the change failed.
        live: the verdicts on the generation that is live, by its own profile, taken after the change.

    A new profile that expects what the node never had is no fault of hardware: the live one does not miss it.
    """
    after, before = ([Verdict.from_dict(verdict) for verdict in verdicts] for verdicts in (failed, live))
    missed = {(v.code, v.subject) for v in failing(before, preexisting=True)}
    return only_hardware(after) and only_hardware(before) and {(v.code, v.subject) for v in failing(after)} <= missed


def _unseen(verdict: Verdict) -> bool:
    """Tell whether a verdict on the bus says that NVML sees fewer GPUs than it has."""
    bus, nvml = (verdict.evidence.get(key) for key in ("pci", "nvml"))
    return isinstance(bus, list) and isinstance(nvml, list) and len(nvml) < len(bus)


def _tool_output(result: JsonDict) -> str:
    """Return the message of a failed task, or of its first failed item, with the last lines that its program wrote."""
    failed = next((item for item in result.get("results") or [] if item.get("failed")), result)
    message = str(failed.get("msg") or "It failed without a message.")
    output = str(failed.get("stderr") or failed.get("stdout") or failed.get("module_stderr") or "").strip().splitlines()
    return "\n".join([message, *output[-OUTPUT_TAIL_LINES:]])


def ended(failure: JsonDict, outcome: JsonDict, wanted: str) -> dict[str, str]:
    """Say how a change that failed has ended: what failed, why, and where the node is now.

    Args:
        failure: as `failure` returns it; added may be ``stays_on`` (the live generation when nothing went back on
            purpose) and ``way_back`` (the failure of going back, as `failure` returns it).
        outcome: ``current`` (generation id or None), ``verdicts`` (of the verification after going back) and
            ``simulated``, or empty when nothing went back, or going back did not come to its end.
        wanted: id of the generation that the run wanted to make live.

    Returns:
        ``outcome`` (one of ``OUTCOMES``) and ``reason`` (what failed, also on the way back) for the record, and
        ``text``, which ends the host.
    """
    way_back = failure.get("way_back")
    after = [Verdict.from_dict(verdict) for verdict in outcome.get("verdicts", [])]
    broken = [sentence(verdict) for verdict in failing(after)]
    waits = failure["needs_reboot"] and not failure["hardware"]
    reasons = [failure["reason"]]
    if way_back:
        reasons.append(f"Going back failed in: {way_back['task']}\n{way_back['reason']}")
    if broken:
        reasons.append(f"{outcome['current']} does NOT verify:\n" + "\n".join(broken))
    if way_back or broken:
        word = "needs_person"
    elif waits:
        word = "failed"
    else:
        word = "rolled_back" if outcome else "needs_person"

    lines = [f"{wanted} did not go live. Failed in: {failure['task']}", "", failure["reason"], ""]
    if way_back:
        lines += [f"Going back failed in: {way_back['task']}", "", way_back["reason"], ""]
    mark = " (simulated GPU node)" if outcome.get("simulated") else ""
    if failure["needs_reboot"] and failure["hardware"]:
        lines.append(
            "Nothing went back, since that cures no GPU: read the evidence, reboot the node, run the playbook again."
        )
    elif waits:
        lines.append("Nothing went back, since nothing is broken: reboot the node, then run the playbook again.")
    elif failure.get("stays_on"):
        lines += [
            f"Nothing went back, since going back cures no hardware. The node is on {failure['stays_on']}{mark}:",
            "it loads, and misses the same. What this run has changed below it stays and is not verified (`layers` in",
            "/var/lib/bedplate/state.json). A person is needed: after the repair, run the playbook again.",
        ]
    elif not outcome:
        lines += [
            "Going back did not end either: this node needs a person. /var/lib/bedplate/state.json says in `layers`",
            "what is not finished. When the cause is gone, provision again, or go back with playbooks/rollback.yml",
            "and the name of the live profile as bedplate_rollback_to.",
        ]
    elif not outcome["current"]:
        lines.append(f"The node has no live generation, as before the run{mark}.")
    elif broken:
        lines += [f"The node is on {outcome['current']}, which does NOT verify{mark}; a person is needed:", *broken]
    else:
        lines += [f"The node is on {outcome['current']}, verified again{mark}:", as_text(table(after))]
    return {"outcome": word, "reason": "\n".join(reasons), "text": "\n".join(lines)}


# ---- the record of a run on a host ------------------------------------------------------------------------------


def record(verdicts: Sequence[JsonDict], **about: Any) -> dict[str, Any]:
    """Return what reports/<run>/<host>/verdicts.json holds; `bedplate report` reads it.

    verdicts: dicts of verdicts. about: host, run_id, kind ("verify", "provision", "rollback"), profile,
    generation, finished (ISO 8601), reason (why the run failed), evidence (file name of the archive), outcome
    (one of ``OUTCOMES``; empty: from the verdicts). Secrets are left out, see bedplate.node.evidence.

    Raises ValueError for verdicts of another shape or an unknown outcome.
    """
    checked = [Verdict.from_dict(verdict) for verdict in verdicts]
    outcome = about.get("outcome") or ("failed" if failing(checked) or about.get("reason") else "verified")
    if outcome not in OUTCOMES:
        raise ValueError(f"unknown outcome {outcome!r}; known: {', '.join(OUTCOMES)}")
    texts = ("host", "run_id", "kind", "profile", "generation", "finished", "evidence")
    return {
        "schema": SCHEMA,
        **{name: str(about.get(name) or "") for name in texts},
        "outcome": outcome,
        "status": worst(checked),
        "simulated": any(verdict.simulated for verdict in checked),
        "reason": redact(str(about.get("reason") or "")),
        "verdicts": [redact_value(verdict.to_dict()) for verdict in checked],
    }


def has_failed(host: JsonDict) -> bool:
    """Tell whether a record is of a host on which the run failed."""
    return host["outcome"] != "verified" or bool(failing(Verdict.from_dict(verdict) for verdict in host["verdicts"]))


def age_s(holder: JsonDict, proc: Path = Path("/proc")) -> float:
    """Return for how many seconds the run of a holder (bedplate.controller.holder) has been going on here.

    From the start time in clock ticks since boot (proc(5), stat, field 22) and the machine's uptime.
    """
    uptime = float((proc / "uptime").read_text(encoding="ascii").split()[0])
    return max(uptime - int(holder["pid_start"]) / os.sysconf("SC_CLK_TCK"), 0.0)


# ---- text -------------------------------------------------------------------------------------------------------


def report(verdicts: Sequence[JsonDict]) -> str:
    """Return the text about verdicts: what fails first, with what to do, then the table of all."""
    checked = [Verdict.from_dict(verdict) for verdict in verdicts]
    return as_text([*_summary(checked), *findings(checked), *table(checked)])


def host_lines(host: JsonDict, place: str = "") -> list[Line]:
    """Return the lines about one host, from its record; place: the directory of the record, to name the evidence."""
    checked = [Verdict.from_dict(verdict) for verdict in host["verdicts"]]
    bad = has_failed(host)
    words = [host["kind"], host["generation"] or host["profile"], host["finished"]]
    lines: list[Line] = [
        [
            (host["host"], "bold"),
            ("  ", ""),
            (host["outcome"].replace("_", " ").upper() if bad else host["outcome"], _BAD_STYLE if bad else "green"),
            ("  " + "  ".join(word for word in words if word), ""),
        ]
    ]
    lines += _summary(checked)
    told = {line for v in failing(checked) for text in (sentence(v), v.message, v.action) for line in text.splitlines()}
    reason = [text for text in host["reason"].splitlines() if text and text not in told]
    if reason:
        lines += [[], *([(f"  {text}", "")] for text in reason)]
    lines += [*findings(checked), *table(checked)]
    if host["evidence"]:
        lines += [[], [(f"Evidence: {os.path.join(place, host['evidence'])}", "")]]
    return lines


def _summary(verdicts: Sequence[Verdict]) -> list[Line]:
    """Return the line with the numbers of checks, such as "7 checks: 1 fail, 6 pass"."""
    statuses = [_result(verdict) for verdict in verdicts]
    order = sorted(set(statuses), key=lambda text: (-STATUSES.index(text.partition(" ")[0]), text))
    parts = ", ".join(f"{statuses.count(status)} {status}" for status in order)
    mark = " (simulated GPU node)" if any(verdict.simulated for verdict in verdicts) else ""
    return [[(f"{len(statuses)} check{'' if len(statuses) == 1 else 's'}: {parts or 'none'}{mark}", "")]]


def _result(verdict: Verdict) -> str:
    """Return the status for a person; a failure that was there before says so."""
    return f"{verdict.status} (before)" if verdict.preexisting else verdict.status


def _style(verdict: Verdict) -> str:
    return "yellow" if verdict.preexisting else _STYLES.get(verdict.status, _BAD_STYLE)


def findings(verdicts: Sequence[Verdict]) -> list[Line]:
    """Return what stands in the way, then what was there before, then the warnings: sentence and next step."""
    in_the_way = failing(verdicts)
    before = [verdict for verdict in failing(verdicts, preexisting=True) if verdict.preexisting]
    lines: list[Line] = []
    for verdict in [*in_the_way, *before, *(verdict for verdict in verdicts if verdict.status == "warn")]:
        lines += [
            [],
            [
                (_result(verdict).upper(), _style(verdict)),
                (f"  {verdict.subject}", "bold"),
                (f"  {verdict.code} ({verdict.layer})", "dim"),
            ],
            [(_indented(verdict.message), "")],
        ]
        if verdict.action:
            lines.append([("  Do: ", "bold"), (_indented(verdict.action).lstrip(), "")])
        if verdict.status not in ACCEPTED_STATUSES and CODES[verdict.code].rollback_helps and not verdict.preexisting:
            lines.append([(f"  Going back to the previous {verdict.layer} can help.", "dim")])
    return lines


def table(verdicts: Sequence[Verdict]) -> list[Line]:
    """Return a table of the verdicts, layer by layer, a line each: layer, check, subject, result, figure."""
    if not verdicts:
        return []
    verdicts = sorted(verdicts, key=lambda verdict: LAYERS.index(verdict.layer))
    rows = [("layer", "check", "subject", "result", "figure")]
    rows += [(v.layer, v.code, _cut(v.subject, COLUMN_LIMIT), _result(v), figure(v)) for v in verdicts]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    styles = ["bold", *map(_style, verdicts)]
    lines: list[Line] = [[]]
    for row, style in zip(rows, styles, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
        start, result = "  ".join(cells[:3]) + "  ", cells[3] if row[4] else cells[3].rstrip()
        plain = style if row is rows[0] else ""
        lines.append([(start, plain), (result, style), (f"  {row[4]}" if row[4] else "", plain)])
    return lines


def figure(verdict: Verdict) -> str:
    """Return the number that says most about a verdict, or why the check did not run; empty when there is none."""
    found = verdict.evidence
    if verdict.status == "skipped":
        return _cut(verdict.message, FIGURE_LIMIT)
    if isinstance(found.get("busbw_gbps"), (int, float)):
        return f"{found['busbw_gbps']:.2f} GB/s"
    seen, expected = found.get("seen"), found.get("expected")
    if isinstance(seen, int) and isinstance(expected, int):
        return f"{seen} of {expected}"
    if isinstance(found.get("judged"), int) and isinstance(found.get("files"), int):
        return f"{found['judged']} of {found['files']} files"
    seconds = found.get("seconds")
    parts = [found["version"]] if isinstance(found.get("version"), str) and found["version"] else []
    parts += [f"{seconds:.1f} s"] if isinstance(seconds, (int, float)) else []
    if not parts and isinstance(seen, str):
        parts = [seen]
    return _cut(", ".join(parts), FIGURE_LIMIT)


def _indented(text: str) -> str:
    """Return a text with two blanks before each of its lines."""
    return "\n".join(f"  {line}" for line in text.splitlines())


def _cut(text: str, limit: int) -> str:
    """Return the first line of a text, at most *limit* characters of it."""
    first = text.strip().partition("\n")[0]
    return first if len(first) <= limit else f"{first[: limit - 3]}..."


def tidy(text: str) -> str:
    """Return a text without the characters that steer a terminal: nodes and packages wrote parts of it."""
    return text.translate(_STEERING)


def as_text(lines: Sequence[Line]) -> str:
    """Return the lines without their styles."""
    return "\n".join(tidy("".join(piece for piece, _ in line)).rstrip() for line in lines)
