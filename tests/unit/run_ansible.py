"""Run this environment's ansible-playbook, with the repository's ansible.cfg."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def ansible_playbook(
    *arguments: Any, cwd: Path = ROOT, base: Mapping[str, str] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run it with the words of a command line; whoever calls judges how it ended.

    base: the environment to start from; that of the tests where none is given. environment: what is added to it.
    """
    return subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), *arguments],
        cwd=cwd,
        env={**(os.environ if base is None else base), "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
