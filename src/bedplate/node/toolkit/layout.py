"""A CUDA toolkit on disk: from NVIDIA's wheels to the tree that nvcc, CMake and torch expect, and the links to it.

A toolkit from wheels lies in ``<root>/toolkits/<id>`` and is never changed after it got that name. What a program sees
is ``/usr/local/cuda-13.0``, a link to it, and ``/usr/local/cuda``, a link to that. Both move by one rename(2), so an
older toolkit stays whole beside and going back is one rename as well.

The tree is that of NVIDIA's own packages (CUDA Installation Guide for Linux; CMake's FindCUDAToolkit and
torch.utils.cpp_extension look for the same names): files in ``targets/x86_64-linux/{include,lib}``, with the links
``include`` and ``lib64``, and ``bin`` and ``nvvm`` beside. Wheels bring libraries under their soname only; the linker
wants the name without a number, so those links are made here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..child import read_environment
from ..state.durable import StateError, discard_tree, is_real_dir, make_dir, switch_link, sync_filesystem, write_atomic
from .releases import COMPONENTS, expected_components, packages, short, version_json_key
from .wheels import components_of, select

TARGET = "targets/x86_64-linux"
MANIFEST = "bedplate-manifest.json"
VERSION_FILE = "version.json"
BUILD = ".build"
ALTERNATIVES_LIMIT_S = 60

# Where the parts of a wheel go.
_PLACES = {"bin": "bin", "include": f"{TARGET}/include", "lib": f"{TARGET}/lib", "nvvm": "nvvm", "share": "share"}
# Wheels of CUDA 12 whose headers NVIDIA's packages keep apart, because other parts bring the same names.
_APART = {
    "cuda_cupti": {"include": "extras/CUPTI/include"},
    "cuda_sanitizer_api": {"include": "compute-sanitizer/include", "lib": "compute-sanitizer"},
}
_SONAME = re.compile(r"(?P<name>lib.+?\.so)\.[0-9][0-9.]*")


class Alternatives(NamedTuple):
    """The tool that manages /usr/local/cuda where NVIDIA's packages made it, and its directory of links."""

    command: Sequence[str] = ("update-alternatives",)
    directory: str = "/etc/alternatives"


class Places(NamedTuple):
    """Where toolkits are: ``root`` holds the directory of those from wheels, ``prefix`` the links to them."""

    root: str
    prefix: str

    @property
    def toolkits(self) -> str:
        """The directory of the toolkits from wheels."""
        return os.path.join(self.root, "toolkits")

    def path(self, version: str) -> str:
        """Return the path of a version, such as /usr/local/cuda-13.0."""
        return os.path.join(self.prefix, f"cuda-{short(version)}")

    @property
    def default(self) -> str:
        """The path of the default toolkit."""
        return os.path.join(self.prefix, "cuda")


# ---- from wheels to a tree ----------------------------------------------------------------------------------------


def lay_out(site: str, destination: str, version: str) -> dict[str, Any]:
    """Move the files of NVIDIA's wheels from a directory of packages to the tree of a toolkit.

    site: where uv unpacked the wheels; its files are moved away. destination: the tree to make; it must not exist.
    version: the release, such as "13.0.1".

    Returns components ({name: version}), files (count), bytes. Raises StateError: two wheels bring different files
    of one name, a wheel brings what has no place, the disk is full.
    """
    if os.path.lexists(destination):
        raise StateError("invalid", f"{destination} exists; a toolkit is laid out once, in a directory of its own.")
    try:
        for top in _tops(site):
            _take(top, destination)
        wheels = _take_metadata(site, destination)
        _link_names(destination)
        components = _components(wheels)
        _write_version(destination, version, components, wheels)
        manifest = _measure(destination)
        write_atomic(os.path.join(destination, MANIFEST), json.dumps({"files": manifest}, sort_keys=True))
        sync_filesystem(destination)
    except OSError as error:
        raise StateError("io", f"cannot lay out {destination}: {error.strerror or error}: {error.filename}") from error
    sizes = [entry for entry in manifest.values() if isinstance(entry, int)]
    return {"components": components, "files": len(manifest), "bytes": sum(sizes)}


def _tops(site: str) -> list[str]:
    """Return the directories that hold bin, include, lib: one for all since CUDA 13, before that one for each wheel."""
    nvidia = os.path.join(site, "nvidia")
    tops = sorted(
        entry.path
        for entry in os.scandir(nvidia)
        if entry.is_dir(follow_symlinks=False) and any(os.path.isdir(os.path.join(entry.path, p)) for p in _PLACES)
    )
    if not tops:
        raise StateError(
            "invalid", f"{nvidia} holds no part of a CUDA toolkit; the wheels are none of NVIDIA's toolkit."
        )
    return tops


