"""A pytest plugin for mutation.py: which tests run which lines of one file, in their own process.

    LINES_FILE=src/.../gpu.py LINES_OUT=lines.json pytest -p lines_run ...

LINES_OUT gets {line: [test, ...]}. What a test's children run is not seen, nor what runs at import.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

FILE = Path(os.environ["LINES_FILE"]).resolve()
RUN: dict[int, dict[str, None]] = {}
known: dict[str, bool] = {}  # by the name that code has of its file; module_utils is a link
now = ""

Tracer = Callable[[FrameType, str, Any], Any]


def lines(frame: FrameType, event: str, _: Any) -> Tracer:
    """Note a line of the file."""
    if event == "line" and now:
        RUN.setdefault(frame.f_lineno, {})[now] = None
    return lines


def calls(frame: FrameType, _event: str, _: Any) -> Tracer | None:
    """Follow the calls into the file, and no others."""
    name = frame.f_code.co_filename
    if name not in known:
        known[name] = Path(name).resolve() == FILE
    return lines if known[name] else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Trace one test, with its fixtures: those of a module count for the first that uses them."""
    global now
    now = item.nodeid
    threading.settrace(calls)
    sys.settrace(calls)
    yield
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    now = ""


def pytest_sessionfinish() -> None:
    """Write what was seen."""
    Path(os.environ["LINES_OUT"]).write_text(json.dumps({line: list(tests) for line, tests in RUN.items()}))
