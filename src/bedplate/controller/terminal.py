"""How the command line speaks: results to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from .errors import BedplateError

if TYPE_CHECKING:
    from rich.console import Console

    out: Console
    err: Console


def __getattr__(name: str) -> Any:
    """Make `out` and `err`, the consoles for tables and progress, when they are first asked for: rich loads slowly."""
    if name not in ("out", "err"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rich.console import Console

    console = globals()[name] = Console(stderr=name == "err", highlight=False)
    return console


ProfilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--profiles",
        help="Directory with profiles; may be repeated, the first hit wins. Default: $BEDPLATE_PROFILES, else "
        "profiles/ of the project.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    list[str] | None,
    typer.Option("--target", "-t", help="Only this target, such as cp311-x86_64; may be repeated.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class ErrorGroup(TyperGroup):
    """A group of commands whose users never see a traceback for a mistake of theirs.

    elsewhere: name -> `module:object` of this package for commands that are loaded when they are asked for; the object
    is a function, or the Typer of a group.
    """

    elsewhere: ClassVar[dict[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(dict.fromkeys([*super().list_commands(ctx), *self.elsewhere]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, loaded if need be."""
        if cmd_name not in self.elsewhere:
            return super().get_command(ctx, cmd_name)
        if cmd_name not in self.commands:
            module, _, attribute = self.elsewhere[cmd_name].partition(":")
            found = getattr(import_module(f".{module}", __package__), attribute)
            if isinstance(found, typer.Typer):
                self.commands[cmd_name] = get_group(found)
            else:
                single = typer.Typer(add_completion=False)
                single.command(cmd_name)(found)
                self.commands[cmd_name] = get_command(single)
            self.commands[cmd_name].name = cmd_name
        return self.commands[cmd_name]

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # click names its own class here
        """Run the command; a BedplateError is printed and ends in 1, an interrupt in 130."""
        try:
            return super().invoke(ctx)
        except BedplateError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            print("interrupted: the same command goes on from here", file=sys.stderr)
            raise typer.Exit(130) from error


def say(text: str, mark: str = "", colour: str | None = None) -> None:
    """Print *text* as it is, without wrapping; a terminal shows *mark*, with which it may begin, in *colour*."""
    if mark and not os.environ.get("NO_COLOR"):
        text = typer.style(mark, fg=colour) + text.removeprefix(mark)
    typer.echo(text)  # leaves the colour out where nobody sees it


def print_json(value: Any) -> None:
    """Print *value* as JSON, keys in their own order."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def gigabytes(count: int) -> str:
    """Return a number of bytes for people, in powers of ten: `5.01 GB`, `840 kB`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
