"""C++ names as people read them, and what differs between two signatures.

Demangling is done by the C++ runtime (``__cxa_demangle`` of libstdc++, through ctypes); where it is absent
the mangled name is shown as it is. Callers keep the mangled name beside the demangled one.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Callable

# libstdc++ limits its recursion, not its output, and a name may come from a hostile file: those that are long, or
# could become so, are shown as they are. MAX_ESTIMATE leaves out none of the names that released extensions want of
# torch (but a part of the kernels that torch itself instantiates); libstdc++ writes that much in a tenth of a second.
MAX_DEMANGLED_NAME = 16384
MAX_REFERENCES = 512
MAX_ESTIMATE = 16 << 20
MAX_DEMANGLED_TEXT = 1 << 16

# Whatever may be a reference (to a component before it, to a template's argument), also inside identifiers: a name is
# not parsed here, and one that only looks like a reference makes the estimate larger.
_REFERENCE = re.compile(r"(?=S([0-9A-Z]{0,3})_)|(?=T[0-9A-Z_]{0,6}_)")
_NAME_AGAIN = re.compile(r"[CD]\d|CI\d")  # a constructor repeats the name of its class
_EXPANSION = re.compile(r"Dp|sp")
_SCOPE = re.compile(r"Z|cv")  # what may bring template arguments of its own
_CHARACTER = 20  # the longest text one character stands for: `y` is "unsigned long long", with ", " behind it

# What counts in a signature, and what only looks like it: operators, and names without a name.
_PUNCTUATION = re.compile(r"operator(?:\(\)|<=>|<<=?|>>=?|->\*?|<=?|>=?|\[\])|\(anonymous namespace\)|[<\[{>\]}(]")
_BRACKETS = re.compile(r"[()]")


@lru_cache(maxsize=1)
def _demangler() -> Callable[[bytes], bytes | None] | None:
    try:
        runtime = ctypes.CDLL("libstdc++.so.6")
        libc = ctypes.CDLL(None)
        function = runtime.__cxa_demangle
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free.restype = None

    def call(mangled: bytes) -> bytes | None:
        status = ctypes.c_int(0)
        result = function(mangled, None, None, ctypes.byref(status))
        if not result or status.value != 0:
            return None
        try:
            return ctypes.string_at(result)
        finally:
            libc.free(result)

    return call


def most_text(mangled: str) -> int:
    """Return how long the demangled name may be at most; any number above MAX_ESTIMATE means "too long".

    The n-th component can hold references to earlier components only (Itanium C++ ABI, section 5.1.10), and those
    stand before it: a reference is at most the literal text and all earlier references with a smaller number. Template
    parameters are counted apart, since which argument they stand for is known only where they are printed: each may be
    the whole name, once for every scope that has arguments. A pack is at most as long as the name.
    """
    length = len(mangled)
    weight = _CHARACTER + len(_NAME_AGAIN.findall(mangled))
    sums: dict[int, tuple[int, int]] = {}  # text and template parameters of the references, by their number
    parameters = 0
    for seen, match in enumerate(_REFERENCE.finditer(mangled)):
        if match.group(1) is None:
            parameters += 1
            continue
        number = int(match.group(1), 36) + 1 if match.group(1) else 0
        smaller = [value for key, value in sums.items() if key < number]
        text = weight * match.start() + sum(value[0] for value in smaller)
        inside = parameters + sum(value[1] for value in smaller)
        known = sums.get(number, (0, 0))
        sums[number] = (known[0] + text, known[1] + inside)
        if seen == MAX_REFERENCES or sums[number][0] > MAX_ESTIMATE:
            return MAX_ESTIMATE + 1
    text = total = weight * length + sum(value[0] for value in sums.values())
    parameters += sum(value[1] for value in sums.values())
    for _ in range(1 + len(_SCOPE.findall(mangled, 2)) if parameters else 0):
        total = min(text + parameters * total, MAX_ESTIMATE + 1)
    packs = len(_EXPANSION.findall(mangled)) if "J" in mangled else 0
    for _ in range(packs):
        total = min(total * length, MAX_ESTIMATE + 1)
    return total


@lru_cache(maxsize=65536)
def demangle(mangled: str) -> str:
    """Return the C++ name of a mangled symbol.

    The argument itself when it is not C++, no demangler is there, or the C++ name could be very long.
    """
    call = _demangler()
    raw = mangled.encode("utf-8", "surrogateescape")
    if call is None or not mangled.startswith("_Z") or len(raw) > MAX_DEMANGLED_NAME:
        return mangled
    result = call(raw) if most_text(mangled) <= MAX_ESTIMATE else None
    return mangled if result is None or len(result) > MAX_DEMANGLED_TEXT else result.decode("utf-8", "replace")


@dataclass(frozen=True)
class Signature:
    """A demangled name taken apart.

    Qualified name, parameter types (None for data), and what follows (`` const``).
    """

    qualified: str
    parameters: tuple[str, ...] | None
    suffix: str

    @property
    def plain(self) -> str:
        """The qualified name without template arguments."""
        return _strip_templates(self.qualified)


@lru_cache(maxsize=65536)
def split_signature(demangled: str) -> Signature:
    """Take a demangled C++ name apart. The return type that templates carry is dropped."""
    open_at = _parameter_list(demangled)
    if open_at is None:
        return Signature(demangled, None, "")
    close_at = _matching(demangled, open_at)
    head = demangled[:open_at]
    return Signature(_last_word(head), tuple(_split(demangled[open_at + 1 : close_at])), demangled[close_at + 1 :])


def differing(wanted: Signature, has: Signature) -> list[dict[str, object]]:
    """Return the parameters that differ: position (from 1), wanted, has.

    None where one side has no such one.
    """
    mine, other = wanted.parameters or (), has.parameters or ()
    found: list[dict[str, object]] = []
    for position in range(max(len(mine), len(other))):
        pair = [side[position] if position < len(side) else None for side in (mine, other)]
        if pair[0] != pair[1]:
            found.append({"position": position + 1, "wanted": pair[0], "has": pair[1]})
    return found


def source_token(demangled: str) -> str:
    """Return ``<length><identifier>`` of a symbol's last identifier, as it stands in mangled names; "" if
    none.

    Format: ``<source-name>`` of the Itanium C++ ABI, section 5.1.2.
    """
    plain = split_signature(demangled).plain
    words = re.findall(r"[A-Za-z_]\w*", plain.partition("operator")[0] if "::operator" in plain else plain)
    return f"{len(words[-1])}{words[-1]}" if words else ""


def _parameter_list(text: str) -> int | None:
    """Return where the parameter list opens.

    The first top-level parenthesis that is not ``(anonymous namespace)``.
    """
    depth = 0
    end = 0
    for match in _PUNCTUATION.finditer(text):
        if match.start() < end:
            continue
        mark = match.group()
        if mark in ("<", "[", "{"):
            depth += 1
        elif mark in (">", "]", "}"):
            depth -= 1
        elif mark == "(":
            if depth == 0:
                return match.start()
            end = _matching(text, match.start())
    return None


def _matching(text: str, open_at: int) -> int:
    depth = 0
    for match in _BRACKETS.finditer(text, open_at):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


def _split(text: str) -> list[str]:
    parts: list[str] = []
    depth = start = 0
    for index, char in enumerate(text):
        depth += (char in "(<[{") - (char in ")>]}")
        if char == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _last_word(text: str) -> str:
    """Drop a leading return type: keep what follows the last top-level blank, operators kept whole."""
    if " " not in text:
        return text
    depth = 0
    cut = 0
    for index, char in enumerate(text):
        depth += (char in "(<[{") - (char in ")>]}")
        if char == " " and depth == 0 and "operator" not in text[cut:index]:
            cut = index + 1
    return text[cut:]


def _strip_templates(text: str) -> str:
    if "<" not in text:
        return text
    kept = []
    depth = 0
    for char in re.sub(
        r"operator(<=>|<<=?|>>=?|->\*?|<=?|>=?)", lambda m: m.group().replace("<", "(").replace(">", ")"), text
    ):
        if char == "<":
            depth += 1
        elif char == ">" and depth:
            depth -= 1
        elif depth == 0:
            kept.append(char)
    return "".join(kept)


def nearest_of(mangled: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate with the same qualified name and the fewest other parameters, or None."""
    wanted = split_signature(demangle(mangled))
    best: tuple[tuple[bool, int, int], str] | None = None
    stem = wanted.qualified.partition("<")[0]
    for name in candidates:
        text = demangle(name)
        if stem not in text:
            continue
        has = split_signature(text)
        if name == mangled or has.plain != wanted.plain or (has.parameters is None) != (wanted.parameters is None):
            continue
        rank = (
            has.qualified != wanted.qualified,
            abs(len(has.parameters or ()) - len(wanted.parameters or ())),
            len(differing(wanted, has)) + (has.suffix != wanted.suffix),
        )
        if best is None or rank < best[0]:
            best = (rank, name)
    return best[1] if best else None
