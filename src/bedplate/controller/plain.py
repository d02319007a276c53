"""Plain values out of Ansible's tagged ones, which YAML and pydantic refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Return *value* in built-in types, all the way down; what has no such type becomes text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    # str() of a subclass may return the subclass; a round trip cannot
    return str(value).encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
