"""What a node knows about a failure, in one small archive: enough to understand it elsewhere, and no secrets.

Every part has a limit, and the sum of them is below that of the archive; what was cut says so. A part that
cannot be had is named with the reason and keeps none of the others from being there. Files are opened without
following links, since some lie where others than root may write. Nothing here runs without a time limit.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import platform
import re
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import evidence_child
from .child import ChildError, read_environment, run_probe
from .state.durable import StateError
from .verdicts import Verdict, failing

ARCHIVE_LIMIT = 10_000_000  # bytes; all parts at their limits, unpacked, are less
TRACED_IMPORTS = 3  # failing imports whose loader is traced; each may take TRACE_TIMEOUT_S
TRACE_TIMEOUT_S = 90.0
TRACE_BUDGET = 2  # times the limit of one trace, for all of them: a node goes back before it is studied for long
COMMAND_TIMEOUT_S = 20.0
KMSG_RECORDS = 200_000

# Bytes of each part; "maps" and "loader" once for each traced import.
LIMITS = {
    "verdicts.json": 2_000_000,
    "reason.txt": 100_000,
    "node.json": 100_000,
    "versions.json": 200_000,
    "requirements.lock": 1_000_000,
    "profile.json": 200_000,
    "environment.json": 100_000,
    "state.json": 1_000_000,
    "dmesg.txt": 1_000_000,
    "pci.txt": 400_000,
    "nvidia-smi-topo.txt": 100_000,
    "maps": 400_000,
    "loader": 400_000,
}

# Environment variables that explain a stack's behaviour. All others are left out: they may hold anything.
ALLOWED_VARIABLES = re.compile(
    r"(?:CUDA|CUBLAS|CUDNN|FLASHINFER|GLOO|NCCL|NVIDIA|OMP|PYTHON|PYTORCH|SGL|SGLANG|TORCH|TORCHINDUCTOR|TRITON|VLLM)"
    r"_?[A-Z0-9_]*|LANG|LC_[A-Z]+|LD_LIBRARY_PATH|LD_PRELOAD|MKL_NUM_THREADS|PATH|VIRTUAL_ENV"
)
_HIDDEN_WORDS = r"(?:passw(?:or)?d|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|authorization)"
_HIDDEN_NAME = re.compile(rf"(?:^|[_-]){_HIDDEN_WORDS}(?:$|[_-])|{_HIDDEN_WORDS}$", re.IGNORECASE)
_ENVIRONMENT_KEYS = ("env", "environ", "environment", "variables")
REDACTED = "(redacted)"
_SETS = rf"{_HIDDEN_WORDS}(?:\\?['\"])?\s{{0,3}}[=:]\s{{0,3}}"
_ESCAPED_TWICE = r"\\\\(?:\\.|[^\\\n])"
# Each is linear in the text's length: it may be a hostile package's output.
_REDACTIONS = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:[^-]|-(?!----)){0,20000}(?:-----END [A-Z ]{0,30}-----)?"
        ),
        REDACTED,
    ),
    (
        re.compile(r"\b(?:hf|gh[oprsu]|github_pat|glpat|nvapi|xox[abp])[_-][A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b"),
        REDACTED,
    ),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"), REDACTED),  # a JSON web token
    (re.compile(r"(?i)\b((?:bearer|basic)\s{1,3})[A-Za-z0-9._~+/=-]{8,}"), rf"\1{REDACTED}"),
    # a header of any scheme: all of the line, but for quotes around it
    (re.compile(r"(?i)(authorization\s{0,3}:\s{0,3})[^\s'\"\\][^\n'\"\\]*"), rf"\1{REDACTED}"),
    # --password value
    (re.compile(rf"(?i)((?<=-){_HIDDEN_WORDS}[ \t]{{1,3}}['\"]?)[^\s'\"\\-][^\s'\"\\]*"), rf"\1{REDACTED}"),
    # NAME="value", "name": "value" and, in a JSON text inside another, \"name\": \"value\"; the quotes stay, so that
    # JSON stays JSON. What is escaped in a value belongs to it. A value without an end is all of the line.
    (re.compile(rf'(?i)({_SETS}")(?:[^"\\\n]|\\.)+("?)'), rf"\1{REDACTED}\2"),
    (re.compile(rf"(?i)({_SETS}')(?:[^'\\\n]|\\.)+('?)"), rf"\1{REDACTED}\2"),
    (re.compile(rf'(?i)({_SETS}\\")(?:[^"\\\n]|{_ESCAPED_TWICE})+((?:\\")?)'), rf"\1{REDACTED}\2"),
    (re.compile(rf"(?i)({_SETS}\\')(?:[^'\\\n]|{_ESCAPED_TWICE})+((?:\\')?)"), rf"\1{REDACTED}\2"),
    (re.compile(rf"(?i)({_SETS})[^\s'\"\\,;&]+"), rf"\1{REDACTED}"),
)
_URL = re.compile(r"://(?:(?!://)[^\s'\"])*")
# Lines of the kernel's log that matter however old they are.
_GPU_LINES = re.compile(r"NVRM|nvidia|Xid|\bAER\b|pcieport|nouveau|DMAR|AMD-Vi|Out of memory", re.IGNORECASE)


@dataclass(frozen=True)
class Part:
    """One file of the archive: its name, its content, how many bytes were cut off, and what to say of it."""

    name: str
    data: bytes
    cut: int = 0
    note: str = ""


@dataclass(frozen=True)
class Request:
    """What to collect.

    verdicts: those of the failed verification. reason: why the run failed, as text. run_id: of that run.
    age_s: seconds since it began. generation: directory of the failing generation, or empty. state_dir: where
    state.json lies. user: who probes run as. root: the directory that stands for /. trace_timeout_s: seconds
    for each traced import.
    """

    verdicts: Sequence[Verdict] = ()
    reason: str = ""
    run_id: str = ""
    age_s: float = 0.0
    generation: str = ""
    state_dir: str = "/var/lib/bedplate"
    user: str = ""
    root: str = "/"
    trace_timeout_s: float = TRACE_TIMEOUT_S


def redact(text: str) -> str:
    """Return the text without what looks like a secret: users in URLs, tokens, keys, values of such names."""
    text = _URL.sub(_without_user, text)
    for pattern, replacement in _REDACTIONS:
        text = pattern.sub(replacement, text)
    return text


def _without_user(match: re.Match[str]) -> str:
    """Return a URL from its :// on without the user part (RFC 3986, 3.2.1), also where the password has a slash."""
    url = match.group()[3:]
    authority = re.split(r"[/?#]", url, maxsplit=1)[0]
    before, at, _ = (url if ":" in authority and "@" not in authority else authority).rpartition("@")
    return f"://{REDACTED}@{url[len(before) + 1 :]}" if at and before else match.group()


