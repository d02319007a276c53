"""Which verdicts do the tests produce? Not which they name: what the code under test made, by cause.

``pytest --verdicts-out FILE`` writes {code: {status: [test, ...]}}; ``make codes`` prints it as a table. A verdict
counts when a function of src/ or filter_plugins/ made it while a test ran, in this process or in what
``bedplate_verify`` reported from a node (a verdicts.json below the test's directory). What a test wrote by hand, or
read from JSON, does not. A run of all of tests/unit fails when a code of the table was produced by no test of it, and
none is named here (``ELSEWHERE``).
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ansible.module_utils
import pytest

from bedplate.node.verdicts import CODES

ROOT = Path(__file__).resolve().parents[1]
UNIT = ROOT / "tests" / "unit"
MAKERS = [str(ROOT / name) for name in ("src", "filter_plugins")]
TABLE = str(ROOT / "src" / "bedplate" / "node" / "verdicts.py")

# What AnsiballZ does for a node: bedplate is importable as ansible.module_utils.bedplate.
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

# Codes that are made out of sight of this process: the test that has them made, and looks at them.
ELSEWHERE = {
    "run.refused": "tests/unit/test_failed_tasks.py::test_a_failed_task_has_a_code_and_a_next_step",
    "run.timeout": "tests/unit/test_failed_tasks.py::test_a_failed_task_has_a_code_and_a_next_step",
}

made: dict[str, dict[str, list[str]]] = {}
now = ""


def note(code: str, status: str) -> None:
    """Note a verdict of the test that runs."""
    tests = made.setdefault(code, {}).setdefault(status, [])
    if now and now not in tests:
        tests.append(now)


def maker() -> str:
    """Return the file of the function that makes a verdict, past what dataclasses bring in between."""
    frame = sys._getframe(3)  # this function, the wrapper, __init__
    while frame.f_back and frame.f_code.co_filename.endswith(("dataclasses.py", "<string>")):
        frame = frame.f_back
    return str(Path(frame.f_code.co_filename).resolve())


def watch(module: str) -> None:
    """Note every verdict of a module's class that the code under test makes."""
    kind: Any = importlib.import_module(module).Verdict
    checked = kind.__post_init__

    def post_init(verdict: Any) -> None:
        checked(verdict)
        file = maker()
        if file != TABLE and file.startswith(tuple(MAKERS)):
            note(verdict.code, verdict.status)

    kind.__post_init__ = post_init


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--verdicts-out", metavar="FILE", help="write which test produced which verdict")


def pytest_configure() -> None:
    """Watch the class under the name that the tests use, and under the one that the modules use."""
    watch("bedplate.node.verdicts")
    watch("ansible.module_utils.bedplate.verdicts")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Remember which test runs; what a fixture of a module makes counts for the first test that uses it."""
    global now
    now = item.nodeid
    yield
    now = ""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Take in what the nodes of a test reported."""
    yield
    directory = getattr(item, "funcargs", {}).get("tmp_path")
    if item.get_closest_marker("node") and directory:
        for path in directory.rglob("verdicts.json"):
            found = json.loads(path.read_text())
            for verdict in found if isinstance(found, list) else found.get("verdicts", []):
                note(verdict["code"], verdict["status"])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file, and hold a run of all unit tests to the table."""
    tests = {item.nodeid.partition("[")[0] for item in session.items}
    found = {**{code: {"fail": [test]} for code, test in ELSEWHERE.items() if test in tests}, **made}
    out = session.config.getoption("--verdicts-out")
    if out:
        Path(out).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if session.exitstatus == 0 and {item.path for item in session.items} >= set(UNIT.glob("test_*.py")):
        missing = sorted(set(CODES) - set(found))
        if missing:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\nNo unit test produces {', '.join(missing)}: write one, or name it in tests/conftest.py.")
