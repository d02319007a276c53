"""The command `bedplate`. Exit codes: 0 well, 1 a mistake or failure that is named, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .terminal import ErrorGroup, ProfilesOption, TargetOption, gigabytes, say

if TYPE_CHECKING:
    from .schema import LockedFile

# What a command needs is imported when it runs: all of it together takes longer than most commands.


class Commands(ErrorGroup):
    """The commands of this file, and those of other files."""

    elsewhere: ClassVar = {"profile": "profile_cli:app", "abi": "abi_cli:app", "report": "report_cli:report"}


app = typer.Typer(
    cls=Commands,
    help="Lock, check and fetch the pinned stacks that Bedplate's playbooks put on GPU nodes.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        say(f"bedplate {metadata.version('bedplate')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Lock, check and fetch the pinned stacks that Bedplate's playbooks put on GPU nodes."""


@app.command()
def lock(
    name: Annotated[str, typer.Argument(metavar="PROFILE", help="Name of the profile to lock.", show_default=False)],
    target: TargetOption = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when the lock would change.")] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", "-U", help="Do not prefer the versions of the present lock.")
    ] = False,
    upgrade_package: Annotated[
        list[str] | None,
        typer.Option("--upgrade-package", "-P", help="The same for one package; may be repeated.", show_default=False),
    ] = None,
    index_url: Annotated[
        str | None, typer.Option("--index-url", help="Package index in place of the public one.", show_default=False)
    ] = None,
    find_links: Annotated[
        list[str] | None,
        typer.Option("--find-links", "-f", help="Directory or page with wheels; may be repeated.", show_default=False),
    ] = None,
    no_index: Annotated[
        bool, typer.Option("--no-index", help="Use no index at all, the profile's neither: only --find-links.")
    ] = False,
    profiles: ProfilesOption = None,
) -> None:
    """Resolve a profile and write its lock: one file with one sha256 for every package and target.

    Versions of the present lock are kept where they still fit. Nothing is written unless all of it succeeds.
    """
    from .locking import make_lock, record_abi
    from .profiles import load_profile
    from .resolver import Sources, Upgrade
    from .terminal import err

    profile = load_profile(name, profiles)
    with err.status(f"Resolving {name} ..."):
        new = make_lock(
            profile,
            target or [],
            Sources(index_url, find_links or [], no_index),
            Upgrade(upgrade, upgrade_package or []),
        )
    differing = new.differing()
    if not check:
        new.write()
    for name_of_target, lines in new.changes.items():
        files = new.data.targets[name_of_target].files
        size = gigabytes(sum(file.size or 0 for file in files))
        say(f"{name_of_target}: {len(files)} packages, {size}; {f'{len(lines)} changes' if lines else 'no change'}")
        for line in lines:
            say(f"  {line}")
    if check:
        for path in differing:
            say(f"would change: {path}")
        raise typer.Exit(1 if differing else 0)
    profile = load_profile(name, profiles)
    with err.status("Asking the files whether they fit ..."):
        directories = [Path(place) for place in find_links or [] if Path(place).is_dir()]
        abi = record_abi(profile, directories, None if no_index else index_url)
    say(f"ABI: {abi.status}. {abi.reason}")
    say(f"{profile.id} " + ("is locked" if differing else "was locked already"))


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="PROFILE", help="Name of a locked profile.", show_default=False)],
    target: TargetOption = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Directory to fill. Default: ~/.cache/bedplate/wheels.", show_default=False),
    ] = None,
    index_url: Annotated[
        str | None,
        typer.Option("--index-url", help="Index in place of $UV_DEFAULT_INDEX or the public one.", show_default=False),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read files that are there again, also those known to be right.")
    ] = False,
    profiles: ProfilesOption = None,
) -> None:
    """Fill a directory with the locked wheels, for nodes that install from a directory or a mirror.

    A second call downloads what is missing; an interrupted one is taken up where it stopped.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from . import fetch as fetching
    from .package_index import default_index
    from .profiles import load_profile
    from .terminal import err

    profile = load_profile(name, profiles)
    directory = to or fetching.default_directory()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    files = fetching.wanted(profile, target or [])
    total = sum(file.size or 0 for file in files)
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("Checking", total=total)
        plan = fetching.make_plan(
            profile, target or [], directory, recheck=verify, checked=lambda file: bar.advance(task, file.size or 0)
        )
    say(
        f"{name}: {len(files)} files, {gigabytes(total)}; {len(plan.present)} are in {directory}, "
        f"{len(plan.missing)} are missing ({gigabytes(plan.bytes_missing)}; {gigabytes(plan.free)} free)"
    )
    plan.check_space()
    if not plan.missing:
        return
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=err) as bar:
        have = {file.file: 0 for file in plan.missing}
        task = bar.add_task("Fetching", total=sum(file.size or 0 for file in plan.missing) or None)

        def progress(file: LockedFile, count: int) -> None:
            have[file.file] = count
            bar.update(task, completed=sum(have.values()))

        left = iter(range(len(plan.missing) - 1, -1, -1))

        def done() -> None:
            bar.update(task, description=f"Fetching, {next(left)} files left")

        fetching.fetch(profile, plan, index_url or default_index(), progress, done)
    say(f"All {len(files)} files are in {directory}, each with the locked sha256.")


if __name__ == "__main__":
    app()
