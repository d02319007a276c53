"""Fixtures of the tests that need a node."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import ROOT, Node, make_nodes, run

# Not the directory of the Molecule scenarios: they run at the same time, and their nodes have it mounted.
TINY = ROOT / ".cache" / "tiny-faults"


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The tiny wheels and their locked profiles."""
    run(sys.executable, ROOT / "tests" / "tiny" / "build.py", TINY)
    return TINY


@pytest.fixture(scope="session")
def tiny_nodes(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[list[Node]]:
    """Two nodes that see the tiny wheels at /srv/wheels."""
    yield from make_nodes(
        tmp_path_factory.mktemp("inventory"), "bedplate-faults", 2, tiny / "wheels", tiny / "profiles"
    )


@pytest.fixture(scope="session")
def tiny_node(tiny_nodes: list[Node]) -> Node:
    """The first of them."""
    return tiny_nodes[0]


@pytest.fixture
def node(tiny_node: Node) -> Node:
    """The node, bare."""
    tiny_node.wipe()
    return tiny_node


@pytest.fixture(scope="session")
def kept_node(tiny_node: Node) -> Node:
    """The node with tiny-good provisioned once and kept."""
    tiny_node.wipe()
    play = tiny_node.play("site.yml", "tiny-good")
    assert play.code == 0, play.output
    assert tiny_node.statuses() == {"tiny-good": "verified"}
    tiny_node.keep()
    return tiny_node


@pytest.fixture
def live(kept_node: Node) -> Node:
    """The node with tiny-good live and verified."""
    kept_node.restore()
    return kept_node


@pytest.fixture
def second(tiny_nodes: list[Node]) -> Node:
    """The other node, bare."""
    tiny_nodes[1].wipe()
    return tiny_nodes[1]