def _take(top: str, destination: str) -> None:
    """Move the files below one top directory to their places."""
    places = {**_PLACES, **_APART.get(os.path.basename(top), {})}
    for name in sorted(os.listdir(top)):
        source = os.path.join(top, name)
        if not os.path.isdir(source):
            if name != "__init__.py":
                raise StateError("invalid", f"{source} has no place in a CUDA toolkit; this wheel is not understood.")
            continue
        if name.startswith(".") or name == "__pycache__":  # notes of NVIDIA's build, bytecode
            continue
        if name not in places:
            raise StateError("invalid", f"{source} has no place in a CUDA toolkit; this wheel is not understood.")
        _merge(source, os.path.join(destination, places[name]))


def _merge(source: str, destination: str) -> None:
    """Move a tree into another; a file that is there already must be the same."""
    make_dir(destination)
    for entry in sorted(os.scandir(source), key=lambda found: found.name):
        target = os.path.join(destination, entry.name)
        if entry.is_dir(follow_symlinks=False):
            if entry.name != "__pycache__":
                _merge(entry.path, target)
        elif entry.name == "__init__.py":  # what makes a Python package of a directory
            continue
        elif not os.path.lexists(target):
            os.rename(entry.path, target)
        elif not _same(entry.path, target):
            raise StateError("invalid", f"two wheels bring different files {entry.name} ({entry.path} and {target}).")


def _same(one: str, other: str) -> bool:
    """Tell whether two regular files have the same content."""
    if os.path.getsize(one) != os.path.getsize(other):
        return False
    with open(one, "rb") as left, open(other, "rb") as right:
        while True:
            chunk = left.read(1 << 20)
            if chunk != right.read(1 << 20):
                return False
            if not chunk:
                return True


def _take_metadata(site: str, destination: str) -> dict[str, str]:
    """Move the wheels' metadata, licences among them, beside the tree; return {wheel: version}."""
    wheels: dict[str, str] = {}
    kept = os.path.join(destination, "share", "bedplate")
    for name in sorted(os.listdir(site)):
        if name.endswith(".dist-info"):
            wheel, _, version = name[: -len(".dist-info")].rpartition("-")
            wheels[wheel] = version
            make_dir(kept)
            os.rename(os.path.join(site, name), os.path.join(kept, name))
    return wheels


def _link_names(destination: str) -> None:
    """Make the links that compilers and linkers look for."""
    libraries = os.path.join(destination, TARGET, "lib")
    make_dir(libraries)
    make_dir(os.path.join(destination, TARGET, "include"))
    for name in sorted(os.listdir(libraries)):
        matched = _SONAME.fullmatch(name)
        if matched and not os.path.lexists(os.path.join(libraries, matched["name"])):
            os.symlink(name, os.path.join(libraries, matched["name"]))
    for link, target in (("include", f"{TARGET}/include"), ("lib64", f"{TARGET}/lib")):
        os.symlink(target, os.path.join(destination, link))
    # Since 13.0 libnvvm lies among the libraries; programs that use it look in nvvm/lib64 and nvvm/include.
    nvvm = os.path.join(destination, "nvvm")
    for name in sorted(os.listdir(libraries)):
        if name.startswith("libnvvm.so"):
            make_dir(os.path.join(nvvm, "lib64"))
            with contextlib.suppress(FileExistsError):
                os.symlink(f"../../{TARGET}/lib/{name}", os.path.join(nvvm, "lib64", name))
    if os.path.isfile(os.path.join(destination, TARGET, "include", "nvvm.h")):
        make_dir(os.path.join(nvvm, "include"))
        os.symlink(f"../../{TARGET}/include/nvvm.h", os.path.join(nvvm, "include", "nvvm.h"))


def _components(wheels: Mapping[str, str]) -> dict[str, str]:
    """Return {component: version} of the wheels. The one that lists the others, cuda_toolkit, is none."""
    return {component: version for wheel, version in wheels.items() for component in components_of(wheel)}


def _write_version(destination: str, version: str, components: Mapping[str, str], wheels: Mapping[str, str]) -> None:
    """Write version.json as NVIDIA's packages have it, with how this toolkit came under a key of its own."""
    known = COMPONENTS.get(version, {})
    document: dict[str, Any] = {"cuda": {"name": "CUDA SDK", "version": version}}
    for name in sorted(components):
        document[version_json_key(name)] = {"name": name, "version": components[name]}
    document["bedplate"] = {
        "source": "wheels",
        "wheels": dict(sorted(wheels.items())),
        "absent": sorted(set(known) - set(components)),
    }
    write_atomic(os.path.join(destination, VERSION_FILE), json.dumps(document, indent=2) + "\n")


