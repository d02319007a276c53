"""Lookup of the running ansible-playbook process."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

try:
    from bedplate.controller.holder import current_run
except ImportError as error:
    raise AnsibleLookupError(
        f"the Python that runs Ansible has no package `bedplate` ({error}): "
        "run ansible-playbook from the project's virtual environment (`make setup`)"
    ) from error

DOCUMENTATION = """
name: bedplate_run
author: Bedplate contributors
version_added: "0.1.0"
short_description: Identify the running ansible-playbook process
description:
  - Returns the same answer from every worker and every host of one ansible-playbook process, and no other run's answer.
  - A node stores the holder while it is being changed, so that a later run can tell whether that change still goes on
    (filter P(bedplate_holder_alive#filter)).
options:
  _terms:
    description: None are taken.
    required: false
"""

EXAMPLES = """
- name: Show who runs this
  ansible.builtin.debug:
    msg: "{{ lookup('bedplate_run').run_id }}"
"""

RETURN = """
_raw:
  description: One dictionary.
  type: list
  elements: dict
  contains:
    run_id: {description: Names this run., type: str}
    holder:
      description: Keys C(controller), C(boot_id), C(pid_namespace), C(pid), C(pid_start), C(user).
      type: dict
"""


class LookupModule(LookupBase):  # type: ignore[misc]  # ansible ships no types
    """Ansible's glue; the logic is bedplate.controller.holder.current_run."""

    def run(self, terms: list[Any], variables: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
        """Return a list of one dictionary."""
        self.set_options(var_options=variables, direct=kwargs)
        if terms:
            raise AnsibleLookupError("bedplate_run takes no terms")
        return [current_run()]
