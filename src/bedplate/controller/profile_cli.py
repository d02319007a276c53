"""`bedplate profile`: look at profiles, check them, compare two."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .errors import BedplateError
from .locking import differences
from .profiles import Profile, find_profiles, load_profile, search_path
from .schema import split_pin
from .terminal import JsonOption, ProfilesOption, gigabytes, out, print_json, say

app = typer.Typer(help="Look at profiles, check them, compare two.", no_args_is_help=True)

# The kernel package has two names; the newer one is the second.
KERNEL_PACKAGES = ("sgl-kernel", "sglang-kernel")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of a profile.", show_default=False)]


@app.command("list")
def list_profiles(profiles: ProfilesOption = None, as_json: JsonOption = False) -> None:
    """List the profiles: what they pin, and whether they are locked or refused."""
    rows = [_row(name, profiles) for name in find_profiles(profiles)]
    if as_json:
        print_json(rows)
        return
    if not rows:
        say(f"No profiles in {', '.join(map(str, search_path(profiles)))}.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "torch", "kernels", "cuda", "locked", "refused"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row[key])) for key in ("name", "torch", "kernels", "cuda", "locked", "refused")))
    out.print(table)


@app.command()
def show(name: NameArgument, profiles: ProfilesOption = None, as_json: JsonOption = False) -> None:
    """Show one profile: its pins, its targets and the size of its locks."""
    profile = load_profile(name, profiles)
    data, lock = profile.data, profile.lock
    targets: dict[str, Any] = {
        target: {
            "problem": profile.target_problem(target),
            "packages": len(lock.targets[target].files) if lock and target in lock.targets else None,
            "bytes": _bytes(profile, target),
        }
        for target in data.stack.targets
    }
    if as_json:
        plain = data.model_dump(mode="json", by_alias=True)
        path = str(profile.path.resolve())
        print_json({"name": name, "id": profile.id if lock else None, "path": path, "locks": targets, "profile": plain})
        return
    say(f"{name}: {data.description}")
    if data.refused:
        say(f"refused   {data.refused}")
    say(f"id        {profile.id if lock else '(not locked)'}")
    say(f"path      {profile.path}")
    say(f"driver    {f'{data.driver.version} {data.driver.flavour}' if data.driver else '(not managed)'}")
    say(f"toolkit   {data.toolkit.version if data.toolkit else '(not managed)'}")
    for number, pin in enumerate(data.stack.requirements):
        say(f"{'' if number else 'stack':<9} {pin}")
    for target, state in targets.items():
        size = f"{state['packages']} packages, {gigabytes(state['bytes'])}" if state["packages"] else ""
        say(f"target    {target}: {state['problem'] or size}")


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Profiles to check; all when none is named.", show_default=False),
    ] = None,
    locked: Annotated[bool, typer.Option("--locked", help="An unlocked profile is an error as well.")] = False,
    profiles: ProfilesOption = None,
) -> None:
    """Check profile.yml and the locks; exit 1 when one of them is wrong.

    Nothing is resolved or downloaded: `bedplate lock --check` does that.
    """
    failed = False
    for name in names or find_profiles(profiles):
        try:
            profile = load_profile(name, profiles)
            problem = profile.lock_problem()
            bad = problem is not None and (locked or profile.lock is not None)
        except BedplateError as error:
            problem, bad = str(error), True
        failed = failed or bad
        say(f"{'error' if bad else 'ok':<5} {name}{f': {problem}' if problem else ''}")
    if failed:
        raise typer.Exit(1)


@app.command()
def diff(
    old: Annotated[str, typer.Argument(metavar="A", help="The profile to compare with.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="B", help="The other profile.", show_default=False)],
    profiles: ProfilesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what changes for a node that goes from profile A to profile B, by layer and target."""
    before, after = load_profile(old, profiles), load_profile(new, profiles)
    result = compare(before, after)
    if as_json:
        print_json(result)
        return
    for layer in ("driver", "toolkit"):
        change = result[layer]
        say(f"{layer:<9} {change['from'] or '(not managed)'}" + ("" if same(change) else f" -> {_to(change)}"))
    for target, lines in result["targets"].items():
        say(f"{target}: {'no change' if lines == [] else ''}".rstrip())
        for line in lines if isinstance(lines, list) else [lines]:
            say(f"  {line}")


def compare(before: Profile, after: Profile) -> dict[str, Any]:
    """Return what changes between two profiles.

    Keys: driver and toolkit, each {"from", "to"} (text or None), and targets: {target: list of lines such as
    `~ torch 2.9.1 -> 2.11.0`, or a text that says why the target cannot be compared}.
    """
    targets: dict[str, Any] = {}
    for target in dict.fromkeys([*before.data.stack.targets, *after.data.stack.targets]):
        problem = before.target_problem(target) or after.target_problem(target)
        targets[target] = problem or differences(_versions(before, target), _versions(after, target))
    return {
        "driver": {"from": _driver(before), "to": _driver(after)},
        "toolkit": {"from": _toolkit(before), "to": _toolkit(after)},
        "targets": targets,
    }


def same(change: dict[str, str | None]) -> bool:
    """Return whether a change is none."""
    return change["from"] == change["to"]


def _to(change: dict[str, str | None]) -> str:
    return change["to"] or "(not managed)"


def _driver(profile: Profile) -> str | None:
    driver = profile.data.driver
    return f"{driver.version} {driver.flavour}" if driver else None


def _toolkit(profile: Profile) -> str | None:
    return profile.data.toolkit.version if profile.data.toolkit else None


def _versions(profile: Profile, target: str) -> dict[str, str]:
    return {file.name: file.version for file in profile.target_lock(target).files}


def _bytes(profile: Profile, target: str) -> int:
    lock = profile.lock.targets.get(target) if profile.lock else None
    return sum(file.size or 0 for file in lock.files) if lock else 0


def _row(name: str, profiles: Any) -> dict[str, Any]:
    """Return the line of one profile; a profile with a mistake is listed with it, not left out."""
    row: dict[str, Any] = {"name": name, "torch": None, "kernels": None, "cuda": None, "refused": False}
    try:
        profile = load_profile(name, profiles)
        pins = dict(split_pin(pin) for pin in profile.data.stack.requirements)
        kernels = next((f"{package} {pins[package]}" for package in KERNEL_PACKAGES if package in pins), None)
        row |= {"torch": pins.get("torch"), "kernels": kernels, "cuda": cuda_of(profile, pins)}
        row |= {"refused": profile.data.refused is not None}
        row["problem"] = profile.lock_problem()
        row["locked"] = row["problem"] is None
    except BedplateError as error:
        row |= {"locked": False, "problem": str(error)}
    return row


def cuda_of(profile: Profile, pins: dict[str, str]) -> str | None:
    """Return the CUDA version torch was built for: of its local version (`+cu130`), else of the locked runtime."""
    if local := re.search(r"\+cu(\d{2})(\d)$", pins.get("torch", "")):
        return f"{local[1]}.{local[2]}"
    for lock in profile.lock.targets.values() if profile.lock else ():
        for file in lock.files:
            if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", file.name):
                return ".".join(file.version.split(".")[:2])
    return None


def _cell(value: Any) -> str:
    return {True: "yes", False: "no", None: "-"}.get(value, value) if not isinstance(value, str) else value
