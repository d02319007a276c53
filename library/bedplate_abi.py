#!/usr/bin/python
# Copyright: the Bedplate contributors. Apache-2.0 (see LICENSE).
"""Ansible module: check the ABI of an installed Python environment without running it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: bedplate_abi
short_description: Check that every extension of a Python environment would load
description:
  - Reads the symbol tables of the shared objects below a C(site-packages) directory and follows the dynamic
    loader's rules, for a process that imported torch first. Nothing is loaded and nothing is run.
  - Reports undefined symbols, missing libraries, and versions of glibc and of the C++ runtime that are missing.
version_added: "0.1.0"
options:
  generation:
    description: Directory of a generation (it holds C(venv)) or of a virtual environment.
    type: path
  site_packages:
    description: The C(site-packages) directory itself.
    type: path
  python:
    description: The interpreter of the environment; found beside O(site_packages) when it is not given.
    type: path
  index:
    description:
      - Path on the node of the index of torch exports. With it the verdicts name the torch releases that would do.
    type: path
  arch:
    description:
      - Compute capability of the node's GPUs as a number, such as V(120); of several SM directories the one for it
        is checked. Without it, the newest one.
    type: int
  simulated:
    description: Whether the node simulates its GPUs. The result and every verdict then say so.
    type: bool
    default: false
  strict:
    description: Fail the task with the first sentence when a verdict fails.
    type: bool
    default: true
attributes:
  check_mode:
    description: Reads only; the same in check mode.
    support: full
author:
  - Bedplate contributors
"""

EXAMPLES = r"""
- name: Check the new generation before anything imports it
  bedplate_abi:
    generation: /opt/bedplate/generations/cu130-torch2.11-0123456789ab
    index: /opt/bedplate/tools/abi/torch-x86_64.idx
"""

RETURN = r"""
verdicts:
  description: The verdicts, gravest first; one C(abi.ok) when nothing is wrong.
  type: list
  elements: dict
  returned: always
status:
  description: The gravest status.
  type: str
  returned: always
  sample: pass
checked:
  description: Number of files judged.
  type: int
  returned: always
apart:
  description: Files this node would never load, with the reason.
  type: list
  elements: dict
  returned: always
driver:
  description: Libraries expected from the driver, with the number of symbols they must bring.
  type: dict
  returned: always
simulated:
  description: The option O(simulated).
  type: bool
  returned: always
duration_ms:
  description: Time of the check in milliseconds.
  type: int
  returned: always
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.bedplate.abi.check import check_environment
from ansible.module_utils.bedplate.abi.exports import IndexFormatError, TorchIndex
from ansible.module_utils.bedplate.abi.installed import site_packages_of
from ansible.module_utils.bedplate.verdicts import failing, sentence, simulated


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the options of the module."""
    return {
        "generation": {"type": "path"},
        "site_packages": {"type": "path"},
        "python": {"type": "path"},
        "index": {"type": "path"},
        "arch": {"type": "int"},
        "simulated": {"type": "bool", "default": False},
        "strict": {"type": "bool", "default": True},
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec=argument_spec(),
        required_one_of=[("generation", "site_packages")],
        mutually_exclusive=[("generation", "site_packages")],
        supports_check_mode=True,
    )
    options = module.params
    try:
        site = options["site_packages"] or site_packages_of(options["generation"])
        index = TorchIndex.load(options["index"]) if options["index"] else None
        report = check_environment(site, python=options["python"], index=index, arch=options["arch"])
    except (OSError, IndexFormatError) as error:
        module.fail_json(msg=f"The ABI check could not start: {error}")
    if options["simulated"]:
        report.verdicts = simulated(report.verdicts)
    failures = failing(report.verdicts)
    message = sentence(failures[0]) if failures else report.verdicts[-1].message
    if failures and options["strict"]:
        module.fail_json(msg=message, simulated=options["simulated"], **report.to_dict())
    module.exit_json(changed=False, msg=message, simulated=options["simulated"], **report.to_dict())


if __name__ == "__main__":
    main()
