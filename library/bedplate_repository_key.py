#!/usr/bin/python
"""Ansible module: put a repository's key into place, once it is the pinned one."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bedplate_repository_key
short_description: Put a repository's key into place, once it is the pinned one and alone
description:
  - Reads the key, compares the fingerprint of its primary key with the pinned one, and writes it anew from what was
    checked, armored, so that nothing beside it in the file comes to be trusted.
  - A file in place that holds the pinned key already is kept, without a look at the repository.
  - It needs no gpg.
attributes:
  check_mode:
    support: full
    description: Reads and judges the key, and writes nothing.
  diff_mode:
    support: full
    description: Shows the file before and after.
options:
  key:
    description: Address, or path on the node, of the key, or the armored key itself.
    type: str
    required: true
  fingerprint:
    description: Fingerprint that its primary key must have, 40 hexadecimal digits. Another key beside it is refused.
    type: str
    required: true
  dest:
    description: The file that the repository's source names. Its directory is made where there is none.
    type: path
    required: true
  layer:
    description: The layer whose packages the repository brings; a refusal is a verdict about it.
    type: str
    choices: [driver, toolkit]
    default: driver
author: Bedplate
"""

EXAMPLES = r"""
- name: Put the key into place
  bedplate_repository_key:
    key: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/3bf863cc.pub
    fingerprint: EB693B3035CD5710E231E123A4B469963BF863CC
    dest: /etc/apt/keyrings/bedplate-nvidia.asc
"""

RETURN = r"""
error:
  description: Code of the refusal; C(packages.mirror) for a key that cannot be read or is not the pinned one, C(io) or
    C(no_space) for a file that cannot be written.
  type: str
  returned: failure
verdicts:
  description: Why the key is refused, as one verdict; see docs/verdicts.md.
  type: list
  elements: dict
  returned: failure for the sake of the key
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.bedplate.packages.apt_query import PackageError
from ansible.module_utils.bedplate.packages.repository_key import install
from ansible.module_utils.bedplate.state.durable import StateError
from ansible.module_utils.bedplate.verdicts import sentence


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the options of the module."""
    return {
        "key": {"type": "str", "required": True, "no_log": False},
        "fingerprint": {"type": "str", "required": True},
        "dest": {"type": "path", "required": True},
        "layer": {"type": "str", "choices": ["driver", "toolkit"], "default": "driver"},
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    given = module.params
    try:
        result = install(given["dest"], given["key"], given["fingerprint"], check=module.check_mode)
    except PackageError as error:
        verdict = error.verdict(given["layer"])
        module.fail_json(msg=sentence(verdict), error=error.code, verdicts=[verdict.to_dict()])
    except StateError as error:
        module.fail_json(msg=str(error), error=error.code)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
