"""Filters about a host's packages: the driver that is installed, and apt's own sources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

# Fields of `apt-get indextargets --format`, in the order in which the role asks for them.
FORMAT = ("RELEASE", "CODENAME", "COMPONENT", "REPO_URI", "ORIGIN", "SOURCESENTRY")
# Suites of a release that may hold its drivers, and the one to add when it is asked for.
UPDATES, BACKPORTS = ("", "-updates", "-security"), "-backports"


def bedplate_archive_sources(
    targets: Iterable[str],
    texts: Mapping[str, str],
    codename: str,
    origin: str,
    components: Iterable[str],
    backports: bool = False,
) -> list[dict[str, Any]]:
    """Return what the host's own sources lack of its distribution's components, served by the host's own mirrors.

    targets: lines of `apt-get indextargets` in ``FORMAT``, fields separated by `|`. texts: the files that the last
    field names, by path; targets of other files are not the host's own and are left out. codename: of the release,
    such as bookworm. origin: of the distribution, such as Debian. components: those that are needed.
    backports: whether the suite of backports is needed too.

    Returns a list of dicts: uri, suite, components (sorted), signed_by (path or empty), sorted by suite and URI.
    Raises AnsibleFilterError when no source of the release is there, or its key is written into the source itself.
    """
    wanted, suffixes = set(components), (*UPDATES, *([BACKPORTS] if backports else []))
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for line in targets:
        fields = dict(zip(FORMAT, (part.strip() for part in line.split("|"))))
        path, _, number = fields.get("SOURCESENTRY", "").rpartition(":")
        # Debian may be asked for as stable, and names each suite by codename; Ubuntu's suites all have the release's.
        suffix = fields.get("RELEASE" if origin == "Ubuntu" else "CODENAME", "").removeprefix(codename)
        own = fields.get("ORIGIN", "").split(" ")[0] == origin and fields["CODENAME"].startswith(codename)
        if not own or suffix not in suffixes or path not in texts:
            continue
        key = (fields["RELEASE"], fields["REPO_URI"])
        entry = entries.setdefault(key, {"suffix": suffix, "has": set(), "signed_by": ""})
        entry["has"].add(fields["COMPONENT"])
        entry["signed_by"] = entry["signed_by"] or _signed_by(path, texts[path], int(number))
    base = next(((suite, uri) for (suite, uri), entry in sorted(entries.items()) if not entry["suffix"]), None)
    if base is None:
        raise AnsibleFilterError(
            f"apt knows no source of {origin} {codename} on this host, so its own driver cannot be found. "
            f"Run `apt-get update` there and look at `apt-cache policy`."
        )
    if backports and not any(entry["suffix"] == BACKPORTS for entry in entries.values()):
        signed_by = entries[base]["signed_by"]
        entries[(base[0] + BACKPORTS, base[1])] = {"suffix": BACKPORTS, "has": set(), "signed_by": signed_by}
    return [
        {"uri": uri, "suite": suite, "components": sorted(wanted - entry["has"]), "signed_by": entry["signed_by"]}
        for (suite, uri), entry in sorted(entries.items())
        if wanted - entry["has"]
    ]


def _signed_by(path: str, text: str, number: int) -> str:
    """Return the key that an entry names: entry ``number`` is a line of a .list file, a stanza of a .sources file.

    apt refuses two sources of one suite that name different keys, so the host's own one is taken over.
    """
    if not path.endswith(".sources"):
        lines = text.split("\n")
        found = re.search(r"signed-by=([^\s\]]+)", lines[number - 1]) if number <= len(lines) else None
        return found[1] if found else ""
    bare = "\n".join(line for line in text.split("\n") if not line.startswith("#"))
    stanzas = [stanza for stanza in re.split(r"\n\s*\n", bare) if stanza.strip()]
    found = re.search(r"(?mi)^signed-by:[ \t]*(.*)$", stanzas[number - 1]) if number <= len(stanzas) else None
    if found and not found[1].strip():
        raise AnsibleFilterError(
            f"the source {number} in {path} holds its key itself, which cannot be referred to. "
            f"Put the key into a file below /etc/apt/keyrings and name that in Signed-By."
        )
    return found[1].strip() if found else ""


# Packages whose upstream version is the driver's own; helpers such as nvidia-settings may have another.
CORE = re.compile(
    r"(libnvidia-(compute|cfg1|ml1?)|libcuda1|nvidia-(smi|utils|driver-cuda|dkms|kernel-(open-)?dkms|open-kernel-dkms))"
    r"(-\d{3}(-server)?)?(-open)?\Z"
)
DRIVER_VERSION = re.compile(r"(?:\d+:)?(\d{3,}\.\d+(?:\.\d+)?)-")
# Canonical's prebuilt modules, and what they are linked from on the node: versioned as the kernel that they are for.
PREBUILT = re.compile(r"linux-(?:(?:modules|objects)-nvidia-(\d{3})(?!\d)|signatures-nvidia-)")


def bedplate_driver_found(lines: Iterable[str]) -> dict[str, Any]:
    """Return the NVIDIA driver that the package database knows, from lines `status TAB name TAB version [TAB source]`.

    Keys: version (of the driver, empty when there is none), flavour (open or proprietary, by the packages' names; empty
    without a package of modules), packages (exact version by name, of those at the driver's version), prebuilt (the
    same of Canonical's prebuilt modules of its branch), broken (version by name of driver packages that are not in
    order: not configured, or core ones of another version), built (names in packages that are built from the same
    source as a core one).
    """
    known = [(*line.split("\t"), "")[:4] for line in lines if line.count("\t") in (2, 3)]
    there = [item for item in known if item[0] not in ("not-installed", "config-files")]
    versions: list[str] = []
    for _, name, version, _ in there:
        match = DRIVER_VERSION.match(version)
        if match and CORE.match(name):
            versions.append(match[1])
    driver = max(sorted(set(versions)), key=versions.count, default="")
    packages: dict[str, str] = {}
    prebuilt: dict[str, str] = {}
    broken: dict[str, str] = {}
    for status, name, version, _ in there:
        match = DRIVER_VERSION.match(version)
        own = bool(match and match[1] == driver)
        if own:
            packages[name] = version
        kernels = PREBUILT.match(name)
        if (
            kernels
            and driver
            and status == "installed"
            and (kernels[1] or driver).split(".")[0] == driver.split(".")[0]
        ):
            prebuilt[name] = version
        if match and (status != "installed" or (CORE.match(name) and not own)):
            broken[name] = version
    # A kernel module's packages say which one it is; libraries, and nvidia-kernel-common, are the same for both. depmod
    # prefers what DKMS built.
    modules = [name for name in packages if "dkms" in name] or [name for name in prebuilt if "signatures" not in name]
    flavour = "open" if any("open" in name for name in modules) else "proprietary" if modules else ""
    sources = {source for _, name, _, source in there if source and name in packages and CORE.match(name)}
    return {
        "version": driver,
        "flavour": flavour,
        "packages": packages,
        "prebuilt": prebuilt,
        "broken": broken,
        "built": sorted(name for _, name, _, source in there if name in packages and source in sources),
    }


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "bedplate_archive_sources": bedplate_archive_sources,
            "bedplate_driver_found": bedplate_driver_found,
        }
