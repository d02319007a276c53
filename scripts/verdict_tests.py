#!/usr/bin/env python3
"""Print which test produced which verdict, from what ``pytest --verdicts-out FILE`` wrote.

    scripts/verdict_tests.py FILE

One line for each code and status of the table in src/bedplate/node/verdicts.py: how many tests produced it, and one of
them; "-" where none did. Several statuses of a code are several causes. tests/conftest.py says what counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bedplate.node.verdicts import CODES


def main(path: str) -> None:
    """Print the table, and below it how many codes and statuses there are."""
    made: dict[str, dict[str, list[str]]] = json.loads(Path(path).read_text(encoding="utf-8"))
    rows = [
        (code, status, made.get(code, {}).get(status, [])) for code, info in CODES.items() for status in info.statuses
    ]
    for code, status, tests in rows:
        print(f"{code:28} {status:13} {len(tests):4}  {min(tests, key=len, default='-')}")
    produced = {code for code, _, tests in rows if tests}
    pairs = sum(bool(tests) for *_, tests in rows)
    print(f"\n{len(produced)} of {len(CODES)} codes and {pairs} of {len(rows)} of their statuses are produced.")


if __name__ == "__main__":
    main(sys.argv[1])
