"""What dpkg and apt have on record about the NVIDIA driver: installed packages, the last change, automatic upgrades.

Read from their files, so that it works under a root directory and while another apt runs. Formats: dpkg's status
file (deb-control(5), dpkg(1) for the states), apt's history log, apt.conf(5).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from .sysroot import Sysroot

STATUS_LIMIT = 64 << 20  # bytes; a desktop's status file has about 10 MiB
HISTORY_LIMIT = 16 << 20
MAX_SCOPES = 64  # nested braces in apt.conf; nobody writes more than three

# Every package of the driver, by name: what automatic upgrades must leave alone. Not those of containers, of the
# toolkit, of X configuration tools.
_DRIVER_PACKAGE = re.compile(
    r"(lib)?(nvidia|xserver-xorg-video-nvidia|firmware-nvidia|linux-modules-nvidia|cuda-drivers|cuda1|nvcuvid1|nvoptix1|"
    r"cudadebugger1|kmod-nvidia)"
)
_NOT_DRIVER = re.compile(r".*(container|docker|cuda-(toolkit|dev|doc|gdb)|fabricmanager|-vaapi|nvidia-ml-py)")

# Those whose upstream version is the driver's own. Others, such as nvidia-settings or nvidia-persistenced, may lag.
_CORE_PACKAGE = re.compile(
    r"(libnvidia-(compute(-\d+(-server)?)?|ml1?|cfg1(-\d+)?|cuda-libs|driver-cuda)|libcuda1|nvidia-(smi|utils(-\d+)?(-server)?|"
    r"dkms-\d+(-server)?(-open)?|dkms-open|open-kernel-dkms|kernel-open-dkms|kernel-dkms|kernel-source(-\d+)?(-server)?(-open)?|"
    r"kernel-common(-\d+)?(-server)?|driver-cuda))\Z"
)
_DRIVER_VERSION = re.compile(r"\d{3,}\.\d+(\.\d+)?\Z")


def is_driver_package(name: str) -> bool:
    """Tell whether a package belongs to the NVIDIA driver, by its name."""
    return bool(_DRIVER_PACKAGE.match(name)) and not _NOT_DRIVER.match(name)


def upstream(version: str) -> str:
    """Return the upstream part of a package's version: without epoch and revision (deb-version(7))."""
    return version.split(":", 1)[-1].rsplit("-", 1)[0]


def packages(root: Sysroot) -> list[dict[str, Any]]:
    """Return the packages of the driver that dpkg knows, as {name, version, upstream, state, hold, core}.

    state: dpkg's word, such as "installed", "unpacked", "half-configured". core: its upstream version is the
    driver's.
    """
    found: list[dict[str, Any]] = []
    for fields in _stanzas(root.text("/var/lib/dpkg/status", STATUS_LIMIT) or ""):
        name, version = fields.get("Package", ""), fields.get("Version", "")
        words = fields.get("Status", "").split()
        if not is_driver_package(name) or len(words) != 3 or words[2] in ("not-installed", "config-files"):
            continue
        core = bool(_CORE_PACKAGE.match(name) and _DRIVER_VERSION.match(upstream(version)))
        found.append(
            {
                "name": name,
                "version": version,
                "upstream": upstream(version),
                "state": words[2],
                "hold": words[0] == "hold",
                "core": core,
            }
        )
    return found


def interrupted(root: Sysroot) -> bool:
    """Tell whether dpkg was interrupted: its journal still has entries (dpkg(1), /var/lib/dpkg/updates)."""
    return any(name.isdigit() for name in root.names("/var/lib/dpkg/updates"))