def _measure(tree: str) -> dict[str, int | str]:
    """Return what is in a tree: size in bytes of each file, target of each link, by relative path."""
    found: dict[str, int | str] = {}
    for folder, folders, names in os.walk(tree):
        for name in [*names, *(name for name in folders if os.path.islink(os.path.join(folder, name)))]:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, tree)
            if relative != MANIFEST:
                found[relative] = os.readlink(path) if os.path.islink(path) else os.lstat(path).st_size
    return found


def damage(tree: str, limit: int = 20) -> list[str]:
    """Return how a toolkit from wheels differs from what was laid out, at most ``limit`` lines; empty for none.

    Names, sizes and links are compared, which takes a few milliseconds; contents were checked by their hashes when they
    were installed. A tree without a readable manifest is damaged.
    """
    try:
        with open(os.path.join(tree, MANIFEST), encoding="utf-8") as stream:
            wanted: dict[str, int | str] = json.load(stream)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{MANIFEST}: missing or unreadable"]
    found = _measure(tree)
    lines = [f"{name}: missing" for name in sorted(set(wanted) - set(found))]
    lines += [f"{name}: not of the toolkit" for name in sorted(set(found) - set(wanted))]
    lines += [
        f"{name}: {found[name]}, was {wanted[name]}"
        for name in sorted(set(wanted) & set(found))
        if found[name] != wanted[name]
    ]
    return lines[:limit]


# ---- which toolkits there are -------------------------------------------------------------------------------------


def survey(places: Places, version: str, name: str, alternatives: Alternatives = Alternatives()) -> dict[str, Any]:  # noqa: B008  # a constant
    """Return what is on the node, changing nothing.

    version: such as "13.0.1". name: the id of the wanted toolkit from wheels, or "".

    Keys: path (/usr/local/cuda-13.0), kind ("absent", "ours", "link", "directory"), target (what the link names, or
    ""), default_kind ("absent", "link", "alternatives", "directory"), default_target (resolved, or ""), ready (the
    directory of a whole toolkit with that id, or ""), build (the directory for building one), instances ({directory:
    version} of the toolkits from wheels), half_built (their names).
    """
    path = places.path(version)
    kind, target = _kind(path)
    if kind == "link" and os.path.dirname(os.path.realpath(path)) == os.path.realpath(places.toolkits):
        kind = "ours"
    default_kind, default_target = _kind(places.default)
    if default_kind == "link" and target_is_alternative(places.default, alternatives):
        default_kind = "alternatives"
    instances = {entry: _version_of(entry) for entry in _entries(places.toolkits) if not entry.endswith(BUILD)}
    ready = [entry for entry in instances if name and _is_instance(entry, name) and not damage(entry)]
    return {
        "path": path,
        "kind": kind,
        "target": target,
        "default_kind": default_kind,
        "default_target": os.path.realpath(places.default) if default_target else "",
        "default_names": _names(places.default, default_kind, alternatives),
        "ready": max(ready, key=os.path.getmtime, default=""),
        "build": os.path.join(places.toolkits, name + BUILD) if name else "",
        "instances": instances,
        "half_built": [entry for entry in _entries(places.toolkits) if entry.endswith(BUILD)],
    }


def _names(link: str, kind: str, alternatives: Alternatives) -> str:
    """Return the path that a link names, by way of update-alternatives where that tool made it; "" for no link.

    Absolute and without a slash at its end: a link may name its target from its own directory.
    """
    if kind == "alternatives":
        link = os.path.join(alternatives.directory, os.path.basename(link))
    target = _kind(link)[1]
    return os.path.normpath(os.path.join(os.path.dirname(link), target)) if target else ""


def target_is_alternative(link: str, alternatives: Alternatives) -> bool:
    """Tell whether a link is one of update-alternatives."""
    try:
        target = os.readlink(link)
    except OSError:
        return False
    return os.path.dirname(os.path.join(os.path.dirname(link), target)) == alternatives.directory


def _kind(path: str) -> tuple[str, str]:
    """Return what a path is, and what it names when it is a link."""
    if os.path.islink(path):
        return "link", os.readlink(path)
    return ("directory" if os.path.lexists(path) else "absent"), ""


def _entries(folder: str) -> list[str]:
    """Return the paths of the directories in a folder; none when it does not exist."""
    try:
        return sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def _is_instance(path: str, name: str) -> bool:
    """Tell whether a directory is a toolkit of this id; one that was found damaged made way for ``<id>.2``."""
    return re.fullmatch(re.escape(name) + r"(\.\d+)?", os.path.basename(path)) is not None


