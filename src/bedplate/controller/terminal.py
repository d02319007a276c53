"""How the command line speaks: results to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from .errors import BedplateError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

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
    """A group of commands whose users never see a traceback for a mistake of theirs."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # click names its own class here
        """Run the command; a BedplateError is printed and ends in 1, an interrupt in 130."""
        try:
            return super().invoke(ctx)
        except BedplateError as error:
            # no markup: messages hold brackets of their own
            err.print(f"error: {error}", markup=False, soft_wrap=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            err.print("interrupted: the same command goes on from here", markup=False)
            raise typer.Exit(130) from error


def say(text: str) -> None:
    """Print *text* as it is, without wrapping."""
    out.print(text, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print *value* as JSON, keys in their own order."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def gigabytes(count: int) -> str:
    """Return a number of bytes for people, in powers of ten: `5.01 GB`, `840 kB`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
