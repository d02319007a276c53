"""The table of codes is what the code uses, what the tests produce and what the documentation says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from bedplate.node.verdicts import CODES, SEVERITIES, STATUSES, layers_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "verdicts_doc.py"
TABLE = ROOT / "src" / "bedplate" / "node" / "verdicts.py"
SOURCES = [path for folder in ("src", "library", "filter_plugins") for path in sorted((ROOT / folder).rglob("*.py"))]
# They make verdicts by hand, so that a code which is found there only is produced by nothing.
BY_HAND = {"test_verdicts.py", "test_report.py", "test_report_cli.py", "test_evidence.py", "test_node_main.py"}
PREFIXES = "|".join(sorted({code.partition(".")[0] for code in CODES}))
CODE_LIKE = re.compile(rf"(?:{PREFIXES})\.(?!py\b|json\b|log\b|so\b|yml\b)[a-z][a-z0-9_]*")
# Codes that no test can produce, with the reason.
UNTESTABLE: dict[str, str] = {}


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that looks like a code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE_LIKE.fullmatch(node.value):
            yield node.lineno, node.value


def calls(path: Path) -> Iterator[tuple[int, list[str | None]]]:
    """Yield line and the first three arguments (None when they are computed) of each ``Verdict(...)``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Verdict":
            yield node.lineno, [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args[:3]]


def named_in(folder: Path) -> set[str]:
    """Return the codes that tests below *folder* name in quotes."""
    texts = [path.read_text() for path in folder.rglob("*.py") if path.name not in BY_HAND]
    return {code for code in CODES if any(f'"{code}"' in text or f"'{code}'" in text for text in texts)}


def test_every_code_in_the_sources_is_in_the_table() -> None:
    found = [(path, line, code) for path in SOURCES if path != TABLE for line, code in literals(path)]
    assert found
    unknown = [f"{path.relative_to(ROOT)}:{line}: {code}" for path, line, code in found if code not in CODES]
    assert not unknown


def test_every_code_is_used_by_the_sources() -> None:
    """Codes that are put together from parts count when the second part stands in a file of that prefix."""
    used = {code for path in SOURCES if path != TABLE for _, code in literals(path)}
    text = "\n".join(path.read_text() for path in SOURCES if path != TABLE)
    composed = {prefix for prefix in PREFIXES.split("|") if f'f"{prefix}.{{' in text}
    composed |= {"driver", "toolkit"} if 'f"{layer}.' in text else set()
    for code in set(CODES) - used:
        prefix, _, rest = code.partition(".")
        assert prefix in composed, f"nothing in src/ makes {code}"
        assert re.search(rf'["}}.]{re.escape(rest)}"', text), f"nothing in src/ makes {code}"


def test_verdicts_keep_to_the_statuses_and_layers_of_their_code() -> None:
    wrong = []
    for path in SOURCES:
        for line, arguments in calls(path):
            code, status, layer = [*arguments, None, None, None][:3]
            if code is None or code not in CODES:
                continue
            if status is not None and status not in CODES[code].statuses:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {code} with the status {status}")
            if layer is not None and layer not in layers_of(code):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {code} with the layer {layer}")
    assert not wrong, "add it to the code's CodeInfo in verdicts.py"


def test_every_code_is_named_by_a_test() -> None:
    """That a test produces it, too, is seen at the end of a run of all unit tests: tests/conftest.py."""
    produced = named_in(ROOT / "tests" / "unit") | named_in(ROOT / "tests" / "integration")
    assert sorted(set(CODES) - produced) == sorted(UNTESTABLE), "write a test that produces it"


def test_the_document_is_generated() -> None:
    made = subprocess.run([sys.executable, SCRIPT], check=True, capture_output=True, text=True).stdout
    assert (ROOT / "docs" / "verdicts.md").read_text() == made, "run `make docs`"


def test_the_document_explains_every_word() -> None:
    spec = spec_from_file_location("verdicts_doc", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    assert set(script.STATUS_MEANING) == set(STATUSES)
    assert set(script.SEVERITY_MEANING) == set(SEVERITIES)
    assert {code.partition(".")[0] for code in CODES} <= set(script.GROUPS)


@pytest.mark.parametrize("code", CODES)
def test_names_are_of_one_form(code: str) -> None:
    assert CODE_LIKE.fullmatch(code)