def read_versions(path: str) -> dict[str, Any]:
    """Return the content of a toolkit's version.json; empty when there is none or it is no JSON object."""
    try:
        with open(os.path.join(path, VERSION_FILE), encoding="utf-8") as stream:
            found = json.load(stream)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _version_of(path: str) -> str:
    entry = read_versions(path).get("cuda")
    return str(entry.get("version", "")) if isinstance(entry, dict) else ""


# ---- changes ------------------------------------------------------------------------------------------------------


def prepare(places: Places, name: str, *, check: bool = False) -> list[str]:
    """Make room for a build: remove what an interrupted one left. Returns what goes; in check mode nothing does."""
    stale = [entry for entry in _entries(places.toolkits) if entry.endswith(BUILD)]
    if not check:
        for entry in stale:
            discard_tree(entry)
        make_dir(os.path.join(places.toolkits, name + BUILD))
    return stale


def publish(places: Places, name: str) -> str:
    """Give a build, whose tree was verified, its final name by one rename; return its directory. Raises StateError."""
    build = os.path.join(places.toolkits, name + BUILD)
    tree = os.path.join(build, "cuda")
    if not is_real_dir(tree):
        raise StateError("missing", f"{tree} does not exist; nothing was built. Run the playbook again.")
    final = os.path.join(places.toolkits, name)
    number = 2
    while os.path.lexists(final):
        final = os.path.join(places.toolkits, f"{name}.{number}")
        number += 1
    try:
        os.rename(tree, final)
    except OSError as error:
        raise StateError("io", f"cannot rename {tree} to {final}: {error.strerror}") from error
    discard_tree(build)
    return final


def switch(places: Places, version: str, target: str, *, check: bool = False) -> bool:
    """Point /usr/local/cuda-13.0 at a toolkit by one rename; return whether that is a change.

    Raises StateError when the path is a directory, or a link that is not Bedplate's.
    """
    found = survey(places, version, "")
    path = found["path"]
    if found["kind"] == "directory":
        raise StateError(
            "refused",
            f"{path} is a directory that Bedplate did not make. Use cuda_toolkit_source=none (or nvidia, "
            "where NVIDIA's packages made it), or move it away, and run again.",
        )
    if found["kind"] == "link":
        raise StateError(
            "refused",
            f"{path} is a link to {found['target']}, which Bedplate did not make. Remove the link, or use "
            "cuda_toolkit_source=none, and run again.",
        )
    if not os.path.isdir(target):
        raise StateError("missing", f"{target} is no toolkit. Run the playbook provision.yml again.")
    if os.path.realpath(path) == os.path.realpath(target):
        return False
    if not check:
        make_dir(places.prefix)
        switch_link(path, target)
    return True


def point(
    places: Places,
    target: str,
    *,
    check: bool = False,
    alternatives: Alternatives = Alternatives(),  # noqa: B008  # a constant
) -> tuple[str, str]:
    """Point /usr/local/cuda at a toolkit, or remove the link when target is ""; return (before, after).

    target: such as /usr/local/cuda-13.0. Where NVIDIA's packages manage the link through update-alternatives, that tool
    is told, so that no later package changes the link by itself.

    Raises StateError when /usr/local/cuda is a directory, the target does not exist, or the tool fails.
    """
    link = places.default
    kind, _ = _kind(link)
    if kind == "directory":
        raise StateError(
            "refused",
            f"{link} is a directory, so it cannot be pointed at {target or 'nothing'}. Move it away (for example to "
            f"{link}.old) and run again, or set `default: false` in the profile's block toolkit.",
        )
    if target and not os.path.isdir(target):
        raise StateError("missing", f"{target} is no toolkit, so {link} was left as it is.")
    managed = kind == "link" and target_is_alternative(link, alternatives)
    before = _names(link, "alternatives" if managed else kind, alternatives)
    if before == target:
        return before, target
    if not check:
        if managed:
            _tell_alternatives(link, before, target, alternatives)
        elif target:
            switch_link(link, target)
        else:
            os.unlink(link)
    return before, target


def _tell_alternatives(link: str, before: str, target: str, alternatives: Alternatives) -> None:
    """Have update-alternatives name the target, as NVIDIA's own packages register it, or drop the present one."""
    name = os.path.basename(link)
    if not target:
        _alternatives(alternatives, "--remove", name, before)
        return
    matched = re.search(r"cuda-(\d+)\.(\d+)$", target)
    priority = str(int(matched[1]) * 10 + int(matched[2])) if matched else "1"
    _alternatives(alternatives, "--install", link, name, target, priority)
    _alternatives(alternatives, "--set", name, target)


