"""Reads YAML written by people: duplicate keys are errors, and every value knows its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .errors import BedplateError

Location = tuple[str | int, ...]

# The same loader in C, five times as fast, where PyYAML was built with libyaml.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlFile:
    """A parsed YAML file: `data` (plain Python values) and the line of every key and item.

    Errors (BedplateError, text begins with `file:line:`): YAML syntax, duplicate key, a key that is not
    text, an alias (`*name`; profiles have no use for them and they can expand without bound).
    """

    def __init__(self, path: Path, raw: bytes) -> None:
        """Parse *raw*, the content of *path*."""
        self.path = path
        self._lines: dict[Location, int] = {}
        try:
            loader = _Loader(raw)
            node = loader.get_single_node()
            if node is None:
                raise BedplateError(f"{path}:1: the file is empty")
            self._visit(node, (), set())
            self.data: Any = loader.construct_document(node)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise BedplateError(f"{path}:{line}: not valid YAML: {error.problem}") from error
        except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-13-45
            raise BedplateError(f"{path}:1: not valid YAML: {error}") from error

    def where(self, location: Location) -> str:
        """Return `file:line` of a location, or of its nearest parent that exists."""
        while location and location not in self._lines:
            location = location[:-1]
        return f"{self.path}:{self._lines.get(location, 1)}"

    def _visit(self, node: yaml.Node, location: Location, seen: set[int]) -> None:
        if id(node) in seen:
            raise BedplateError(f"{self.path}:{node.start_mark.line + 1}: aliases (`*name`) are not allowed here")
        seen.add(id(node))
        self._lines.setdefault(location, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self._visit(item, (*location, number), seen)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                line = key.start_mark.line + 1
                if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                    raise BedplateError(f"{self.path}:{line}: keys must be text; put `{key.value}` in quotes")
                inner = (*location, str(key.value))
                if inner in self._lines:
                    raise BedplateError(
                        f"{self.path}:{line}: key `{key.value}` is given twice, first in line {self._lines[inner]}"
                    )
                self._lines[inner] = line
                self._visit(value, inner, seen)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of *path*; a BedplateError names the file that cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BedplateError(f"cannot read {path}: {error.strerror or error}") from error