def redact_value(value: Any, name: str = "") -> Any:
    """Return a JSON value without secrets; of what is called an environment only the allowed variables stay."""
    if isinstance(value, Mapping):
        if name.lower() in _ENVIRONMENT_KEYS:
            value = allowed_variables({str(key): item for key, item in value.items()})
        return {redact(str(key)): redact_value(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_value(item) for item in value]
    if isinstance(value, str):
        return REDACTED if value and _HIDDEN_NAME.search(name) else redact(value)
    return value


def allowed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may be shown, their values without secrets."""
    return {
        name: redact(str(value))
        for name, value in sorted(environment.items())
        if ALLOWED_VARIABLES.fullmatch(name) and not _HIDDEN_NAME.search(name)
    }


def collect(request: Request) -> list[Part]:
    """Return the parts of the archive, the manifest last; never raises for what a node is like.

    The manifest (manifest.json) has schema, run_id, created (UTC), host, and for each part name, bytes, cut
    (bytes that were left out) and note. A part of 0 bytes could not be had; its note says why.
    """
    parts = list(_parts(request))
    manifest = {
        "schema": 1,
        "run_id": request.run_id,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node(),
        "parts": [{"name": p.name, "bytes": len(p.data), "cut": p.cut, "note": p.note} for p in parts],
    }
    return [*parts, Part("manifest.json", _json(manifest))]


def _parts(request: Request) -> Iterator[Part]:
    """Yield the parts; one that cannot be had is an empty one with the reason."""
    sources: list[tuple[str, Callable[[], Part]]] = [
        ("verdicts.json", lambda: verdicts_part(request.verdicts)),
        ("reason.txt", lambda: _text("reason.txt", request.reason or "A verification; no run failed.")),
        ("node.json", lambda: _json_part("node.json", _node(request.root))),
        ("state.json", lambda: _file("state.json", os.path.join(request.state_dir, "state.json"))),
        ("dmesg.txt", lambda: _dmesg(request)),
        ("pci.txt", lambda: _text("pci.txt", pci_tree(request.root))),
        ("nvidia-smi-topo.txt", lambda: _topo(request)),
    ]
    if request.generation:
        place = request.generation
        sources += [
            ("versions.json", lambda: _json_part("versions.json", versions(place))),
            ("requirements.lock", lambda: _file("requirements.lock", os.path.join(place, "requirements.lock"))),
            ("profile.json", lambda: _file("profile.json", os.path.join(place, "profile.json"))),
            ("environment.json", lambda: _json_part("environment.json", _environment(place))),
        ]
    for name, make in sources:
        yield _attempt(name, make)
    yield from _traces(request)


def _attempt(name: str, make: Callable[[], Part]) -> Part:
    """Return the part, or an empty one that says why there is none."""
    try:
        return make()
    except (OSError, ValueError, StateError, ChildError) as error:
        return Part(name, b"", note=redact(f"could not be had: {error}"))


def write_archive(parts: Sequence[Part], directory: str) -> str:
    """Write the parts as a tar.gz into a new private directory; return the file's path.

    directory: where to make that one; empty for the place of temporary files. It gets the mode 0700, the file
    and its members 0600. Raises OSError when the disk is full or *directory* is missing; nothing is left
    behind then.
    """
    place = tempfile.mkdtemp(prefix="bedplate-evidence-", dir=directory or None)
    path = os.path.join(place, "evidence.tar.gz")
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(_archive(parts))
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.rmdir(place)
        raise
    return path


def _archive(parts: Sequence[Part]) -> bytes:
    """Return the bytes of the archive."""
    packed = io.BytesIO()
    now = int(time.time())
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=now) as zipped, tarfile.open(fileobj=zipped, mode="w|") as tar:
        for part in parts:
            member = tarfile.TarInfo(f"evidence/{part.name}")
            member.size, member.mode, member.mtime = len(part.data), 0o600, now
            tar.addfile(member, io.BytesIO(part.data))
    return packed.getvalue()


# ---- making parts -----------------------------------------------------------------------------------------------


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _text(name: str, text: str, *, end: bool = False, limit: str = "") -> Part:
    """Return a part with the text, redacted, and cut to its limit: the beginning stays, or the end."""
    data = redact(text).encode("utf-8", "replace")
    allowed = LIMITS[limit or name]
    cut = len(data) - allowed
    if cut <= 0:
        return Part(name, data)
    kept = data[-allowed:] if end else data[:allowed]
    side = "last" if end else "first"
    return Part(name, kept, cut, f"cut: the {side} {allowed} of {len(data)} bytes")


def _json_part(name: str, value: Any) -> Part:
    """Return a part with a JSON value, redacted."""
    data = _json(redact_value(value))
    if len(data) <= LIMITS[name]:
        return Part(name, data)
    return Part(name, b"", len(data), f"left out: {len(data)} bytes, and {LIMITS[name]} are allowed")


def verdicts_part(verdicts: Sequence[Verdict]) -> Part:
    """Return the verdicts as JSON; when they are too long, first the texts in their evidence are shortened."""
    name = "verdicts.json"
    values = [redact_value(verdict.to_dict()) for verdict in verdicts]
    full = len(_json(values))
    note = ""
    for length in (None, 4000, 400, 0):
        shown = values if length is None else [{**v, "evidence": _short(v["evidence"], length)} for v in values]
        data = _json(shown)
        if len(data) <= LIMITS[name]:
            return Part(name, data, full - len(data), note)
        note = "cut: the longer texts and lists of the evidence were shortened"
    return _text(name, json.dumps([_short(v, 400) for v in values])[: LIMITS[name]])


def _short(value: Any, length: int) -> Any:
    """Return a JSON value whose texts have at most *length* characters and whose lists a tenth as many items."""
    if isinstance(value, dict):
        items = list(value.items())[:length]
        return {key: _short(item, length) for key, item in items}
    if isinstance(value, list):
        return [_short(item, length) for item in value[: length // 10]]
    return value[:length] if isinstance(value, str) else value


def _file(name: str, path: str) -> Part:
    """Return a part with the beginning of a regular file; links are not followed, and nothing else is opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{path} is not a regular file")
        data = file.read(LIMITS[name] * 2)
    part = _text(name, data.decode("utf-8", "replace"))
    lost = max(info.st_size - len(data), 0)
    if not lost:
        return part
    return Part(name, part.data, part.cut + lost, f"cut: the first {len(part.data)} of {info.st_size} bytes")


# ---- what the parts hold ----------------------------------------------------------------------------------------


def _read(path: str) -> str:
    """Return the beginning of a small file of the kernel's, "" when there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65536).strip()
    except OSError:
        return ""


def _node(root: str) -> dict[str, Any]:
    """Return what machine this is: kernel, distribution, command line, memory, Python."""
    os_release = dict(
        line.partition("=")[::2] for line in _read(os.path.join(root, "etc/os-release")).splitlines() if "=" in line
    )
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "distribution": os_release.get("PRETTY_NAME", "").strip('"'),
        "command_line": _read(os.path.join(root, "proc/cmdline")),
        "uptime_s": _uptime(root),
        "memory": _read(os.path.join(root, "proc/meminfo")).splitlines()[:3],
        "driver": _read(os.path.join(root, "proc/driver/nvidia/version")),
        "python": platform.python_version(),
    }


def versions(generation: str) -> dict[str, Any]:
    """Return {"python": pyvenv.cfg's version, "distributions": ["NAME VERSION", ...]} of a generation.

    They are read from the names of the ``.dist-info`` directories (the format of "Recording installed
    projects"), so that a damaged package is listed as well.
    """
    found: list[str] = []
    lib = os.path.join(generation, "venv", "lib")
    for python in sorted(os.listdir(lib)):
        site = os.path.join(lib, python, "site-packages")
        names = sorted(os.listdir(site)) if os.path.isdir(site) else []
        endings = (name[: -len(".dist-info")] for name in names if name.endswith(".dist-info"))
        found += [ending.replace("-", " ", 1) for ending in endings]
    config = dict(
        line.partition(" = ")[::2] for line in _read(os.path.join(generation, "venv", "pyvenv.cfg")).splitlines()
    )
    return {"python": config.get("version_info") or config.get("version", ""), "distributions": found}


def _environment(generation: str) -> dict[str, str]:
    """Return the variables of the generation that may be shown."""
    return allowed_variables(read_environment(Path(generation) / "environment"))


def pci_tree(root: str) -> str:
    """Return the PCI devices as an indented tree, a line each: address, id, class, driver, link now and at most.

    Source: /sys/bus/pci/devices (sysfs-pci, Documentation/PCI/sysfs-pci.rst); the tree is in the real paths.
    """
    base = os.path.join(root, "sys/bus/pci/devices")
    lines = []
    places = sorted((os.path.realpath(os.path.join(base, name)), name) for name in os.listdir(base))
    for place, name in places:
        depth = sum(1 for piece in place.split("/") if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", piece))

        def value(file: str, place: str = place) -> str:
            return _read(os.path.join(place, file))

        driver = os.path.basename(os.path.realpath(os.path.join(place, "driver")))
        link = ""
        if value("max_link_width"):
            now = f"{value('current_link_speed')} x{value('current_link_width')}"
            link = f" link {now} of {value('max_link_speed')} x{value('max_link_width')}"
        identity = f"{value('vendor')[2:]}:{value('device')[2:]}"
        lines.append(
            f"{'  ' * max(depth - 1, 0)}{name} {identity} class {value('class')}"
            f" driver {driver if driver != 'driver' else 'none'} numa {value('numa_node') or '?'}{link}"
        )
    return "\n".join(lines) + "\n"


def _uptime(root: str) -> float:
    return float((_read(os.path.join(root, "proc/uptime")) or "0").split()[0])


def _dmesg(request: Request) -> Part:
    """Return the kernel's log since the run began, and of the time before what is about GPUs and the bus."""
    start_s = _uptime(request.root) - request.age_s - 2.0
    lines = []
    for second, text in kernel_log(os.path.join(request.root, "dev/kmsg")):
        if second >= start_s or _GPU_LINES.search(text):
            lines.append(f"[{second:12.6f}]{' ' if second >= start_s else ' (before the run) '}{text}")
    part = _text("dmesg.txt", "\n".join(lines) + "\n" if lines else "", end=True)
    return part if lines else Part(part.name, b"", note="the kernel logged nothing since the run began")


def kernel_log(path: str) -> Iterator[tuple[float, str]]:
    """Yield (seconds since boot, text) of the records of /dev/kmsg, oldest first.

    Format: Documentation/ABI/testing/dev-kmsg: ``priority,sequence,microseconds,flags;text``, one record for
    each read(2), lines that begin with a blank belong to it. Raises OSError when it may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for _ in range(KMSG_RECORDS):
            try:
                piece = os.read(descriptor, 65536)
            except BrokenPipeError:
                continue  # the kernel overwrote it while this was read: go on with the next one
            except BlockingIOError:
                return
            if not piece:
                return
            for line in piece.decode("utf-8", "replace").splitlines():
                head, semicolon, text = line.partition(";")
                fields = head.split(",")
                if semicolon and len(fields) > 2 and fields[2].isdigit():
                    yield int(fields[2]) / 1e6, text
    finally:
        os.close(descriptor)


def _topo(request: Request) -> Part:
    """Return what ``nvidia-smi topo -m`` prints; it runs in a child that can be given up."""
    name = "nvidia-smi-topo.txt"
    program = os.path.join(request.root, "usr/bin/nvidia-smi")
    if not os.path.exists(program):
        return Part(name, b"", note="there is no nvidia-smi")
    config = {"command": [program, "topo", "-m"], "variables": {}, "words": []}
    outcome = run_probe(evidence_child, config, python=sys.executable, timeout_s=COMMAND_TIMEOUT_S, user=request.user)
    if not isinstance(outcome.result, dict):
        return Part(name, b"", note=f"nvidia-smi {outcome.ending()}")
    return _text(name, str(outcome.result.get("output", "")), end=True)


def _traces(request: Request) -> Iterator[Part]:
    """Yield loader trace and memory map of the first failing imports, each imported once more for that."""
    broken = [v for v in failing(request.verdicts, preexisting=True) if v.code.startswith("import.")]
    python = os.path.join(request.generation, "venv", "bin", "python")
    deadline = time.monotonic() + TRACE_BUDGET * request.trace_timeout_s
    for number, verdict in enumerate(broken[:TRACED_IMPORTS], 1):
        name = f"{number}-{re.sub(r'[^A-Za-z0-9_.-]', '_', verdict.subject)[:80]}.txt"
        trace, maps = f"loader-{name}", f"maps-{name}"
        if not request.generation or not os.path.exists(python):
            yield Part(trace, b"", note=f"not traced: there is no interpreter {python}")
            continue
        left = min(deadline - time.monotonic(), request.trace_timeout_s)
        if left < 1:
            yield Part(trace, b"", note="not traced: the time for traces was over")
            continue
        try:
            found = _trace(request, verdict, python, left)
        except ChildError as error:
            yield Part(trace, b"", note=f"not traced: {error}")
            continue
        note = found.pop("note")
        for part_name, kind in ((trace, "loader"), (maps, "maps")):
            part = _text(part_name, found[kind], end=True, limit=kind)
            yield Part(part.name, part.data, part.cut, "; ".join(filter(None, (part.note, note))))
    others = ", ".join(verdict.subject for verdict in broken[TRACED_IMPORTS:])
    if others:
        yield Part("loader-others.txt", b"", note=f"not traced, since only {TRACED_IMPORTS} are: {others}")


def _trace(request: Request, verdict: Verdict, python: str, timeout_s: float) -> dict[str, str]:
    """Import once more with LD_DEBUG=libs,symbols; return {loader, maps, note}, the trace around the errors."""
    words = ["error:", *(str(verdict.evidence[key]) for key in ("library", "symbol") if verdict.evidence.get(key))]
    outcome = run_probe(
        evidence_child,
        {
            "module": verdict.subject,
            "variables": {"LD_DEBUG": "libs,symbols"},
            "words": [words[0], *(f"find library={os.path.basename(word)}" for word in words[1:])],
        },
        python=python,
        timeout_s=timeout_s,
        environment=read_environment(Path(request.generation) / "environment"),
        user=request.user,
    )
    result = outcome.result if isinstance(outcome.result, dict) else {}
    note = "" if result.get("exit_code") == 0 else f"the importing process {_ending(outcome.ending(), result)}"
    return {"loader": str(result.get("output", "")), "maps": str(result.get("maps", "")), "note": note}


def _ending(ending: str, result: Mapping[str, Any]) -> str:
    """Return how the process inside the probe ended, as far as that is known."""
    code = result.get("exit_code")
    return ending if code is None else f"ended with {code}"
