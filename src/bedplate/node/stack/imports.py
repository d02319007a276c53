"""Does the stack import? Every module in a fresh interpreter of the generation, every failure by its cause.

A package often hides why it cannot be imported: it tries several files and reports all of them in a text of
its own, or goes on without its extension and fails later. So the whole chain of exceptions is read for what
the loader said, and where nothing is found there, the loader is asked about the package's files directly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ..abi.demangle import demangle
from ..abi.judge import is_driver
from ..child import ChildError, Outcome, child_failed, run_probe
from ..verdicts import Verdict
from . import import_child

LAYER = "stack"

# Memory of an import. What fills a node's memory stops here.
MEMORY_BYTES = 16 << 30

# What an import of the real stacks stays below: no more are made at once than the node has room for.
IMPORT_BYTES = 2 << 30

# glibc's words, elf/dl-lookup.c, elf/dl-load.c and elf/dl-version.c:
#   <file>: undefined symbol: <name>[, version <version>]
#   <library>: cannot open shared object file: <reason>
#   <library>: version `<version>' not found (required by <file>)
# The patterns begin with fixed words and the name before them is cut out apart (_name_before), so that a
# text made to be slow to match is not.
_UNDEFINED = re.compile(r": undefined symbol: (?P<symbol>[^\s,'\")]+)|^undefined symbol: (?P<alone>[^\s,'\")]+)", re.M)
_NO_LIBRARY = re.compile(r": cannot open shared object file")
_NO_VERSION = re.compile(r": version [`'](?P<version>[^\s']+)' not found(?: \(required by (?P<file>[^)\n]+)\))?")
# How packages say it: "flashinfer-cubin version (0.6.2) does not match flashinfer version (0.6.3)", and kin.
_MISMATCH = re.compile(
    r"\bversions?\b.{0,120}\b(?:does not match|do not match|mismatch)"
    r"|\b(?:mismatch|incompatible)\w*.{0,60}\bversions?\b",
    re.IGNORECASE,
)


_MEMORY_ACTION = "Look in the evidence for what fills it; an import of a healthy stack stays below 2 GiB."


class Finding(NamedTuple):
    """What went wrong: the fields of a verdict that depend on the cause, and its part of the evidence."""

    code: str
    message: str
    action: str
    evidence: dict[str, Any]


def check_imports(
    modules: Sequence[str],
    *,
    python: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    user: str = "",
    memory_bytes: int = MEMORY_BYTES,
) -> list[Verdict]:
    """Import each module in a child of its own and return one verdict per module, in the order given.

    As many at a time as there are CPUs and room in memory (``IMPORT_BYTES`` each).

    modules: names to import, dotted ones too. python: the generation's interpreter, by its path inside the
    environment. timeout_s: seconds per import. environment, user, memory_bytes: as for ``child.run_probe``;
    a child that cannot be started is the verdict ``node.child_failed`` of that module.

    ``stack.check_stack`` judges what the verdicts say about the stack as a whole.
    """

    def check(module: str) -> Verdict:
        try:
            return check_import(
                module,
                python=python,
                timeout_s=timeout_s,
                environment=environment,
                user=user,
                memory_bytes=memory_bytes,
            )
        except ChildError as error:
            return child_failed(error, layer=LAYER, subject=module)

    at_once = min(os.cpu_count() or 1, max(1, available_bytes() // IMPORT_BYTES))
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return list(pool.map(check, modules))


def available_bytes(meminfo: str = "/proc/meminfo") -> int:
    """Return the memory that can be had without swapping: MemAvailable of proc_meminfo(5)."""
    with open(meminfo, encoding="ascii") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def check_import(
    module: str,
    *,
    python: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    user: str = "",
    memory_bytes: int = MEMORY_BYTES,
) -> Verdict:
    """Import one module in a child and return its verdict; the arguments are those of ``check_imports``.

    Evidence: seconds (of the import), versions ({distribution: version}), libraries ({name: real paths}),
    with torch also cuda, arch_list and nccl (the version's number), and on failure what the cause needs: symbol
    and demangled and file, library, module, error (the chain of exceptions), loader (what the loader said about
    files of the package), stderr (its end), foreign or copies (paths).

    Raises ChildError when the child cannot be started.
    """

    def run(asking: bool) -> Outcome:
        return run_probe(
            import_child,
            {"module": module, "ask_loader": asking},
            python=python,
            timeout_s=timeout_s,
            environment=environment,
            user=user,
            memory_bytes=memory_bytes,
        )

    outcome = run(asking=False)
    result = outcome.result
    if not isinstance(result, dict) or "error" not in result:
        return _without_answer(module, outcome)
    evidence: dict[str, Any] = {
        "seconds": result["seconds"],
        "versions": result["versions"],
        "libraries": result["libraries"],
    }
    if outcome.left_processes:
        evidence["left_processes"] = outcome.left_processes
    if not result["error"]:
        for key in ("version", "file", "cuda", "arch_list", "nccl"):
            evidence[key] = result.get(key)
        found = _foreign(result["libraries"], os.path.dirname(os.path.dirname(python)))
        found = found or _duplicate(result["libraries"])
        if found:
            evidence.update(found.evidence)
            return Verdict(found.code, "fail", LAYER, module, found.message, evidence, found.action)
        version = _version(module, result)
        message = f"Imports in {result['seconds']:.1f} s{f', version {version}' if version else ''}."
        if outcome.left_processes:
            count = outcome.left_processes
            message += f" It left {count} process{'' if count == 1 else 'es'} running, which ended by SIGKILL."
        return Verdict("import.ok", "pass", LAYER, module, message, evidence)
    evidence["error"] = result["error"]
    evidence["stderr"] = outcome.stderr[-4000:]
    texts = [str(item["text"]) for item in result["error"]]
    found = _memory(result["error"]) or _from_loader(texts) or _mismatch(texts)
    found = found or _missing_module(result["error"], ("", "cause"))
    if not found:
        asked = run(asking=True).result
        evidence["loader"] = asked["loader"] if isinstance(asked, dict) else []
        found = _from_loader([f"{item['file']}: {item['error']}" for item in evidence["loader"]])
    found = found or _missing_module(result["error"], ("context",)) or _plain_error(result["error"])
    message = found.message
    torch = result["versions"].get("torch")
    if found.code == "import.undefined_symbol" and torch and module != "torch":
        message += f" Installed is torch {torch}."
    return Verdict(found.code, "fail", LAYER, module, message, {**evidence, **found.evidence}, found.action)


def _from_loader(texts: Sequence[str]) -> Finding | None:
    """Return what the dynamic loader said in any of the texts; in the first text with such words, the first."""
    for text in texts:
        matches = [m for m in (p.search(text) for p in (_UNDEFINED, _NO_LIBRARY, _NO_VERSION)) if m]
        if matches:
            return _loader_finding(min(matches, key=lambda m: m.start()))
    return None


def _name_before(match: re.Match[str]) -> str:
    """Return the file name that stands before a match: up to a blank, a quote or a colon."""
    return re.split(r"[\s'\":]", match.string[: match.start()])[-1]


def _loader_finding(match: re.Match[str]) -> Finding:
    """Return what one sentence of the loader says."""
    name = _name_before(match)
    if match.re is _UNDEFINED:
        symbol = match["symbol"] or match["alone"]
        wanted = demangle(symbol)
        return Finding(
            "import.undefined_symbol",
            f"{os.path.basename(name) or 'An extension'} needs {wanted}, which no loaded library defines.",
            (
                "It was compiled against another release: install the release it was built for, "
                "or go back to the previous profile."
            ),
            {"symbol": symbol, "demangled": wanted, "file": name or None},
        )
    if match.re is _NO_LIBRARY:
        return Finding(
            "import.missing_library",
            f"The loader does not find {name}.",
            _library_action(os.path.basename(name)),
            {"library": name},
        )
    return Finding(
        "import.missing_library",
        f"{name} is too old: it lacks {match['version']}.",
        "Use a wheel built for this system, or a newer system.",
        {"library": name, "version": match["version"], "file": match["file"]},
    )


def _library_action(library: str) -> str:
    """Return the next step for a library that is not found."""
    if is_driver(library):
        return "It belongs to the NVIDIA driver: install the driver, or repair it."
    if library.startswith(("libcu", "libnv", "libnccl")):
        return "It belongs to the CUDA packages of the stack: lock the profile with the CUDA major it needs."
    return "Name the system package that holds it under system_packages in the profile."


def _foreign(libraries: Mapping[str, Sequence[str]], environment: str) -> Finding | None:
    """Return which libraries came from outside the environment; those of the driver do, and must."""
    inside = os.path.join(os.path.realpath(environment), "")
    foreign = sorted(
        path
        for name, paths in libraries.items()
        if not is_driver(name)
        for path in paths
        if not path.startswith(inside)
    )
    if not foreign:
        return None
    return Finding(
        "import.foreign_library",
        f"It loaded {', '.join(foreign)}, which is not of the generation.",
        "Take its directory out of LD_LIBRARY_PATH and /etc/ld.so.conf.d, or lock the package that brings the library.",
        {"foreign": foreign, "environment": inside},
    )


def _duplicate(libraries: Mapping[str, Sequence[str]]) -> Finding | None:
    """Return which library is in the process twice, be it as two files or in two versions."""
    copies: dict[str, list[str]] = {}
    for name, paths in libraries.items():
        copies.setdefault(re.split(r"(?:-[0-9a-f]{8,})?\.so", name)[0], []).extend(paths)
    twice = {name: sorted(paths) for name, paths in copies.items() if len(paths) > 1}
    if not twice:
        return None
    name, paths = sorted(twice.items())[0]
    return Finding(
        "import.duplicate_library",
        f"{name} is loaded {len(paths)} times at once: {', '.join(paths)}.",
        "Lock packages of one CUDA major that share one copy; which package brings which file, `pip show -f` says.",
        {"copies": twice},
    )


def _memory(chain: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Return the finding for an import that met the limit of its memory."""
    if not any(item["type"] == "MemoryError" for item in chain):
        return None
    return Finding("import.memory", "It needs more memory than an import may use.", _MEMORY_ACTION, {})


def _mismatch(texts: Sequence[str]) -> Finding | None:
    """Return which version a package refuses, in its own words."""
    for text in texts:
        if _MISMATCH.search(text):
            return Finding(
                "import.version_mismatch",
                f"It refuses a version: {_first_line(text)}",
                "Pin versions that belong together, and lock the profile again.",
                {},
            )
    return None


def _missing_module(chain: Sequence[Mapping[str, Any]], links: Sequence[str]) -> Finding | None:
    """Return which Python module is missing, from the exceptions that are linked in one of the given ways."""
    for item in chain:
        if item["missing"] and item["link"] in links:
            return Finding(
                "import.missing_module",
                f"The Python module {item['missing']} is not installed.",
                "Add its package to the profile, and lock it again.",
                {"module": item["missing"]},
            )
    return None


def _plain_error(chain: Sequence[Mapping[str, Any]]) -> Finding:
    """Return the finding for an error of no known class."""
    text = f"{chain[0]['type']}: {_first_line(chain[0]['text'])}".rstrip(": ")
    return Finding("import.error", f"The import raised {text}", "Read the chain of errors in the evidence.", {})


def _without_answer(module: str, outcome: Outcome) -> Verdict:
    """Return the verdict for an import that hung, died or ended the process."""
    evidence = {
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "seconds": outcome.elapsed_s,
        "stage": outcome.stages.get("import", "starting"),
        "stdout": outcome.stdout[-4000:],
        "stderr": outcome.stderr[-8000:],
        "left_processes": outcome.left_processes,
    }
    if outcome.memory_exceeded:
        message = f"The import {outcome.ending()}."
        return Verdict("import.memory", "fail", LAYER, module, message, evidence, _MEMORY_ACTION)
    if outcome.timed_out:
        message = f"The import {outcome.ending()}."
        action = "Read in the evidence where it hung; raise the import timeout if the node is only slow."
        return Verdict("import.timeout", "fail", LAYER, module, message, evidence, action)
    message = f"The importing process {outcome.ending()} and gave no answer."
    action = (
        "A crash while loading often means an extension built against other class layouts: "
        "go back to the previous profile, and look at the traceback in the evidence."
    )
    return Verdict("import.crash", "fail", LAYER, module, message, evidence, action)


def _version(module: str, result: Mapping[str, Any]) -> str:
    """Return the version of a module: its own word, or that of its only distribution."""
    owners = [v for name, v in result["versions"].items() if name != "torch" or module == "torch"]
    return str(result["version"] or (owners[0] if len(owners) == 1 else ""))


def _first_line(text: str) -> str:
    """Return the first line that says something, at most 300 characters."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
