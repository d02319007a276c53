"""What modprobe is told about modules, and the values that the loaded ones have.

Files and their order: modprobe.d(5). Of files with the same name in several directories only the first counts, and
the files are read in the order of their names. The kernel takes the last value of a parameter; those on its own
command line come after those of the files.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from .sysroot import Sysroot

DIRECTORIES = (
    "/etc/modprobe.d",
    "/run/modprobe.d",
    "/usr/local/lib/modprobe.d",
    "/usr/lib/modprobe.d",
    "/lib/modprobe.d",
)

LINE_LIMIT = 8192  # characters

# Debian's packages name the files of the modules so, and their aliases lead from the plain names.
_DEBIAN_NAME = re.compile(r"nvidia_(?:current|tesla|legacy)(?:_\d+xx|_\d+)?(?:_open)?((?:_\w+)?)\Z")
_TRUE, _FALSE = ("1", "y", "yes", "on", "true"), ("0", "n", "no", "off", "false")


def canonical(module: str) -> str:
    """Return the name of a module as the kernel has it: underscores, and without Debian's variant."""
    name = module.strip().replace("-", "_")
    match = _DEBIAN_NAME.match(name)
    return f"nvidia{match.group(1)}" if match else name


def same_value(first: str | None, second: str | None) -> bool:
    """Tell whether two texts are the same value of a parameter: sysfs shows Y where 1 was given."""
    if first is None or second is None:
        return first is second
    one, two = first.strip().strip('"').lower(), second.strip().strip('"').lower()
    return one == two or any(one in words and two in words for words in (_TRUE, _FALSE))


def options(text: str) -> dict[str, dict[str, str]]:
    """Return the parameters that the text of one file sets: module -> parameter -> value."""
    parameters: dict[str, dict[str, dict[str, str]]] = {}
    for words in _commands(text):
        _apply(words, "", parameters, {})
    return {module: {name: item["value"] for name, item in values.items()} for module, values in parameters.items()}


def inspect(root: Sysroot) -> dict[str, Any]:
    """Return what modprobe is told; judges nothing.

    Keys: parameters (module -> parameter -> {value, file}), blacklisted (module -> file), newest (seconds since the
    epoch, of the newest file that says anything about nvidia or nouveau; None when none does).
    """
    parameters: dict[str, dict[str, dict[str, str]]] = {}
    blacklisted: dict[str, str] = {}
    newest: float | None = None
    for path in _files(root):
        text = root.text(path) or ""
        if re.search(r"nvidia|nouveau", text):
            newest = max(newest or 0.0, root.mtime(path) or 0.0)
        for words in _commands(text):
            _apply(words, path, parameters, blacklisted)
    _command_line(root.text("/proc/cmdline") or "", parameters, blacklisted)
    return {"parameters": parameters, "blacklisted": blacklisted, "newest": newest}


def _files(root: Sysroot) -> list[str]:
    """Return the files that modprobe reads, in its order."""
    found: dict[str, str] = {}
    for directory in DIRECTORIES:
        for name in root.names(directory):
            if name.endswith(".conf"):
                found.setdefault(name, f"{directory}/{name}")
    return [found[name] for name in sorted(found)]


def _commands(text: str) -> list[list[str]]:
    """Return the words of each command; a backslash at the end of a line continues it."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.split(None, 2) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _apply(
    words: list[str], path: str, parameters: dict[str, dict[str, dict[str, str]]], blacklisted: dict[str, str]
) -> None:
    """Note what one command says."""
    if len(words) < 2:
        return
    command, module = words[0], canonical(words[1])
    rest = words[2] if len(words) > 2 else ""
    if command == "blacklist" or (command == "install" and re.match(r"(/usr)?(/s?bin/)?(false|true)\b", rest)):
        blacklisted.setdefault(module, path)
    elif command == "options":
        for name, value in _assignments(rest):
            parameters.setdefault(module, {})[name] = {"value": value, "file": path}


def _assignments(text: str) -> list[tuple[str, str]]:
    """Return name and value of each "name=value"; a bare name is a boolean, true (the kernel's parse_args)."""
    try:
        # What is longer than any kernel command line is taken without quotes: shlex takes a square of the length.
        words = shlex.split(text, comments=True) if len(text) <= LINE_LIMIT else text.split()
    except ValueError:  # an unclosed quote
        words = text.split()
    pairs = [word.partition("=") for word in words]
    return [(name.replace("-", "_"), value if separator else "1") for name, separator, value in pairs if name]


def _command_line(text: str, parameters: dict[str, dict[str, dict[str, str]]], blacklisted: dict[str, str]) -> None:
    """Note what the kernel's command line says about modules."""
    for name, value in _assignments(text):
        if name in ("modprobe.blacklist", "module_blacklist", "rd.driver.blacklist"):
            for module in value.split(","):
                blacklisted.setdefault(canonical(module), "/proc/cmdline")
        elif "." in name:
            module, _, parameter = name.partition(".")
            if canonical(module).startswith(("nvidia", "nouveau")):
                parameters.setdefault(canonical(module), {})[parameter] = {"value": value, "file": "/proc/cmdline"}


def live_parameters(root: Sysroot) -> dict[str, dict[str, str]]:
    """Return the parameters of the loaded NVIDIA modules, module -> parameter -> value, as far as the kernel shows it.

    Those of nvidia itself are not in sysfs but in /proc/driver/nvidia/params, without their prefix NVreg_.
    """
    found: dict[str, dict[str, str]] = {}
    for module in root.names("/sys/module"):
        if module.startswith("nvidia"):
            directory = f"/sys/module/{module}/parameters"
            values = {name: root.line(f"{directory}/{name}") for name in root.names(directory)}
            found[canonical(module)] = {name: value for name, value in values.items() if value is not None}
    if "nvidia" in found:
        for line in (root.text("/proc/driver/nvidia/params") or "").splitlines():
            name, separator, value = line.partition(":")
            if separator:
                found["nvidia"].setdefault(f"NVreg_{name.strip()}", value.strip())
    return found
