"""Fixtures of the tests that need a node."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import ROOT, Node, make_node, run

TINY = ROOT / ".cache" / "tiny"


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The tiny wheels and their locked profiles."""
    run(sys.executable, ROOT / "tests" / "tiny" / "build.py", TINY)
    return TINY


@pytest.fixture(scope="session")
def tiny_node(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Node]:
    """A node that sees the tiny wheels at /srv/wheels."""
    yield from make_node(tmp_path_factory.mktemp("inventory"), "bedplate-faults", tiny / "wheels", tiny / "profiles")


@pytest.fixture
def node(tiny_node: Node) -> Node:
    """The node, bare."""
    tiny_node.wipe()
    return tiny_node


@pytest.fixture
def live(node: Node) -> Node:
    """The node with tiny-good live and verified."""
    play = node.play("site.yml", "tiny-good")
    assert play.code == 0, play.output
    assert node.statuses() == {"tiny-good": "verified"}
    return node