def _alternatives(alternatives: Alternatives, *arguments: str) -> None:
    """Run update-alternatives. Raises StateError with what it said."""
    command = [*alternatives.command, *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=ALTERNATIVES_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StateError("io", f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise StateError("io", f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()}")


def prune(places: Places, keep: Sequence[str], *, check: bool = False) -> list[str]:
    """Remove the toolkits from wheels that nothing names: no link, no generation's CUDA_HOME, and not ``keep``.

    keep: directories or versions.

    Nothing else ever removes a toolkit. Returns the directories that went (in check mode: would go).
    """
    linked = {*_linked(places.prefix), *_used(places.root)}
    going = [
        entry
        for entry in _entries(places.toolkits)
        if os.path.realpath(entry) not in linked and entry not in keep and _version_of(entry) not in keep
    ]
    if not check:
        for entry in going:
            discard_tree(entry)
    return going


def _linked(prefix: str) -> Iterator[str]:
    """Yield what the links /usr/local/cuda* name, resolved."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(prefix):
            if entry.name.startswith("cuda") and entry.is_symlink():
                yield os.path.realpath(entry.path)


def _used(root: str) -> Iterator[str]:
    """Yield what the environments of the generations name as CUDA_HOME, resolved."""
    for generation in _entries(os.path.join(root, "generations")):
        home = read_environment(Path(generation, "environment")).get("CUDA_HOME")
        if home:
            yield os.path.realpath(home)


def free_bytes(path: str) -> int:
    """Return the free space of the file system that holds a path, or would hold it."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


# ---- the module -----------------------------------------------------------------------------------------------------


def perform(
    places: Places,
    options: Mapping[str, Any],
    *,
    check: bool = False,
    alternatives: Alternatives = Alternatives(),  # noqa: B008  # a constant
) -> dict[str, Any]:
    """Do what the module bedplate_toolkit is asked for and return its result; its DOCUMENTATION describes both.

    Raises StateError.
    """
    action, version, name, target = (options[key] for key in ("action", "version", "id", "target"))
    if action not in ("point", "prune") and not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise StateError("invalid", f"version {version!r} is no release such as 13.0.1.")
    if action in ("prepare", "layout", "publish") and not re.fullmatch(r"[\w.-]+", name):
        raise StateError("invalid", f"id {name!r} is no id of a toolkit; action=read gives it.")
    if action == "read":
        return _read(places, options, alternatives)
    if action == "prepare":
        removed = prepare(places, name, check=check)
        return {"changed": True, "removed": removed}
    if action == "layout":
        build = os.path.join(places.toolkits, name + BUILD)
        made = {} if check else lay_out(os.path.join(build, "site"), os.path.join(build, "cuda"), version)
        return {"changed": True, "made": made}
    if action == "prune":
        removed = prune(places, options["keep"], check=check)
        return {"changed": bool(removed), "removed": removed}
    if action == "point":
        before, after = point(places, target, check=check, alternatives=alternatives)
        return _linked_result(places.default, before, after)
    path = places.path(version)
    before = _kind(path)[1]
    if action == "publish":
        target = os.path.join(places.toolkits, name) if check else publish(places, name)
    changed = True if action == "publish" and check else switch(places, version, target, check=check)
    result = _linked_result(path, before, target if changed else before)
    return {**result, "instance": target} if action == "publish" else result


def _read(places: Places, options: Mapping[str, Any], alternatives: Alternatives) -> dict[str, Any]:
    """Return the result of the action read."""
    version = options["version"]
    try:
        wanted = select(options["lock"], version, options["components"]) if options["lock"] else {}
        named = packages(version, options["components"]) if options["packages"] else {}
    except ValueError as error:
        raise StateError("invalid", f"{error}.") from error
    names = expected_components(version, "wheels" if options["lock"] else "nvidia", options["components"])
    found = survey(places, version, wanted.get("id", ""), alternatives)
    found.update(
        default_version=_version_of(found["default_target"]) if found["default_target"] else "",
        free_bytes=free_bytes(places.toolkits),
        python=sys.executable,
    )
    return {"changed": False, "toolkit": found, "wanted": wanted, "packages": named, "compiler": "nvcc" in names}


def _linked_result(link: str, before: str, after: str) -> dict[str, Any]:
    """Return whether a link changes, and the difference."""
    lines = {key: f"{link} -> {names}\n" if names else "" for key, names in (("before", before), ("after", after))}
    return {"changed": before != after, "diff": lines}