def _stanzas(text: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each stanza, first lines only."""
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        for line in stanza.splitlines():
            name, separator, value = line.partition(":")
            if separator and not line[:1].isspace():
                fields[name] = value.strip()
        if fields:
            yield fields


def last_change(root: Sysroot) -> dict[str, Any] | None:
    """Return apt's last change of driver packages, None when its log has none.

    Keys: date (as logged, local time), epoch (seconds, or None), command, packages ("name old -> new"), automatic
    (unattended-upgrades did it), since_boot (whether it was after the kernel started, None when that is unknown).
    """
    found: dict[str, Any] | None = None
    for fields in _stanzas(root.text("/var/log/apt/history.log", HISTORY_LIMIT) or ""):
        changed = [
            f"{name} {versions.replace(', automatic', '').replace(', ', ' -> ')}"
            for action in ("Install", "Upgrade", "Downgrade", "Remove", "Purge", "Reinstall")
            for name, versions in _changed(fields.get(action, ""))
            if is_driver_package(name)
        ]
        if changed:
            command = fields.get("Commandline", "")
            found = {
                "date": fields.get("Start-Date", ""),
                "epoch": _epoch(fields.get("Start-Date", "")),
                "command": command,
                "packages": changed,
                "automatic": "unattended-upgrade" in command,
            }
    if found:
        boot = boot_time(root)
        known = boot is not None and found["epoch"] is not None
        found["since_boot"] = found["epoch"] > boot if known else None
    return found


def _changed(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and versions of each package in "name:arch (old, new), name:arch (new)"."""
    for part in text.split("), "):
        name, separator, versions = part.partition(" (")
        if separator:
            yield name.split(":")[0], versions.rstrip(")")


def _epoch(date: str) -> float | None:
    """Return a date of the history log in seconds since the epoch, None when it is none."""
    try:
        return time.mktime(time.strptime(" ".join(date.split()), "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def boot_time(root: Sysroot) -> float | None:
    """Return when the kernel started, in seconds since the epoch (proc(5), /proc/stat, btime); None if unknown."""
    match = re.search(r"^btime (\d{1,12})$", root.text("/proc/stat") or "", re.MULTILINE)
    return float(match.group(1)) if match else None


def apt_settings(root: Sysroot) -> dict[str, list[str]]:
    """Return apt's settings from its files, each as the list of its values, keys as "A::B" in lower case."""
    paths = [f"/etc/apt/apt.conf.d/{name}" for name in root.names("/etc/apt/apt.conf.d")]
    # apt ignores a name with a foreign extension or odd characters (apt.conf(5)).
    paths = [path for path in paths if re.fullmatch(r"[\w-]+(\.conf)?", path.rsplit("/", 1)[1])]
    settings: dict[str, list[str]] = {}
    for path in [*paths, "/etc/apt/apt.conf"]:
        _parse_settings(root.text(path) or "", settings)
    return settings


def _without_comments(text: str) -> str:
    """Return a text without what stands between /* and */; one that does not end takes the rest with it."""
    kept: list[str] = []
    at = 0
    while True:
        start = text.find("/*", at)
        end = text.find("*/", start + 2) if start >= 0 else -1
        kept.append(text[at : start if start >= 0 else len(text)])
        if end < 0:
            return " ".join(kept)
        at = end + 2


def _parse_settings(text: str, settings: dict[str, list[str]]) -> None:
    """Add the settings of one file: `A::B "x";`, `A { B "x"; };`, `A:: "x";`, `A { "x"; };`, `#clear A;`."""
    text = _without_comments(text)
    tokens: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#clear"):
            tokens += ["#clear", *line.split()[1:2], ";"]
        elif not line.lstrip().startswith("#"):
            tokens += re.findall(r'//.*|"[^"]*"|[{};]|[^\s{};"]+', line)
    scopes: list[str] = []
    name = ""
    values: list[str] = []
    for word in tokens:
        if word.startswith("//"):
            continue
        if len(scopes) > MAX_SCOPES:
            return
        if word == "{":
            scopes.append(name)
            name, values = "", []
        elif word in (";", "}"):
            _set("::".join([*scopes, name]), name, values, settings)
            if word == "}" and scopes:
                scopes.pop()
            name, values = "", []
        elif word.startswith('"') or name:
            values.append(word.strip('"'))
        else:
            name = word


def _set(key: str, name: str, values: list[str], settings: dict[str, list[str]]) -> None:
    """Apply one setting: a list grows by a nameless value or a name that ends in "::", anything else is replaced."""
    if name == "#clear":
        prefix = values[0].strip(":;").lower() if values else ""
        for known in [known for known in settings if known == prefix or known.startswith(f"{prefix}::")]:
            del settings[known]
    elif values:
        plain = key.rstrip(":").lower()
        if not name or key.endswith("::"):
            settings.setdefault(plain, []).extend(values)
        else:
            settings[plain] = values[-1:]


def automatic_upgrades(root: Sysroot, names: Iterable[str]) -> dict[str, Any]:
    """Return what unattended-upgrades may do to packages; judges nothing.

    names: the packages that must be left alone.

    Keys: enabled (apt's timer runs it), blacklist (its patterns), exposed (the names that no pattern matches).
    A pattern is a regular expression for the beginning of a name (unattended-upgrades, Package-Blacklist); one that
    is too involved to be matched safely counts as matching nothing.
    """
    settings = apt_settings(root)
    value = (settings.get("apt::periodic::unattended-upgrade") or ["0"])[-1]
    installed = root.exists("/usr/bin/unattended-upgrade")
    blacklist = settings.get("unattended-upgrade::package-blacklist", [])
    patterns = [pattern for pattern in map(_compile, blacklist) if pattern]
    exposed = [name for name in sorted(set(names)) if not any(pattern.match(name) for pattern in patterns)]
    return {"enabled": installed and value not in ("0", ""), "blacklist": blacklist, "exposed": exposed}


def _compile(pattern: str) -> re.Pattern[str] | None:
    """Return a pattern that is safe to match, None for another one: nested repetition can take for ever."""
    if len(pattern) > 200 or re.search(r"\)[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 4:
        return None
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None
