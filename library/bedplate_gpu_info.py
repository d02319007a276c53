#!/usr/bin/python
# Copyright: the Bedplate contributors. Apache-2.0 (see LICENSE).
"""Ansible module: report the GPUs that NVML sees."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: bedplate_gpu_info
short_description: Report the GPUs that NVML sees
description:
  - Asks NVML, in a child process with a time limit, for the driver version and the GPUs.
  - It reports and never judges; an error of NVML is part of the report, and does not fail the task. The module
    M(bedplate_verify) judges.
version_added: "0.1.0"
options:
  tools:
    description: Directory of the node's tools; it holds C(lib/pynvml.py).
    type: path
    default: /opt/bedplate/tools
  timeout:
    description: Seconds after which a call that does not come back is killed.
    type: float
    default: 60
  simulated:
    description: Whether the node simulates its GPUs. The result then says so.
    type: bool
    default: false
attributes:
  check_mode:
    description: Reads only; the same in check mode.
    support: full
author:
  - Bedplate contributors
"""

EXAMPLES = r"""
- name: Look at the GPUs
  bedplate_gpu_info:
  register: node_gpus
"""

RETURN = r"""
error:
  description: Why NVML could not be asked, or null.
  type: dict
  returned: always
  contains:
    code:
      description: NVML's number; null when NVML was not reached.
      type: int
    name:
      description: Its name, such as C(NVML_ERROR_DRIVER_NOT_LOADED); C(TIMEOUT), C(CRASH) or
      C(PYNVML_MISSING). type: str
    text:
      description: The words for it.
      type: str
driver_version:
  description: The version of the driver, or null.
  type: str
  returned: always
  sample: 580.82.07
gpus:
  description: One dictionary for each GPU. A GPU that answers with an error has only C(index) and C(error).
  type: list
  elements: dict
  returned: always
  contains:
    index:
      description: NVML's index.
      type: int
    error:
      description: As above.
      type: dict
    name:
      description: The product's name.
      type: str
    uuid:
      description: NVML's identifier of this device.
      type: str
    bus_id:
      description: The PCI address.
      type: str
    pci_id:
      description: Vendor and device, such as C(10de:2bb5).
      type: str
    memory_bytes:
      description: Total memory; null where it is not supported.
      type: int
    ecc:
      description: Whether ECC is on; null where it is not supported.
      type: bool
    pcie_width:
      description: Current number of PCIe lanes; null where it is not supported.
      type: int
    pcie_width_max:
      description: Largest number of PCIe lanes; null where it is not supported.
      type: int
simulated:
  description: The option O(simulated).
  type: bool
  returned: always
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.bedplate.child import ChildError
from ansible.module_utils.bedplate.gpu import query


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the options of the module."""
    return {
        "tools": {"type": "path", "default": "/opt/bedplate/tools"},
        "timeout": {"type": "float", "default": 60},
        "simulated": {"type": "bool", "default": False},
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    options = module.params
    try:
        found = query(options["tools"], timeout_s=options["timeout"])
    except ChildError as error:
        module.fail_json(msg=f"NVML could not be asked: {error}")
    module.exit_json(changed=False, simulated=options["simulated"], **found)


if __name__ == "__main__":
    main()
