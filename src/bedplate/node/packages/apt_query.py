"""Ask apt, dpkg and rpm about packages: what is installed, which versions there are, what a transaction would do.

Nothing here changes the node. Commands run with a time limit, without a shell, in the C locale, and take no lock.
Formats: apt-get(8), apt-cache(8), apt_preferences(5), deb-version(7), dpkg(1) of apt 2.6 and dpkg 1.21, as captured
in tests/unit/data/packages. RPM systems: ``installed`` (rpm -q) and ``parse_dnf`` (dnf 4, captured from
Debian's dnf on a repository of our own; not tried on a live host).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..verdicts import Verdict

TIMEOUT_S = 60.0  # of one query; apt-get -s takes 1 s, more on a slow disk with a cold cache
LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock")
UPDATES = "/var/lib/dpkg/updates"  # dpkg(1): numbered files here are changes that were not finished

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
_UPSTREAM = re.compile(r"(?:\d+:)?(.*?)(?:-[^-]*)?\Z", re.DOTALL)
_INST = re.compile(r"Inst (\S+)(?: \[([^\]]*)\])? \((\S+) (.*?) ?\[\S+\]\)")
_REMV = re.compile(r"(?:Remv|Purg) (\S+) \[([^\]]*)\]")
_NOT_FOUND = re.compile(
    r"E: (?:Version '(?P<v>[^']*)' for '(?P<p>[^']*)' was not found|Unable to locate package (?P<u>\S+))"
)
_FLOCK = struct.Struct("hhqqi")


class PackageError(Exception):
    """A question about packages has no answer; ``code`` is that of the verdict it becomes."""

    def __init__(self, code: str, subject: str, message: str, action: str = "", **evidence: Any) -> None:
        """Keep the parts of the verdict; evidence: what was found, JSON types."""
        super().__init__(f"{subject}: {message} {action}".rstrip())
        self.code, self.subject, self.message, self.action, self.evidence = code, subject, message, action, evidence

    def verdict(self, layer: str) -> Verdict:
        """Return the error as a failed verdict of a layer."""
        return Verdict(self.code, "fail", layer, self.subject, self.message, self.evidence, self.action)


@dataclass(frozen=True)
class Candidate:
    """A version that apt could install. site: the address and part of the repository that has it."""

    version: str
    site: str


@dataclass(frozen=True)
class Step:
    """What a transaction does to one package: action is install, upgrade, downgrade, reinstall or remove.

    before, after: exact versions, empty where there is none. origin: what the repository calls itself.
    """

    action: str
    name: str
    before: str
    after: str
    origin: str = ""


@dataclass(frozen=True)
class Record:
    """What the index says of a version: its source package, description, and sizes in bytes (download, installed)."""

    source: str
    summary: str
    download: int
    installed: int


@dataclass(frozen=True)
class Plan:
    """A transaction that was not done.

    steps: what it would do. installed: version of each package it names or that was wanted, as of now.
    records: what the index says of the versions that would come, by name. held: packages on hold.
    essential: packages that the system says it needs. download_bytes: of all files, cached or not; disk_bytes: growth.
    """

    steps: tuple[Step, ...]
    installed: dict[str, str] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    essential: frozenset[str] = frozenset()
    download_bytes: int = 0
    disk_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return what an operator wants to see of it: steps, download_bytes, disk_bytes."""
        return {
            "steps": [asdict(step) for step in self.steps],
            "download_bytes": self.download_bytes,
            "disk_bytes": self.disk_bytes,
        }


# ---- versions ----


def upstream(version: str) -> str:
    """Return the upstream part of a package version: 580.82.07 of 1:580.82.07-0ubuntu1 (deb-version(7))."""
    match = _UPSTREAM.match(version)
    return match.group(1) if match else version


def compare(one: str, other: str) -> int:
    """Return -1, 0 or 1: the first Debian version is older than the other, equal, newer (deb-version(7))."""
    for left, right in zip(_parts(one), _parts(other)):
        order = _compare_part(left, right)
        if order:
            return order
    return 0


def _parts(version: str) -> tuple[str, str, str]:
    """Return epoch, upstream version and revision."""
    epoch, colon, rest = version.partition(":")
    if not colon:
        epoch, rest = "0", version
    before, dash, revision = rest.rpartition("-")
    return (epoch, before, revision) if dash else (epoch, rest, "")


