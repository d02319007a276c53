"""Questions about a node's journal that only a person's words raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import BedplateError, near


def generation_named(state: Mapping[str, Any], wanted: str) -> str:
    """Return the id of the generation that *wanted* means.

    Args:
        state: the node's journal, as module bedplate_state returns it.
        wanted: an id, a profile name (its generation verified last is meant), or empty (stays empty: the node knows
            its previous one).

    Raises:
        BedplateError: no verified generation has that id or profile; names the near one and those there are.
    """
    generations: Mapping[str, Mapping[str, Any]] = state["generations"]
    if not wanted or wanted in generations:
        return wanted
    verified = {name: g for name, g in generations.items() if g["status"] == "verified"}
    of_profile = [name for name, g in verified.items() if g["profile"] == wanted]
    if not of_profile:
        known = sorted({g["profile"] for g in verified.values()} | verified.keys())
        hint = near(wanted, known) or "."
        raise BedplateError(
            f"no verified generation `{wanted}` on this node{hint} Verified: {', '.join(known) or 'none'}."
        )
    return max(of_profile, key=lambda name: verified[name]["verified"])
