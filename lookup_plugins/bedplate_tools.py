"""Where the controller keeps the tools that it copies to nodes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
name: bedplate_tools
author: Bedplate contributors
version_added: "0.1.0"
short_description: Paths of the controller's own locked tools
description:
  - Bedplate copies uv and nvidia-ml-py from the controller's environment to the nodes, so that nodes need no network
    for them and run exactly what C(requirements/controller.lock) pins.
options: {}
"""

EXAMPLES = """
- name: Copy uv
  ansible.builtin.copy:
    src: "{{ lookup('bedplate_tools').uv }}"
    dest: /opt/bedplate/tools/bin/uv
    mode: "0755"
"""

RETURN = """
_raw:
  description: One dictionary with the paths.
  type: list
  elements: dict
  contains:
    uv:
      description: Path of the uv program.
      type: str
    pynvml:
      description: Path of pynvml.py, the single module of nvidia-ml-py.
      type: str
"""


class LookupModule(LookupBase):  # type: ignore[misc]  # ansible ships no types
    """Find the tools beside the Python that runs ansible-playbook."""

    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, str]]:
        """Return one dictionary of paths; raise AnsibleLookupError when a tool is not installed here."""
        self.set_options(var_options=variables, direct=kwargs)
        if terms:
            raise AnsibleLookupError("bedplate_tools takes no arguments")
        try:
            import uv

            uv_program = Path(uv.find_uv_bin())
        except (ImportError, FileNotFoundError) as error:
            raise AnsibleLookupError(
                f"uv is not in the controller's environment ({error}): run `make setup`"
            ) from error
        pynvml = importlib.util.find_spec("pynvml")
        if pynvml is None or pynvml.origin is None:
            raise AnsibleLookupError("nvidia-ml-py is not in the controller's environment: run `make setup`")
        return [{"uv": str(uv_program), "pynvml": pynvml.origin}]
