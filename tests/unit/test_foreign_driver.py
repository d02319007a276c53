"""A toolkit of NVIDIA's repository beside a driver that is the operator's: what apt makes of what the role writes."""

from __future__ import annotations

import functools
import http.server
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_driver_templates import host, render, value

INSTALLED, NEWER = "580.82.07-1", "590.44.01-1"
STANZA = """Package: nvidia-driver-cuda
Source: nvidia-graphics-drivers
Version: {version}
Architecture: amd64
Maintainer: Nobody <nobody@example.org>
Description: driver
"""


@pytest.fixture(params=["http", "file"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the address of a repository that has the installed driver and a newer one."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    stanzas = [
        f"{STANZA.format(version=v)}Filename: ./{v}.deb\nSize: 1\nSHA256: {'0' * 64}\n" for v in (INSTALLED, NEWER)
    ]
    (folder / "Packages").write_text("\n".join(stanzas))
    if request.param == "file":
        yield f"file:{folder}"
        return
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://user:secret@127.0.0.1:{server.server_port}"
        server.shutdown()


def candidate(tmp_path: Path, mirror: str, pins: dict[str, str]) -> str:
    """Return the version that an upgrade would take with these preferences."""
    etc = tmp_path / "etc"
    for name in ("preferences.d", "sources.list.d", "lists/partial", "archives/partial"):
        (etc / name).mkdir(parents=True)
    for name, text in pins.items():
        (etc / "preferences.d" / name).write_text(text)
    (etc / "sources.list").write_text(f"deb [trusted=yes arch=amd64] {mirror}/ ./\n")
    (etc / "status").write_text(f"{STANZA.format(version=INSTALLED)}Status: install ok installed\n")
    options = {
        "APT::Architecture": "amd64",
        "APT::Sandbox::User": "",
        "Acquire::http::Proxy": "DIRECT",
        "Dir::Cache": f"{etc}/",
        "Dir::Cache::archives": f"{etc}/archives",
        "Dir::Etc::sourcelist": f"{etc}/sources.list",
        "Dir::Etc::sourceparts": f"{etc}/sources.list.d",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": f"{etc}/preferences.d",
        "Dir::State::lists": f"{etc}/lists",
        "Dir::State::status": f"{etc}/status",
    }
    arguments = [part for name, given in options.items() for part in ("-o", f"{name}={given}")]
    subprocess.run(["apt-get", *arguments, "update"], check=True, capture_output=True)
    shown = subprocess.run(
        ["apt-cache", *arguments, "policy", "nvidia-driver-cuda"], check=True, capture_output=True, text=True
    ).stdout
    assert NEWER in shown
    return shown.split("Candidate: ")[1].split("\n")[0]


def test_no_driver_comes_from_the_source(tmp_path: Path, mirror: str) -> None:
    templar = host("debian12", bedplate_driver_source="none", nvidia_driver_repository=mirror)
    name = Path(value(templar, "__nvidia_driver_foreign_file")).name
    assert candidate(tmp_path / "without", mirror, {}) == NEWER
    assert candidate(tmp_path / "with", mirror, {name: render(templar, "foreign.pref.j2")}) in ("(none)", INSTALLED)


@pytest.mark.parametrize("pinned", [INSTALLED, NEWER])
def test_a_pin_of_the_operator_wins(tmp_path: Path, mirror: str, pinned: str) -> None:
    templar = host("debian12", bedplate_driver_source="none", nvidia_driver_repository=mirror)
    name = Path(value(templar, "__nvidia_driver_foreign_file")).name
    own = f"Package: src:*nvidia*:any\nPin: version {pinned}\nPin-Priority: 1000\n"
    pins = {"nvidia-driver-pin": own, name: render(templar, "foreign.pref.j2")}
    assert candidate(tmp_path / "apt", mirror, pins) == pinned


@pytest.mark.parametrize(("source", "goes"), [("none", False), ("nvidia", True), ("distro", True)])
def test_the_pin_goes_only_where_the_driver_is_managed(source: str, goes: bool) -> None:
    """Tasks sources.yml removes these files, and the preview leaves them out."""
    patterns = value(host("debian12", bedplate_driver_source=source), "__nvidia_driver_legacy")[0]["patterns"]
    assert "cuda-repository-pin-*" in patterns
    assert ("nvidia-driver-pin" in patterns) is goes


def test_a_profile_without_a_driver_manages_none() -> None:
    templar = host("debian12", bedplate_plan={"driver": None})
    assert "nvidia-driver-pin" not in value(templar, "__nvidia_driver_legacy")[0]["patterns"]
