"""How roles run uv on a node: one lock, one cache, the place where wheels come from and how that is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from bedplate.node.evidence import redact

LOCK_WAIT_S = 60
LOCKED = 75  # EX_TEMPFAIL of sysexits.h: flock's exit code when another run holds the lock


def bedplate_uv(root: str, state_dir: str, source: str, location: str) -> dict[str, Any]:
    """Return how to run the uv that lies below a root, and where it finds locked wheels.

    root: directory of everything of Bedplate on the node. state_dir: directory of the journal and its lock. source:
    "index", "mirror" or "directory". location: the URL or path that belongs to it; may be empty with "index".

    Returns: ``command``, to which uv's own arguments are added: everything that writes below the root holds the lock of
    the journal, so that a build that outlives its controller is waited for and named instead of raced; ``wheels``,
    arguments for the place of the wheels: a lock names hashes only, so any place may serve the files; ``environment``.
    Raises AnsibleFilterError for another source.
    """
    places = {
        "index": ["--default-index", location] if location else [],
        "mirror": ["--no-index", "--find-links", location],
        "directory": ["--offline", "--no-index", "--find-links", location],
    }
    if source not in places:
        raise AnsibleFilterError(f"wheels come from {', '.join(places)}, and not from `{source}`")
    lock = ["flock", "--exclusive", "--timeout", str(LOCK_WAIT_S), "--conflict-exit-code", str(LOCKED)]
    return {
        "command": [*lock, f"{state_dir}/lock", f"{root}/tools/bin/uv"],
        "wheels": places[source],
        "environment": {
            "UV_CACHE_DIR": f"{root}/cache/uv",
            "UV_PYTHON_INSTALL_DIR": f"{root}/python",
            "UV_LINK_MODE": "hardlink",
            "UV_NO_PROGRESS": "1",
        },
    }


def bedplate_redact(text: str) -> str:
    """Return a text that may be shown: without users and passwords of addresses, tokens and keys."""
    return redact(str(text))


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"bedplate_redact": bedplate_redact, "bedplate_uv": bedplate_uv}
