"""Lookup of the node's part of Bedplate, as one file."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

from bedplate.controller.node_code import node_code

DOCUMENTATION = """
name: bedplate_node_code
author: Bedplate contributors
version_added: "0.1.0"
short_description: The node's part of Bedplate as a zip that Python runs from
description:
  - Writes it to the controller's cache when it is not there. The same code gives the same bytes.
options: {}
"""

EXAMPLES = """
- name: Copy the node's part of Bedplate
  ansible.builtin.copy:
    src: "{{ lookup('bedplate_node_code').path }}"
    dest: /opt/bedplate/tools/lib/bedplate.zip
    mode: "0644"
"""

RETURN = """
_raw:
  description: One dictionary with C(path), a file of the controller, and C(sha256).
  type: list
  elements: dict
"""


class LookupModule(LookupBase):  # type: ignore[misc]  # ansible ships no types
    """Ansible's glue; the logic is bedplate.controller.node_code."""

    def run(self, terms: list[Any], variables: Any = None, **kwargs: Any) -> list[dict[str, str]]:
        """Return a list of one dictionary."""
        self.set_options(var_options=variables, direct=kwargs)
        if terms:
            raise AnsibleLookupError("bedplate_node_code takes no terms")
        try:
            return [node_code()]
        except OSError as error:
            raise AnsibleLookupError(f"the file for nodes cannot be written: {error}") from error
