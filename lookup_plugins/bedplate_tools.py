"""Where the controller keeps what it copies to every node."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
name: bedplate_tools
author: Bedplate contributors
version_added: "0.1.0"
short_description: Paths and checksums of what the controller copies to every node
description:
  - Bedplate copies uv and nvidia-ml-py from the controller's environment to the nodes, so that nodes need no network
    for them and run exactly what C(requirements/controller.lock) pins; and the index of torch exports.
options: {}
"""

EXAMPLES = """
- name: Copy uv
  ansible.builtin.copy:
    src: "{{ lookup('bedplate_tools').uv.path }}"
    dest: /opt/bedplate/tools/bin/uv
    mode: "0755"
"""

RETURN = """
_raw:
  description: One dictionary; each value has C(path), a file of the controller, and C(sha256).
  type: list
  elements: dict
  contains:
    uv:
      description: The uv program.
      type: dict
    pynvml:
      description: pynvml.py, the single module of nvidia-ml-py.
      type: dict
    torch_index:
      description: The index of torch exports.
      type: dict
"""

TORCH_INDEX = Path(__file__).resolve().parents[1] / "data" / "abi" / "torch-x86_64.idx"


class LookupModule(LookupBase):  # type: ignore[misc]  # ansible ships no types
    """Find the tools beside the Python that runs ansible-playbook."""

    def run(
        self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[dict[str, dict[str, str]]]:
        """Return one dictionary; raise AnsibleLookupError when a file is not here."""
        self.set_options(var_options=variables, direct=kwargs)
        if terms:
            raise AnsibleLookupError("bedplate_tools takes no arguments")
        try:
            import uv

            paths = {"uv": Path(uv.find_uv_bin()), "pynvml": _module_file("pynvml"), "torch_index": TORCH_INDEX}
            return [{name: {"path": str(path), "sha256": _sha256(path)} for name, path in paths.items()}]
        except (ImportError, OSError) as error:
            raise AnsibleLookupError(
                f"the controller's environment is not complete ({error}): run `make setup`"
            ) from error


def _module_file(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"no module {name}")
    return Path(spec.origin)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
