"""`bedplate abi`: ask the files which torch they want, and whether a set of them would load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from bedplate.node.abi.demangle import demangle, differing, split_signature
from bedplate.node.abi.exports import TorchIndex, version_key
from bedplate.node.abi.judge import is_driver, short
from bedplate.node.verdicts import Verdict, failing, sentence, worst

from .abi_engine import SYSTEM_LIBRARIES, Engine, Solution, WheelReport
from .abi_engine import solve as solve_extensions
from .errors import BedplateError
from .needs import FileNeeds
from .terminal import ErrorGroup, JsonOption, ProfilesOption, TargetOption, print_json, say

app = typer.Typer(
    cls=ErrorGroup,
    help="Ask the files: which torch an extension wants, and whether a set of wheels would load.",
    no_args_is_help=True,
)
index_app = typer.Typer(cls=ErrorGroup, help="The index of torch releases.", no_args_is_help=True)
app.add_typer(index_app, name="index")

FindLinksOption = Annotated[
    list[Path] | None,
    typer.Option("--find-links", "-f", help="Directory with wheels; may be repeated.", show_default=False),
]
IndexUrlOption = Annotated[
    str, typer.Option("--index-url", help="Package index in place of the public one.", show_default=False)
]
PythonOption = Annotated[
    str, typer.Option("--python", help="Python version whose wheels are looked at, such as 3.12.", show_default=False)
]


@app.command()
def check(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="PROFILE|ENV|WHEEL...", help="A profile, an environment, or wheels.", show_default=False
        ),
    ],
    target: TargetOption = None,
    torch: Annotated[
        str,
        typer.Option(
            "--torch", help="For wheels: release to hold them against when none is torch.", show_default=False
        ),
    ] = "",
    arch: Annotated[
        int | None,
        typer.Option("--arch", help="For an environment: SM number of the GPUs, such as 120.", show_default=False),
    ] = None,
    find_links: FindLinksOption = None,
    profiles: ProfilesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a locked profile, an installed environment or wheels; exit 1 when a verdict fails."""
    results = _checked(what, target, torch, arch, find_links or (), profiles)
    if as_json:
        print_json(
            [
                {"subject": subject, "status": worst(verdicts), "verdicts": [v.to_dict() for v in verdicts], **extra}
                for subject, verdicts, extra in results
            ]
        )
    else:
        for subject, verdicts, _ in results:
            _print_verdicts(subject, verdicts)
    if any(failing(verdicts) for _, verdicts, _ in results):
        raise typer.Exit(1)


def _checked(
    what: Sequence[str],
    targets: Sequence[str] | None,
    torch: str,
    arch: int | None,
    find_links: Sequence[Path],
    profiles: Sequence[Path] | None,
) -> list[tuple[str, list[Verdict], dict[str, Any]]]:
    wheels = [Path(w) for w in what if w.endswith(".whl")]
    others = [name for name in what if not name.endswith(".whl")]
    environments = [name for name in others if "/" in name or Path(name).is_dir()]
    if torch and others:
        raise BedplateError(f"--torch is only for wheels, and {others[0]} is none: leave it out, or check it by itself")
    if arch is not None and len(environments) < len(what):
        raise BedplateError(
            "--arch is only for environments: a profile has `expect.arch`, wheels are checked without. Leave it out"
        )
    index = _loading()
    from .abi_check import check_directory, check_wheels, lock_report
    from .profiles import load_profile

    engine: Engine | None = None  # one for all locks and targets, which ask for the same symbols
    results: list[tuple[str, list[Verdict], dict[str, Any]]] = []
    if wheels:
        report, looked = check_wheels(wheels, torch, index)
        results.append((", ".join(w.name for w in wheels), report.verdicts, _extra(report, looked)))
    for name in others:
        if name in environments:
            results.append((name, check_directory(Path(name), arch=arch, get_index=index), {}))
            continue
        profile = load_profile(name, profiles)
        engine = engine or Engine(index())
        for target in targets or profile.data.stack.targets:
            report, looked = lock_report(profile, target, find_links=find_links, engine=engine)
            results.append((f"{name} {target}", report.verdicts, _extra(report, looked)))
    return results


def _loading() -> Callable[[], TorchIndex]:
    """Begin to read the index in a thread; return what waits for it.

    Decompressing takes a core for a sixth of a second; meanwhile libraries are imported and package indexes answer.
    """
    from .abi_index import load_index

    return ThreadPoolExecutor(1).submit(load_index).result


