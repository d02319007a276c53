"""The evidence probe: run a command, keep what its output says around certain words, and its end.

The dynamic loader traces (LD_DEBUG, ld.so(8)) hundreds of megabytes for one import of torch; what explains a
failure are the lines before it. So the trace goes through here and is thrown away but for those.

Runs through child.py in an interpreter of the node or of the generation; uses the standard library only.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

BEFORE_LINES = 120  # kept before a line with one of the words
AFTER_LINES = 30
PLACES = 6  # the last ones count: an import tries optional libraries first
END_LINES = 200
CHUNK = 1 << 18
ANSWER_EVERY_S = 1.0  # the time limit may end this process at any moment

# Imports one module and leaves the memory map of the process as it was when that ended.
TRACED = """
import importlib, os, sys, traceback
name, maps = sys.argv[1:]
try:
    importlib.import_module(name)
except BaseException:
    traceback.print_exc()
finally:
    with open("/proc/self/maps", "rb") as source, open(maps, "wb") as copy:
        copy.write(source.read())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
"""


class Trimmer:
    """Takes output in pieces and keeps the lines around those that hold one of the words, and the last ones."""

    def __init__(self, words: Sequence[bytes]) -> None:
        """Look for *words*; with none only the end is kept."""
        self._words = list(words)
        self._rest = b""
        self._after = 0
        self._last: deque[bytes] = deque(maxlen=END_LINES)
        self._places: deque[list[bytes]] = deque(maxlen=PLACES)

    def feed(self, piece: bytes) -> None:
        """Take the next piece, whole lines or not."""
        block, newline, rest = (self._rest + piece).rpartition(b"\n")
        self._rest = rest[-CHUNK:]  # a line without an end does not fill the memory
        if not newline:
            return
        if self._after == 0 and not any(word in block for word in self._words):
            self._last.extend(block.rsplit(b"\n", END_LINES)[-END_LINES:])
            return
        for line in block.split(b"\n"):
            self._line(line)

    def _line(self, line: bytes) -> None:
        if any(word in line for word in self._words):
            if self._after == 0:
                self._places.append(list(self._last)[-BEFORE_LINES:])
            self._after = AFTER_LINES + 1
        if self._after:
            self._places[-1].append(line)
            self._after -= 1
        self._last.append(line)

    def text(self) -> str:
        """Return what was kept: the places, then the end, with "..." between them."""
        parts = [*map(list, self._places), [*self._last, self._rest]]
        return b"\n...\n".join(b"\n".join(part) for part in parts).decode("utf-8", "replace")


def main(config: dict[str, Any], answer: Callable[[Any], None], stage: Callable[[str, str], None]) -> None:
    """Run ``config["command"]`` and answer {output, maps, exit_code}, several times while it runs.

    config: command (list), or module (a name to import in this interpreter), variables (added to the
    environment of the command), words (texts to look for), directory (where this process may write).
    maps: the memory map of the process that imported, "" when there is none. exit_code: None while it runs.
    """
    maps = os.path.join(config["directory"], "maps")
    command = config.get("command") or [sys.executable, "-I", "-B", "-c", TRACED, config["module"], maps]
    stage("command", f"running {os.path.basename(command[0])}")
    trimmer = Trimmer([word.encode() for word in config["words"]])
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **config["variables"]},
    )
    assert process.stdout is not None  # noqa: S101  for the type checker
    pipe = process.stdout.fileno()
    answered, news = time.monotonic(), False
    while True:
        if select.select([pipe], [], [], ANSWER_EVERY_S)[0]:
            piece = os.read(pipe, CHUNK)
            if not piece:
                break
            trimmer.feed(piece)
            news = True
        if news and time.monotonic() - answered > ANSWER_EVERY_S:
            answer({"output": trimmer.text(), "maps": "", "exit_code": None})
            answered, news = time.monotonic(), False
    code = process.wait()
    found = ""
    if os.path.exists(maps):
        with open(maps, encoding="utf-8", errors="replace") as stream:
            found = stream.read()
    answer({"output": trimmer.text(), "maps": found, "exit_code": code})
