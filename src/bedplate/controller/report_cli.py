"""`bedplate report`: show again what a run of the playbooks found, from the files it left under reports/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from .errors import BedplateError, near
from .report import SCHEMA, has_failed, host_lines, tidy
from .terminal import JsonOption, out, print_json

RECORD = "verdicts.json"
RECORD_LIMIT = 64 << 20  # bytes
DEFAULT = Path("reports")


def report(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="Directory reports/<run>, or the name of a run. Default: the newest.",
            show_default=False,
        ),
    ] = None,
    reports: Annotated[Path, typer.Option("--reports", help="Directory with the runs.")] = DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Show what a run found on each host: what fails first, then a table.

    Exit code 0 when every host is well, 1 when one is not.
    """
    directory = find_run(run, reports)
    hosts = sorted(read_run(directory).items(), key=lambda item: (not has_failed(item[1]), item[1]["host"]))
    bad = [host["host"] for _, host in hosts if has_failed(host)]
    if as_json:
        print_json({"run": directory.name, "failed": bad, "hosts": [host for _, host in hosts]})
    else:
        for name, host in hosts:
            for line in host_lines(host, str(directory / name)):
                out.print(Text.assemble(*((tidy(piece), style) for piece, style in line)), soft_wrap=True)
            out.print()
        count = f"{len(hosts)} host{'' if len(hosts) == 1 else 's'}"
        ending = f"{len(bad)} of {count} failed: {', '.join(bad)}" if bad else f"{count} verified"
        out.print(Text(tidy(ending), style="bold red" if bad else "green"), soft_wrap=True)
        out.print(Text(str(directory), style="dim"), soft_wrap=True)
    raise typer.Exit(1 if bad else 0)


def find_run(run: Path | None, reports: Path) -> Path:
    """Return the directory of a run: as given, below *reports*, or the newest there.

    Raises BedplateError when there is none, with the near name.
    """
    known = sorted((path for path in reports.glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    if run is None:
        if not known:
            raise BedplateError(
                f"There is no run in {reports}. Run playbooks/verify.yml, or name the directory of one."
            )
        return known[-1]
    for place in (run, reports / run):
        if place.is_dir():
            return place
    raise BedplateError(
        f"There is no run {run}{near(run.name, [path.name for path in known]) or '.'} Looked in {reports}."
    )


def read_run(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the records of a run by the directories of its hosts.

    Raises BedplateError when there is none, or one is damaged.
    """
    paths = sorted(directory.glob(f"*/{RECORD}"))
    if not paths:
        raise BedplateError(f"{directory} holds no {RECORD} of any host; name the directory of one run.")
    return {path.parent.name: _read(path) for path in paths}


def _read(path: Path) -> dict[str, Any]:
    """Return one record."""
    try:
        if path.stat().st_size > RECORD_LIMIT:
            raise BedplateError(f"{path} is larger than {RECORD_LIMIT} bytes.")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BedplateError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise BedplateError(f"{path} is not a report of this version of Bedplate (schema {SCHEMA}).")
    try:
        host_lines(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BedplateError(f"{path} is damaged ({type(error).__name__}: {error}).") from error
    return found