def _compare_part(one: str, other: str) -> int:
    """Compare digits as numbers, and the rest by dpkg's order: a tilde before the end, letters before the others."""

    def weight(character: str) -> int:
        if character == "~":
            return -1
        return ord(character) if character.isalpha() else ord(character) + 256

    pieces = [re.findall(r"([^0-9]*)([0-9]*)", part) for part in (one, other)]
    for index in range(max(len(pieces[0]), len(pieces[1]))):
        (left, left_number), (right, right_number) = (p[index] if index < len(p) else ("", "") for p in pieces)
        # The end of a part weighs 0: more than a tilde, less than anything else.
        texts = [[weight(character) for character in text] + [0] for text in (left, right)]
        if texts[0] != texts[1]:
            return -1 if texts[0] < texts[1] else 1
        numbers = int(left_number or 0), int(right_number or 0)
        if numbers[0] != numbers[1]:
            return -1 if numbers[0] < numbers[1] else 1
    return 0


# ---- commands ----


@dataclass(frozen=True)
class Apt:
    """How apt and dpkg are asked. options: for each apt command, such as ("-o", "Dir::State::lists=/x"); timeout_s."""

    options: tuple[str, ...] = ()
    timeout_s: float = TIMEOUT_S

    def ask(self, *command: str, accept: Sequence[int] = (0,)) -> str:
        """Run a command and return what it printed. Raises PackageError for another exit code, or no answer in time."""
        code, out, error = self.run(*command)
        if code not in accept:
            raise PackageError(
                "packages.query_failed", command[0], f"It ended with exit code {code}: {_last_line(error or out)}",
                "Run it by hand on the node.", command=list(command), output=(out + error)[-2000:],
            )  # fmt: skip
        return out

    def run(self, *command: str) -> tuple[int, str, str]:
        """Run a command; return its exit code, stdout and stderr. Raises PackageError when it does not end."""
        words = [command[0], *(self.options if command[0].startswith("apt") else ()), *command[1:]]
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=_ENVIRONMENT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise PackageError(
                "packages.query_failed", command[0], f"It cannot be run: {error.strerror}.", "Install it on the node."
            ) from error
        try:
            out, error_text = process.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired as expired:
            # The whole session: apt leaves its download methods with our pipe otherwise.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise PackageError(
                "packages.query_failed", command[0], f"It did not end within {self.timeout_s:.0f} s and was killed.",
                "See what the node waits for, such as a network file system.", command=words,
            ) from expired  # fmt: skip
        return process.returncode, out.decode("utf-8", "replace"), error_text.decode("utf-8", "replace")


NODE = Apt()  # as the node is set up


def _last_line(text: str) -> str:
    """Return the last line with something in it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


# ---- what is there ----


def installed(names: Iterable[str], apt: Apt = NODE) -> dict[str, str]:
    """Return the version of each of these packages that is installed and configured; others are left out.

    On a system with dpkg by dpkg-query, else by rpm: then versions read [epoch:]version-release.
    Raises PackageError.
    """
    wanted = sorted(set(names))
    if not wanted:
        return {}
    if is_rpm():
        # rpm -q ends with the number of packages that are not installed.
        form = "%|EPOCH?{%{EPOCH}:}|%{VERSION}-%{RELEASE}\\n"
        _, out, _ = apt.run("rpm", "-q", "--qf", "%{NAME}\\t" + form, *wanted)
        return dict(line.split("\t", 1) for line in out.splitlines() if "\t" in line)
    return {name: fields[0] for name, fields in _dpkg(wanted, apt).items() if fields[1] == "installed"}


def is_rpm() -> bool:
    """Tell whether packages are RPMs here: there is no dpkg database."""
    return not os.path.exists("/var/lib/dpkg/status") and os.path.isdir("/var/lib/rpm")


def _dpkg(names: Iterable[str], apt: Apt) -> dict[str, list[str]]:
    """Return version, status, "yes" for an essential package, and installed size in KiB of packages dpkg knows."""
    form = "${binary:Package}\\t${Version}\\t${db:Status-Status}\\t${Essential}\\t${Installed-Size}\\n"
    # Exit code 1: some of the names are unknown.
    out = apt.ask("dpkg-query", "-W", "-f", form, *sorted(set(names)), accept=(0, 1))
    found = {}
    for line in out.splitlines():
        name, *fields = line.split("\t")
        found[_plain(name)] = fields
    return found


def _plain(name: str) -> str:
    """Return a package name without the architecture that dpkg adds to Multi-Arch: same packages (native ones here)."""
    base, _, architecture = name.partition(":")
    return base if architecture in ("", native(), "all") else name


def native() -> str:
    """Return Debian's name of this machine's architecture, as far as GPUs are concerned."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


