#!/usr/bin/python
# Copyright: the Bedplate contributors. Apache-2.0 (see LICENSE).
"""Ansible module: prove that a node's GPUs, imports and collectives work."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: bedplate_verify
short_description: Prove that the stack of a node imports and communicates
description:
  - Asks NVML which GPUs there are, imports the packages of a generation of the Python stack, and has processes
    all-reduce and compares every sum exactly.
  - Everything runs in children that can be killed, each with a time limit and an environment built from nothing;
    what belongs to the stack runs as an unprivileged user. Nothing on the node is changed.
  - Each check answers with a verdict. A layer that is absent or not managed answers V(skipped) with the reason,
    never V(pass).
version_added: "0.1.0"
options:
  layers:
    description:
      - The layers to verify. The check V(gpus) belongs to V(driver), the checks V(imports) and V(collective) to
        V(stack).
    type: list
    elements: str
    choices: [driver, toolkit, stack]
    default: [driver, toolkit, stack]
  checks:
    description: The checks to run, as far as their layer is among O(layers).
    type: list
    elements: str
    choices: [gpus, imports, collective]
    default: [gpus, imports, collective]
  generation:
    description:
      - Directory of the generation to verify; it holds C(venv) and the file C(environment).
      - Where it is not given or does not exist, the stack's verdict is C(stack.absent) with the status V(skipped).
    type: path
  imports:
    description: Names of the Python modules to import, each in an interpreter of its own.
    type: list
    elements: str
    default: [torch]
  import_timeout:
    description: Seconds for each import.
    type: float
    default: 180
  backend:
    description:
      - The backend of torch.distributed. V(nccl) puts rank I on GPU I; V(gloo) runs on the CPU, and says nothing
        about GPUs. There is no falling back from one to the other.
    type: str
    choices: [gloo, nccl]
    default: nccl
  ranks:
    description: The numbers of ranks to all-reduce over, in turn; a pass at 8 proves nothing about 2.
    type: list
    elements: int
    default: [2]
  max_bytes:
    description: Size in bytes of the largest message; the smallest is 8.
    type: int
    default: 67108864
  min_busbw_gbps:
    description:
      - Least bus bandwidth in GB/s (10^9 bytes) at the largest message; 0 for none. It is judged for V(nccl) only.
    type: float
    default: 0
  collective_timeout:
    description: Seconds for each number of ranks, and for the import of torch before the first.
    type: float
    default: 180
  expected_gpus:
    description: How many GPUs NVML must see. Where it is not given, the GPUs are not judged.
    type: int
  expected_gpu_ids:
    description: The PCI ids that a GPU may have, such as V(10de:2bb5). An empty list allows all.
    type: list
    elements: str
    default: []
  expected_driver_version:
    description: The exact version of the driver. Empty allows all.
    type: str
    default: ""
  user:
    description:
      - The user to run imports and collectives as when the module runs as root, so that no code of the stack runs
        as root. Empty stays root.
    type: str
    default: bedplate
  tools:
    description: Directory of the node's tools; it holds C(lib/pynvml.py).
    type: path
    default: /opt/bedplate/tools
  simulated:
    description: Whether the node simulates its GPUs. The result and every verdict then say so.
    type: bool
    default: false
  strict:
    description:
      - Fail the task, with the first failing verdict as its message, when a verdict's status is none of V(pass),
        V(warn) and V(skipped).
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
- name: Prove a new generation before it goes live
  bedplate_verify:
    layers: [stack]
    generation: /opt/bedplate/generations/cu130-torch2.11-0123456789ab
    imports: [torch, sgl_kernel, flashinfer]
    backend: nccl
    ranks: [2, 4, 8]
    min_busbw_gbps: 15

- name: See whether all GPUs are there
  bedplate_verify:
    layers: [driver]
    expected_gpus: 8
    expected_gpu_ids: ["10de:2bb1", "10de:2bb5"]

- name: Report what is wrong on a container node and go on
  bedplate_verify:
    generation: /opt/bedplate/current
    backend: gloo
    expected_gpus: 8
    simulated: true
    strict: false
  register: node_verified
"""

RETURN = r"""
verdicts:
  description: One dictionary for each check, in the order driver, toolkit, stack.
  type: list
  elements: dict
  returned: always
  contains:
    code:
      description: What was checked and found, such as C(import.undefined_symbol).
      type: str
    status:
      description: V(pass), V(warn), V(fail), V(skipped), V(inconclusive), V(needs-reboot) or V(needs-reset).
      type: str
    layer:
      description: The layer that answers for it.
      type: str
    subject:
      description: What was checked, such as C(sgl_kernel).
      type: str
    message:
      description: One sentence saying what was found.
      type: str
    evidence:
      description: What was measured.
      type: dict
    action:
      description: The next step; empty when there is nothing to do.
      type: str
    simulated:
      description: Present, and true, when the node simulates its GPUs.
      type: bool
status:
  description: The gravest status of all verdicts; V(skipped) when no check ran.
  type: str
  returned: always
  sample: pass
simulated:
  description: The option O(simulated).
  type: bool
  returned: always
msg:
  description: The first failing verdict as C(subject), message and action; else the number of checks by status.
  type: str
  returned: always
  sample: "5 checks: 5 pass"
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.bedplate.child import ChildError
from ansible.module_utils.bedplate.verdicts import failing, sentence, worst
from ansible.module_utils.bedplate.verify import summary, verify


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the options of the module."""
    layers, checks = ["driver", "toolkit", "stack"], ["gpus", "imports", "collective"]
    return {
        "layers": {"type": "list", "elements": "str", "choices": layers, "default": layers},
        "checks": {"type": "list", "elements": "str", "choices": checks, "default": checks},
        "generation": {"type": "path"},
        "imports": {"type": "list", "elements": "str", "default": ["torch"]},
        "import_timeout": {"type": "float", "default": 180},
        "backend": {"type": "str", "choices": ["gloo", "nccl"], "default": "nccl"},
        "ranks": {"type": "list", "elements": "int", "default": [2]},
        "max_bytes": {"type": "int", "default": 67108864},
        "min_busbw_gbps": {"type": "float", "default": 0},
        "collective_timeout": {"type": "float", "default": 180},
        "expected_gpus": {"type": "int"},
        "expected_gpu_ids": {"type": "list", "elements": "str", "default": []},
        "expected_driver_version": {"type": "str", "default": ""},
        "user": {"type": "str", "default": "bedplate"},
        "tools": {"type": "path", "default": "/opt/bedplate/tools"},
        "simulated": {"type": "bool", "default": False},
        "strict": {"type": "bool", "default": True},
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    try:
        verdicts = verify(module.params)
    except ChildError as error:
        module.fail_json(msg=f"The verification could not start: {error}")
    failures = failing(verdicts)
    result = {
        "verdicts": [verdict.to_dict() for verdict in verdicts],
        "status": worst(verdicts),
        "simulated": module.params["simulated"],
        "msg": sentence(failures[0]) if failures else summary(verdicts),
    }
    if failures and module.params["strict"]:
        module.fail_json(**result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