def _extra(report: WheelReport, looked: Sequence[Any]) -> dict[str, Any]:
    return {
        "apart": report.apart,
        "from_node": report.from_node,
        "driver": sorted(report.driver),
        "files": [seen.to_dict() for seen in looked],
        "bytes_read": sum(seen.bytes_read for seen in looked),
    }


@app.command()
def solve(
    what: Annotated[
        list[str],
        typer.Argument(metavar="REQUIREMENT|WHEEL...", help="Extensions, all to be satisfied.", show_default=False),
    ],
    cuda: Annotated[
        str, typer.Option("--cuda", help="Only torch for this CUDA, such as 13.0.", show_default=False)
    ] = "",
    python: PythonOption = "",
    index_url: IndexUrlOption = "",
    as_json: JsonOption = False,
) -> None:
    """Say which torch releases satisfy all given extensions together; exit 1 when none does."""
    index = _loading()
    from .abi_sources import from_file, from_requirement

    groups = [
        [from_file(Path(item))] if item.endswith(".whl") else from_requirement(item, python=python, index_url=index_url)
        for item in what
    ]
    engine = Engine(index())
    solution = solve_extensions(engine, [group[0][0] for group in groups], cuda=cuda)
    others = [(x, seen) for group in groups for x, seen in group[1:]]
    files = []
    for group in groups:
        for extension, seen in group:
            alone = solution if len(what) == 1 and extension is groups[0][0][0] else None
            alone = alone or solve_extensions(engine, [extension], cuda=cuda)
            files.append({**seen.to_dict(), "satisfied_by": alone.satisfied_by, "requires": extension.needs.requires})
    read = sum(int(str(f["bytes_read"])) for f in files)
    if as_json:
        print_json({**solution.to_dict(), "bytes_read": read, "files": files})
    else:
        _print_solution([group[0][0].label for group in groups], solution, files, read, len(others))
    if not solution.satisfied_by:
        raise typer.Exit(1)


def _print_solution(
    labels: Sequence[str], solution: Solution, files: Sequence[dict[str, Any]], read: int, others: int
) -> None:
    found = solution.satisfied_by
    say(f"{' + '.join(labels)}: " + (f"torch {', '.join(found)}" if found else "no release of torch in the index"))
    for version, verdicts in sorted(solution.reasons.items(), key=lambda item: version_key(item[0]), reverse=True):
        for number, verdict in enumerate(_first_reasons(verdicts)):
            say(f"  {'' if number else version:<7} {_reason(verdict)}")
    for file in files:
        digest = f", sha256 {file['sha256'][:12]}" if file["sha256"] else ""
        size = f"{file['bytes_read'] / 1e6:.2f} of {file['size'] / 1e6:.1f} MB read by {file['how']}"
        if file["how"] == "cache":
            size = "known from before, nothing read"
        say(f"{file['file']}{digest}: {size}" + (f"; torch {', '.join(file['satisfied_by'])}" if others else ""))
    if len(files) > 1:
        say(f"{read / 1e6:.2f} MB read in all")


