"""Lookup of one profile, checked and ready to deploy."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

try:
    from bedplate.controller.errors import BedplateError, near
    from bedplate.controller.plain import plain
    from bedplate.controller.profiles import for_deploy
except ImportError as error:
    raise AnsibleLookupError(
        f"the Python that runs Ansible has no package `bedplate` ({error}): "
        "run ansible-playbook from the project's virtual environment (`make setup`)"
    ) from error

DOCUMENTATION = """
name: bedplate_profile
author: Bedplate contributors
version_added: "0.1.0"
short_description: Read a profile, with its lock, after checking both
description:
  - Returns all that a role needs to put a profile on a node of one target.
  - Fails when the profile is unknown, has a mistake, is marked refused, or when its lock is missing, does not match the
    profile or was changed; the message names the file and the next command.
  - Reads the controller's files only.
options:
  _terms:
    description: The name of one profile.
    required: true
  target:
    description: Python and machine of the node, such as C(cp311-x86_64); empty means the profile's first.
    type: str
    default: ""
  profiles:
    description:
      - Directories that hold profiles, the first hit wins.
      - By default the environment variable E(BEDPLATE_PROFILES), else the C(profiles) directory of the project.
    type: list
    elements: str
    default: []
  allow_refused:
    description: Return a profile that is marked C(refused) all the same.
    type: bool
    default: false
"""

EXAMPLES = """
- name: Read the profile once
  ansible.builtin.set_fact:
    bedplate_profile_data: "{{ lookup('bedplate_profile', bedplate_profile, target='cp311-x86_64') }}"
"""

RETURN = """
_raw:
  description: One dictionary.
  type: list
  elements: dict
  contains:
    name: {description: Name of the profile., type: str}
    id: {description: Name and 12 hexadecimal digits over profile and lock; names the generation., type: str}
    description: {description: One line for people., type: str}
    refused: {description: Why it is refused; none for a good profile., type: str}
    target: {description: The target asked for., type: str}
    python: {description: 'Python version of the target, such as C(3.11).', type: str}
    lock_file: {description: Path of the requirements file on the controller., type: str}
    lock_text: {description: Its content., type: str}
    packages: {description: Number of locked packages., type: int}
    bytes: {description: Sum of the known wheel sizes., type: int}
    stack: {description: The block C(stack) of the profile., type: dict}
    verify: {description: The block C(verify)., type: dict}
    expect: {description: The block C(expect)., type: dict}
    driver: {description: The block C(driver); none when absent., type: dict}
    toolkit: {description: The block C(toolkit); none when absent., type: dict}
    system_packages: {description: 'Distribution packages by manager, keys C(apt) and C(dnf).', type: dict}
"""


OPTIONS = ("target", "profiles", "allow_refused")


class LookupModule(LookupBase):  # type: ignore[misc]  # ansible ships no types
    """Ansible's glue; the logic is bedplate.controller.profiles.for_deploy."""

    def run(self, terms: list[Any], variables: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
        """Return a list of one dictionary."""
        # Ansible ignores options that a lookup does not have, and a misspelt one would look as if it were taken.
        for option in set(kwargs) - set(OPTIONS):
            raise AnsibleLookupError(f"bedplate_profile has no option `{option}`{near(option, OPTIONS) or '.'}")
        self.set_options(var_options=variables, direct=kwargs)
        if len(terms) != 1 or not isinstance(terms[0], str):
            raise AnsibleLookupError("bedplate_profile takes the name of one profile")
        try:
            profile = for_deploy(
                plain(terms[0]),
                plain(self.get_option("target")),
                plain(self.get_option("profiles")),
                allow_refused=self.get_option("allow_refused"),
            )
        except BedplateError as error:
            raise AnsibleLookupError(str(error)) from error
        return [profile]
