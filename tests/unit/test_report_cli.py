"""`bedplate report`, run as a person runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bedplate.controller.cli import app
from bedplate.controller.report import record
from bedplate.node.verdicts import Verdict

GOOD = Verdict("import.ok", "pass", "stack", "torch", "Imports.", {"seconds": 1.0})
BAD = Verdict("import.error", "fail", "stack", "sgl_kernel", "It raised \x1b[31m[bold]x[/bold].", {}, "Look there.")


def write(reports: Path, run: str, host: str, *verdicts: Verdict, mtime: float, **about: str) -> None:
    place = reports / run / host
    place.mkdir(parents=True)
    known = {"host": host, "run_id": run, "kind": "verify", "generation": "g-1", **about}
    (place / "verdicts.json").write_text(json.dumps(record([v.to_dict() for v in verdicts], **known)))
    os.utime(place.parent, (mtime, mtime))


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    write(tmp_path, "run-new", "gpu-01", GOOD, mtime=2000)
    write(tmp_path, "run-old", "gpu-01", GOOD, mtime=1000)
    write(tmp_path, "run-old", "gpu-02", GOOD, BAD, mtime=1000, evidence="evidence.tar.gz")
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_newest_run_is_shown(reports: Path) -> None:
    result = run("--reports", reports)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "gpu-01  verified  verify  g-1"
    assert result.stdout.splitlines()[-2:] == ["1 host verified", str(reports / "run-new")]


@pytest.mark.parametrize("how", ["path", "name"])
def test_a_failed_host_comes_first_and_the_exit_code_is_one(reports: Path, how: str) -> None:
    result = run(reports / "run-old") if how == "path" else run("run-old", "--reports", reports)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("gpu-02  FAILED  verify")
    assert lines.index("FAIL  sgl_kernel  import.error (stack)") < next(
        number for number, line in enumerate(lines) if line.startswith("gpu-01")
    )
    assert f"Evidence: {reports}/run-old/gpu-02/evidence.tar.gz" in lines
    assert lines[-2] == "1 of 2 hosts failed: gpu-02"


def test_no_colours_and_no_markup_where_nobody_looks(reports: Path) -> None:
    text = run(reports / "run-old").stdout
    assert "\x1b" not in text
    assert "It raised \N{REPLACEMENT CHARACTER}[31m[bold]x[/bold]." in text


def test_json_for_programs(reports: Path) -> None:
    result = run(reports / "run-old", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert (data["run"], data["failed"]) == ("run-old", ["gpu-02"])
    assert [host["host"] for host in data["hosts"]] == ["gpu-02", "gpu-01"]
    assert data["hosts"][0]["verdicts"][1]["code"] == "import.error"


def test_a_misspelt_run_names_the_near_one(reports: Path) -> None:
    result = run("run-odl", "--reports", reports)
    assert result.exit_code == 1
    assert "There is no run run-odl; did you mean `run-old`?" in result.stderr


def test_no_runs_at_all(tmp_path: Path) -> None:
    result = run("--reports", tmp_path / "none")
    assert result.exit_code == 1
    assert "There is no run in" in result.stderr


def test_a_directory_without_records(tmp_path: Path) -> None:
    assert "holds no verdicts.json of any host" in run(tmp_path).stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("\xff", "cannot be read"),
        ("[]", "is not a report of this version"),
        ('{"schema": 2}', "is not a report of this version"),
        ('{"schema": 1}', "is damaged (KeyError"),
        ('{"schema": 1, "verdicts": [{"code": "no.such"}]}', "is damaged (KeyError"),
        ('{"schema": 1, "verdicts": 3, "host": "x", "outcome": "verified", "kind": ""}', "is damaged (TypeError"),
    ],
)
def test_damaged_records_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "gpu-01" / "verdicts.json"
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    result = run(tmp_path)
    assert result.exit_code == 1
    assert words in result.stderr
    assert "gpu-01/verdicts.json" in result.stderr
    assert "Traceback" not in result.stderr
