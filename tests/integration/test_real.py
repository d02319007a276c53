"""The story on real wheels: provision, the incident refused and then forced, back, and the next CUDA.

One test, in order, because each chapter starts where the one before ended. It prints the figures it measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import ROOT, Node, make_nodes, run, wheel_cache

pytestmark = pytest.mark.real

GOOD, INCIDENT, NEXT = "cu128-torch2.9.1", "incident-torch2.10", "cu130-torch2.11"
TARGET = "cp311-x86_64"
WANTED_SYMBOL = "c10::cuda::c10_cuda_check_implementation(int, char const*, char const*, int, bool)"


@pytest.fixture(scope="module")
def real_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A bare node that sees the fetched wheels at /srv/wheels."""
    wheels: Path = wheel_cache()
    for profile in (GOOD, INCIDENT, NEXT):
        run("bedplate", "fetch", profile, "--target", TARGET, "--to", wheels)
    for nodes in make_nodes(tmp_path_factory.mktemp("inventory"), "bedplate-real", 1, wheels, ROOT / "profiles"):
        yield nodes[0]


def verdicts(node: Node) -> list[dict[str, object]]:
    """Return the verdicts of the node's last run."""
    found: list[dict[str, object]] = node.state()["runs"][-1]["verdicts"]
    return found


def used_mb(node: Node, *paths: str) -> int:
    """Return what the paths use together in MiB, links counted once; by default all of /opt/bedplate."""
    return int(node.sh(f"du -scm {' '.join(paths or ('/opt/bedplate',))} | tail -1").split()[0])


def test_story(real_node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    figures: list[str] = []

    def timed(label: str, profile: str, expect: int, playbook: str = "site.yml", **variables: object) -> str:
        started = time.monotonic()
        play = real_node.play(playbook, profile, **variables)
        figures.append(f"{label}: {time.monotonic() - started:.1f} s")
        assert play.code == expect, play.output
        return play.output

    # 1. A bare node to a verified stack.
    timed(f"site.yml to {GOOD} on a bare node", GOOD, 0)
    found = verdicts(real_node)
    assert {v["status"] for v in found} <= {"pass", "skipped"}
    assert {v["subject"] for v in found if v["code"] == "import.ok"} >= {"torch", "sgl_kernel", "flashinfer"}
    assert len([v for v in found if v["code"] == "collective.ok"]) == 3, "ranks 2, 4, 8"
    assert all(v.get("simulated") for v in found)
    figures.append(f"disk with one generation: {used_mb(real_node)} MB")

    output = timed("site.yml again", GOOD, 0)
    assert "changed=0" in output

    # 2. The incident: refused on the controller, then forced, caught on the node, named.
    output = timed(f"{INCIDENT} refused", INCIDENT, 2)
    assert "is refused" in output
    assert INCIDENT not in real_node.statuses()
    before = used_mb(real_node)
    output = timed(f"{INCIDENT} forced, caught, back", INCIDENT, 2, bedplate_allow_refused=True)
    assert WANTED_SYMBOL in output
    assert any(v["code"] == "abi.undefined_symbol" for v in verdicts(real_node))
    assert real_node.statuses() == {GOOD: "verified", INCIDENT: "failed"}
    assert real_node.live_torch().startswith("2.9.1")
    # What both have in common is linked, not copied: beyond the wheels that only the second has, it costs little.
    own = used_mb(real_node, "/opt/bedplate/cache", "/opt/bedplate/generations") - used_mb(
        real_node, "/opt/bedplate/cache"
    )
    figures.append(f"disk with both: {used_mb(real_node)} MB, {used_mb(real_node) - before} MB more than with one")
    figures.append(f"of which both generations beyond the cache they link to: {own} MB")
    assert own < 1000

    # 3. The way forward, and back on demand.
    timed(f"site.yml to {NEXT}", NEXT, 0)
    assert real_node.live_torch().startswith("2.11.0")
    timed("rollback.yml with verification", GOOD, 0, playbook="rollback.yml")
    assert real_node.live_torch().startswith("2.9.1")
    switch_ms = real_node.state()["runs"][-1]["switch_ms"]
    figures.append(f"switch on the node: {switch_ms:.2f} ms")
    assert switch_ms < 50

    with capsys.disabled():
        print("\n" + "\n".join(figures))