def _first_reasons(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the first failing verdict of each code: the whole list is in --json."""
    first: dict[str, Verdict] = {}
    for verdict in verdicts:
        first.setdefault(verdict.code, verdict)
    return list(first.values())


def _reason(verdict: Verdict) -> str:
    """Return a verdict without what every row would repeat."""
    return verdict.message.split("; torch ")[0].rstrip(".")


@app.command()
def explain(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A shared object or a wheel.", show_default=False)],
    member: Annotated[
        str, typer.Option("--member", help="Of a wheel, only files with this in their name.", show_default=False)
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Say what one extension needs, by provider, and since or until which torch each symbol is there."""
    from .abi_index import load_index

    index = load_index()
    explained = [_explain(needs, index) for needs in _needs_of(file) if member in needs.file]
    if not explained:
        raise BedplateError(f"{file} holds no shared object" + (f" with {member!r} in its name" if member else ""))
    if as_json:
        print_json(explained)
        return
    for entry in explained:
        _print_explained(entry)


def _needs_of(file: Path) -> list[FileNeeds]:
    from .abi_sources import from_file
    from .needs import needs_of_file

    if file.suffix == ".whl":
        return [needs for needs in from_file(file)[0].needs.files if not needs.error]
    return [needs_of_file(file)]


def _explain(needs: FileNeeds, index: TorchIndex) -> dict[str, Any]:
    providers: dict[str, list[dict[str, Any]]] = {}
    newest = index.versions()[-1]
    for name, version, library, weak in needs.undefined:
        entry: dict[str, Any] = {"mangled": name, "demangled": demangle(name), "weak": weak}
        if version:
            entry["version"] = version
            providers.setdefault(library, []).append(entry)
        elif index.knows(name):
            held = index.releases_with([name])
            entry["torch"] = held
            latest = held[-1]
            providers.setdefault(f"torch: {index.library_of(name, latest)}", []).append(entry)
        else:
            providers.setdefault(_unversioned_provider(name, needs), []).append(entry)
    for entries in providers.values():
        entries.sort(key=lambda e: (e.get("torch") != index.versions(), e["demangled"]))
    return {
        "file": needs.file,
        "needed": needs.needed,
        "soname": needs.soname,
        "module": needs.module,
        "providers": providers,
        "index": {"oldest": index.versions()[0], "newest": newest},
    }


def _unversioned_provider(name: str, needs: FileNeeds) -> str:
    if name.startswith(("Py", "_Py")):
        return "python"
    driver = next((n for n in needs.needed if is_driver(n)), "")
    if driver and name.startswith(("cu", "nvml")) and not name.startswith(("cuda", "cublas", "cufft")):
        return f"driver: {driver}"
    rest = [n for n in needs.needed if not SYSTEM_LIBRARIES.fullmatch(n) and not is_driver(n)]
    return f"one of {', '.join(rest)}" if rest else "the C library"


def _print_explained(entry: dict[str, Any]) -> None:
    say(f"{entry['file']}: needs {', '.join(entry['needed'])}")
    oldest, newest = entry["index"]["oldest"], entry["index"]["newest"]
    for provider, symbols in sorted(
        entry["providers"].items(), key=lambda item: (not item[0].startswith("torch"), item[0])
    ):
        say(f"\n{provider}: {len(symbols)} symbols")
        always = [s for s in symbols if s.get("torch") and s["torch"][0] == oldest and s["torch"][-1] == newest]
        if always:
            say(f"  {len(always)} of them in every torch of the index ({oldest} to {newest})")
        for symbol in symbols:
            if symbol in always:
                continue
            text = short(symbol["demangled"])
            mangled = f"  [{symbol['mangled']}]" if text != symbol["mangled"] else ""
            when = _when(symbol["torch"], oldest, newest) if symbol.get("torch") else symbol.get("version", "")
            say(f"  {text}{mangled}" + (f": {when}" if when else "") + (" (weak)" if symbol["weak"] else ""))


def _when(releases: Sequence[str], oldest: str, newest: str) -> str:
    since = f"since {releases[0]}" if releases[0] != oldest else ""
    until = f"until {releases[-1]}" if releases[-1] != newest else ""
    return " ".join(filter(None, (since, until)))


@app.command()
def diff(
    old: Annotated[str, typer.Argument(metavar="TORCH_A", help="A release.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="TORCH_B", help="Another release.", show_default=False)],
    scope: Annotated[
        str, typer.Option("--scope", help="Only names that begin with this, such as c10::.", show_default=False)
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Show which exports went, came or changed signature from one torch release to another, and changed layouts."""
    from .abi_index import load_index

    result = compare_releases(load_index(), old, new)
    if scope:
        for key in ("changed", "gone", "new"):
            result[key] = [e for e in result[key] if str(e["from" if key == "changed" else "name"]).startswith(scope)]
    if as_json:
        print_json(result)
        return
    counted = ", ".join(f"{len(result[key])} {key}" for key in ("changed", "gone", "new"))
    say(f"torch {old} to {new}: {counted}, {len(result['layouts'])} types of another size or alignment")
    for name, sizes in result["layouts"].items():
        say(f"= {name}: {sizes['from'][0]} -> {sizes['to'][0]} bytes")
    for entry in result["changed"]:
        say(f"~ {short(entry['from'])}  ->  {short(entry['to'])}")
    for sign, key in (("-", "gone"), ("+", "new")):
        for entry in result[key]:
            say(f"{sign} {short(entry['name'])}")


def compare_releases(index: TorchIndex, old: str, new: str) -> dict[str, Any]:
    """Return what changed: changed signatures (one each way with the same qualified name), gone, new, layouts.

    Errors: BedplateError for a release that the index does not have.
    """
    for version in (old, new):
        if index.release(version) is None:
            raise BedplateError(f"the index has no torch {version}; it has {', '.join(index.versions())}")
    before, after = set(index.exports(old)), set(index.exports(new))
    gone = {n: demangle(n) for n in before - after}
    came = {n: demangle(n) for n in after - before}
    by_name: dict[str, list[str]] = {}
    for name, text in came.items():
        by_name.setdefault(split_signature(text).qualified, []).append(name)
    changed = []
    for name in sorted(gone, key=lambda n: gone[n]):
        signature = split_signature(gone[name])
        twins = by_name.get(signature.qualified, [])
        if signature.parameters is None or not twins:
            continue
        twin = min(twins, key=lambda n: (len(differing(signature, split_signature(came[n]))), came[n]))
        twins.remove(twin)
        differs = differing(signature, split_signature(came[twin]))
        changed.append({"from": gone[name], "to": came[twin], "mangled": [name, twin], "differs": differs})
    paired = {m for entry in changed for m in entry["mangled"]}
    layouts = {
        name: {"from": size, "to": index.layout_of(new)[name]}
        for name, size in sorted(index.layout_of(old).items())
        if name in index.layout_of(new) and index.layout_of(new)[name] != size
    }
    return {
        "from": old,
        "to": new,
        "layouts": layouts,
        "changed": changed,
        "gone": [{"name": t, "mangled": n} for n, t in sorted(gone.items(), key=lambda i: i[1]) if n not in paired],
        "new": [{"name": t, "mangled": n} for n, t in sorted(came.items(), key=lambda i: i[1]) if n not in paired],
    }


@index_app.command("list")
def index_list(as_json: JsonOption = False) -> None:
    """List the torch releases of the index."""
    from rich.table import Table

    from .abi_index import index_path, load_index
    from .terminal import out

    index = load_index()
    size = index_path().stat().st_size
    if as_json:
        print_json({"file": str(index_path()), "size": size, "releases": [vars(r) for r in index.releases]})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("torch", "cuda", "glibc", "exports", "wheels", "layout"):
        table.add_column(column, justify="right" if column in ("exports", "wheels") else "left")
    for release in index.releases:
        layout = f"{len(release.layout)} types" if release.layout else "not known"
        count = str(len(index.exports(release.version)))
        table.add_row(release.version, release.cuda or "none", release.glibc, count, str(len(release.wheels)), layout)
    out.print(table)
    say(f"{index_path()}: {size} bytes, {sum(1 for _ in index.names())} names")


@index_app.command("add")
def index_add(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WHEEL|VERSION]...", help="Wheels on disk, or published releases.", show_default=False),
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            "--since",
            help="Without VERSION: every stable release from this one on that is not there yet.",
            show_default=False,
        ),
    ] = "",
    private: Annotated[
        bool, typer.Option("--private", help="Write to the private file beside the shipped one.")
    ] = False,
) -> None:
    """Add torch releases to the index. It is written after each one, so a stopped build goes on where it was."""
    from . import abi_index as building

    if not what and not since:
        raise BedplateError("say which: wheels, versions, or --since VERSION")
    if since and any(not item.endswith(".whl") for item in what or []):
        raise BedplateError("--since is only for a call without VERSION: leave out one of them")
    path = building.index_path()
    if private:
        path = path.parent / building.PRIVATE_FILE
    index = building.load_index(path, private=False) if path.exists() else TorchIndex()
    items = what or []
    for wheel in (Path(item) for item in items if item.endswith(".whl")):
        release = building.add_wheel(index, wheel)
        size = building.save_index(index, path)
        say(f"torch {release.version}: CUDA {release.cuda or 'none'}, index now {size} bytes")
    versions = [item for item in items if not item.endswith(".whl")]
    if versions or since:
        for release in building.add_published(index, versions, since=since or building.FIRST_RELEASE, say=say):
            say(f"torch {release.version}: CUDA {release.cuda}, index now {building.save_index(index, path)} bytes")


def _print_verdicts(subject: str, verdicts: Sequence[Verdict]) -> None:
    """Print one line per verdict, not wrapped: long names stay whole for grep and for the clipboard."""
    say(f"{subject}: {worst(verdicts)}")
    colours = {"fail": "red", "warn": "yellow", "pass": "green"}
    for verdict in verdicts:
        mark = f"  {verdict.status:<5}"
        say(f"{mark} {verdict.code}  {sentence(verdict)}", mark, colours.get(verdict.status))