def interrupted(apt: Apt = NODE, updates: str = UPDATES) -> list[str]:
    """Return what dpkg has not finished: pending updates, packages half installed. Raises PackageError."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        found += [f"{updates}/{name}" for name in sorted(os.listdir(updates)) if name.isdigit()]
    return found + parse_audit(apt.ask("dpkg", "--audit", accept=(0, 1)))


def parse_audit(output: str) -> list[str]:
    """Return the packages that ``dpkg --audit`` names: lines of one blank, a name, and its description."""
    return [line.split()[0] for line in output.splitlines() if re.match(r" \S", line)]


def lock_holder(paths: Sequence[str] = LOCKS) -> dict[str, Any] | None:
    """Return who holds a lock of dpkg, as {"path", "pid", "command"}, or None. The lock is only looked at (F_GETLK)."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        finally:
            os.close(descriptor)
        if kind != fcntl.F_UNLCK:
            return {"path": path, "pid": pid, "command": _command(pid)}
    return None


def _command(pid: int) -> str:
    """Return the name of a process, or an empty text when it is gone."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


# ---- which versions there are ----


def candidates(name: str, apt: Apt = NODE) -> list[Candidate]:
    """Return the versions of a package that apt knows from its repositories, newest first. Raises PackageError."""
    return all_candidates([name], apt)[name]


def all_candidates(names: Collection[str], apt: Apt) -> dict[str, list[Candidate]]:
    """Return the ``candidates`` of several packages, asked at once. Raises PackageError."""
    found: dict[str, list[Candidate]] = {name: [] for name in names}
    if names:
        for name, candidate in parse_madison(apt.ask("apt-cache", "madison", *sorted(names))):
            found.setdefault(name, []).append(candidate)
    return found


def parse_madison(output: str) -> list[tuple[str, Candidate]]:
    """Return name and version of each line of ``apt-cache madison``: ``name | version | site suite Packages``."""
    found = []
    for line in output.splitlines():
        fields = [part.strip() for part in line.split("|")]
        if len(fields) == 3 and fields[2].endswith("Packages"):
            found.append((fields[0], Candidate(fields[1], fields[2][: -len("Packages")].strip())))
    return found


def resolve(name: str, version: str, *, site: str = "", apt: Apt = NODE) -> str:
    """Return the one exact version of a package whose whole or upstream version is the given one.

    version: such as 580.82.07-0ubuntu1, or 580.82.07. site: a part of the repository's address that must match;
    distributions carry packages of NVIDIA's names, at the same upstream version.

    Raises PackageError ``packages.not_available`` when there is none or more than one; it lists what there is.
    """
    return choose(name, version, candidates(name, apt), site)


def choose(name: str, version: str, known: Sequence[Candidate], site: str = "") -> str:
    """Do what ``resolve`` does, with the versions that apt knows given."""
    fitting = {c.version for c in known if site in c.site and version in (c.version, upstream(c.version))}
    if version in fitting:
        return version
    if len(fitting) == 1:
        return fitting.pop()
    listed = [f"{c.version} ({c.site})" for c in known]
    where = f" at {site}" if site else ""
    if fitting:
        message = f"There are several packages of version {version}{where}: {', '.join(sorted(fitting))}."
        action = "Name the exact version, with its revision."
    elif known:
        message = f"There is no version {version}{where}. There are: {listing(listed)}."
        action = "Ask for one of these, or add the repository that has it."
    else:
        message = "No repository of the node has it."
        action = "Add the repository that has it, or refresh the package lists."
    raise PackageError("packages.not_available", name, message, action, wanted=version, available=listed)


def resolve_all(
    named: Mapping[str, str], there: Mapping[str, str], *, site: str = "", apt: Apt = NODE
) -> tuple[dict[str, str], list[PackageError]]:
    """Return the exact version of each named package, and the errors of those that have none. Raises PackageError.

    there: the versions that are installed. One of them is good enough when no repository has it any more.
    On RPM systems versions are whole ones, and taken as they are.
    """
    if is_rpm():
        return dict(named), []
    open_names = [name for name, version in named.items() if there.get(name) != version]
    known = all_candidates(open_names, apt)
    exact = {name: version for name, version in named.items() if name not in known}
    errors: list[PackageError] = []
    for name in open_names:
        try:
            exact[name] = choose(name, named[name], known[name], site)
        except PackageError as error:  # noqa: PERF203  # each name has an answer of its own
            if name in there and upstream(there[name]) == named[name]:
                exact[name] = there[name]
            else:
                errors.append(error)
    return exact, errors


@dataclass(frozen=True)
class Policy:
    """What apt would choose. candidate: the version, or empty. priorities: pin priority of each known version."""

    installed: str
    candidate: str
    priorities: dict[str, int]


def parse_policy(output: str) -> dict[str, Policy]:
    """Return what ``apt-cache policy NAME...`` says of each package (apt 2.6)."""
    found = {}
    for name, text in re.findall(r"^(\S+):\n((?: .*\n?)*)", output, re.MULTILINE):
        values = {
            key: "" if value == "(none)" else value for key, value in re.findall(r"^  (\w+): (.*)", text, re.MULTILINE)
        }
        table = re.findall(r"^ (?:\*\*\*|   ) (\S+) (-?\d+)$", text, re.MULTILINE)
        priorities = {version: int(priority) for version, priority in table}
        found[_plain(name)] = Policy(values.get("Installed", ""), values.get("Candidate", ""), priorities)
    return found


# ---- what would happen ----


def simulate(wanted: Mapping[str, str], *, allow_downgrade: bool = False, apt: Apt = NODE) -> Plan:
    """Ask apt, or dnf, what installing exactly these versions would do. Nothing changes and no lock is taken.

    Raises PackageError: ``packages.not_available`` for a name or version that no repository has, ``packages.conflict``
    when there is no way to install them together.
    """
    if is_rpm():
        return _simulate_dnf(wanted, apt)
    allowed = ("--allow-downgrades",) if allow_downgrade else ()
    code, out, error = apt.run(
        "apt-get", "-s", "-q", "-o", "Debug::NoLocking=true", "-o", "APT::Get::Show-User-Simulation-Note=false",
        "--no-install-recommends", *allowed, "install", *(f"{n}={v}" for n, v in sorted(wanted.items())),
    )  # fmt: skip
    if code:
        raise refusal(out + error)
    steps = parse_simulation(out)
    names = {*wanted, *(step.name for step in steps)}
    known = _dpkg(names, apt) if names else {}
    coming = {step.name: step.after for step in steps if step.after}
    records = parse_show(
        apt.ask("apt-cache", "show", *(f"{n}={v}" for n, v in sorted(coming.items()))) if coming else "", coming
    )
    before = sum(int(known[step.name][3] or 0) * 1024 for step in steps if step.before and step.name in known)
    return Plan(
        steps=steps,
        installed={name: fields[0] for name, fields in known.items() if fields[1] == "installed"},
        records=records,
        held=frozenset(_plain(name) for name in apt.ask("apt-mark", "showhold").split()),
        essential=frozenset(name for name, fields in known.items() if fields[2] == "yes"),
        download_bytes=sum(record.download for record in records.values()),
        disk_bytes=sum(record.installed for record in records.values()) - before,
    )


def _simulate_dnf(wanted: Mapping[str, str], apt: Apt) -> Plan:
    """Do what ``simulate`` does with dnf 4; without sizes, holds and essential packages. Not tried on a RHEL host."""
    names = [f"{name}-{version}" for name, version in sorted(wanted.items())]
    code, out, error = apt.run("dnf", "--assumeno", "install", *names)
    steps = parse_dnf(out)
    if not steps and (code or "Nothing to do." not in out):
        missing = re.findall(r"No match for argument: (\S+)", out + error)
        if missing:
            said, action = f"No repository of the node has: {listing(missing)}.", "Add the repository that has it."
            raise PackageError("packages.not_available", missing[0], said, action)
        said = f"dnf finds no way to install exactly these versions: {_last_line(error or out)}"
        raise PackageError("packages.conflict", "dnf", said, "Run it by hand.", output=(out + error)[-2000:])
    there = installed({*wanted, *(step.name for step in steps)}, apt)
    steps = tuple(step if step.before else replace(step, before=there.get(step.name, "")) for step in steps)
    return Plan(steps=steps, installed=there)


def parse_simulation(output: str) -> tuple[Step, ...]:
    """Return the steps in the output of ``apt-get -s``: the lines Inst and Remv; Conf repeats them."""
    steps = []
    for line in output.splitlines():
        match = _INST.match(line)
        if match:
            name, before, after, origin = match.groups()
            steps.append(Step(_kind(before, after), _plain(name), before or "", after, origin.strip()))
            continue
        match = _REMV.match(line)
        if match:
            steps.append(Step("remove", _plain(match.group(1)), match.group(2), ""))
    return tuple(steps)


def _kind(before: str | None, after: str) -> str:
    """Return the action that leads from one version to another."""
    if not before:
        return "install"
    return {-1: "upgrade", 0: "reinstall", 1: "downgrade"}[compare(before, after)]


def parse_show(output: str, versions: Mapping[str, str]) -> dict[str, Record]:
    """Return the records of the given versions from the output of ``apt-cache show``, by package name."""
    found: dict[str, Record] = {}
    for stanza in output.split("\n\n"):
        fields: dict[str, str] = dict(re.findall(r"^([A-Za-z0-9-]+): ?(.*)$", stanza, re.MULTILINE))
        name = fields.get("Package", "")
        if fields.get("Version") == versions.get(name) and name and "Size" in fields:
            summary = fields.get("Description-en") or fields.get("Description", "")
            source = (fields.get("Source") or name).split(" ")[0]
            size = int(fields.get("Installed-Size", "0")) * 1024
            found.setdefault(name, Record(source, summary, int(fields["Size"]), size))
    return found


def refusal(output: str) -> PackageError:
    """Return why ``apt-get -s install`` ended in an error, from what it printed."""
    missing = {}
    for match in _NOT_FOUND.finditer(output):
        found = match.groupdict("")
        missing[found["p"] or found["u"]] = found["v"]
    if missing:
        listed = ", ".join(f"{name} {version}".strip() for name, version in missing.items())
        return PackageError(
            "packages.not_available", next(iter(missing)), f"No repository of the node has: {listed}.",
            "Add the repository that has it, refresh the package lists, or correct the version.", missing=missing,
        )  # fmt: skip
    unmet = output.partition("The following packages have unmet dependencies:\n")[2]
    lines = [line.strip() for line in unmet.splitlines() if line.startswith(" ")]
    said = "; ".join(lines[:3]) if lines else _last_line(output)
    return PackageError(
        "packages.conflict", lines[0].split(" ")[0] if lines else "apt-get",
        f"apt finds no way to install exactly these versions: {said}.",
        "Name every package of the set with its version, and pin them.", output=output[-2000:],
    )  # fmt: skip


def parse_dnf(output: str) -> tuple[Step, ...]:
    """Return the steps in the table that ``dnf --assumeno`` prints (dnf 4; not tried on a RHEL host).

    Versions are [epoch:]version-release; the older version of an upgrade or downgrade is not in the table.
    """
    steps = []
    section = ""
    headings = {
        "Installing": "install", "Upgrading": "upgrade", "Downgrading": "downgrade", "Reinstalling": "reinstall",
        "Removing": "remove",
    }  # fmt: skip
    for line in output.splitlines():
        words = line.split()
        heading = re.match(r"(\w+)(?: (?:weak |unused )?(?:dependencies|dependent packages))?:\s*\Z", line)
        if heading:
            section = headings.get(heading.group(1), "")
        elif not line.startswith(" "):
            section = ""
        elif section and words[0] == "replacing" and len(words) > 2:
            steps.append(Step("remove", words[1].rpartition(".")[0], words[2], ""))
        elif section and len(words) > 3:
            name, _, version, repository = words[:4]
            before, after = (version, "") if section == "remove" else ("", version)
            steps.append(Step(section, name, before, after, repository))
    return tuple(steps)


def listing(names: Sequence[str], most: int = 6) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
