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
      - The layers to verify. The checks V(driver), V(gpus) and V(node) belong to V(driver), V(toolkit) to
        V(toolkit), the others to V(stack).
    type: list
    elements: str
    choices: [driver, toolkit, stack]
    default: [driver, toolkit, stack]
  checks:
    description:
      - The checks to run, as far as their layer is among O(layers).
      - V(preflight) judges whether the driver may be changed now, V(idle) only that no process uses the GPUs,
        V(extension) builds a torch extension with the toolkit, which takes most of a minute. They run only when they
        are named.
    type: list
    elements: str
    choices: [preflight, idle, driver, gpus, node, toolkit, extension, imports, operations, collective]
    default: [driver, gpus, node, toolkit, imports, operations, collective]
  driver:
    description:
      - The driver that the node must have, as the block C(driver) of a profile.
      - Where it is not given, the driver's verdict is C(driver.not_managed) with the status V(skipped).
    type: dict
    suboptions:
      version:
        description: Exact version, such as V(580.82.07).
        type: str
        required: true
      flavour:
        description: Which kernel modules.
        type: str
        choices: [open, proprietary]
        default: open
      parameters:
        description: Parameters that a kernel module must be loaded with, by module and parameter.
        type: dict
        default: {}
      source:
        description: Where the packages come from; V(none) when they are not Bedplate's.
        type: str
        choices: [nvidia, distro, none]
        default: none
      packages:
        description: Exact versions of the installed packages by name.
        type: dict
        default: {}
  gpu_wait:
    description: Seconds that the check V(preflight) waits for processes to leave the GPUs; none is ever killed.
    type: float
    default: 0
  toolkit:
    description:
      - The CUDA toolkit that the node must have, as the block C(toolkit) of a profile.
      - Where it is not given, the toolkit's verdict is C(toolkit.not_managed) with the status V(skipped).
    type: dict
    suboptions:
      version:
        description: Exact version, such as V(13.0.1).
        type: str
        required: true
      path:
        description: Where it is installed; empty means C(/usr/local/cuda-X.Y).
        type: str
        default: ""
      source:
        description: Where it comes from; V(none) when it is not Bedplate's.
        type: str
        choices: [nvidia, wheels, none]
        default: none
      default:
        description: Whether C(/usr/local/cuda) must name it.
        type: bool
        default: false
      components:
        description: The parts that are installed; none means all.
        type: list
        elements: str
        default: []
      host_compiler:
        description: Path of the compiler that nvcc shall call; empty means the gcc of C(PATH).
        type: str
        default: ""
  expect:
    description:
      - What the node must have, as the block C(expect) of a profile.
      - Without C(gpus), the GPUs are not judged.
    type: dict
    suboptions:
      gpus:
        description: How many GPUs.
        type: int
      gpu_ids:
        description: The PCI ids that a GPU may have, such as V(10de:2bb5). An empty list allows all.
        type: list
        elements: str
        default: []
      arch:
        description: The architecture of the GPUs, such as V(sm_120).
        type: str
      bar1_min_mib:
        description: Least BAR1 of each GPU in MiB.
        type: int
      pcie_width:
        description: Least lanes of each GPU's link.
        type: int
      ecc:
        description: Whether ECC must be on.
        type: bool
      iommu:
        description: The mode that the kernel must run the IOMMU in.
        type: str
        choices: [any, "off", pt]
        default: any
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
  operations:
    description: Names of the operations to run on each GPU, as in C(verify.operations) of a profile.
    type: list
    elements: str
    default: []
  operation_timeout:
    description: Seconds for each operation.
    type: float
    default: 180
  collective:
    description: The collective check, as the block C(verify.collective) of a profile.
    type: dict
    suboptions:
      backend:
        description:
          - The backend of torch.distributed. V(nccl) puts rank I on GPU I; V(gloo) runs on the CPU, and says nothing
            about GPUs. There is no falling back from one to the other.
        type: str
        choices: [gloo, nccl]
        default: nccl
      ranks:
        description: The numbers of ranks to communicate over, in turn; a pass at 8 proves nothing about 2.
        type: list
        elements: int
        default: [2]
      pairs:
        description: Whether each pair of GPUs communicates by itself, too.
        type: bool
        default: false
      operations:
        description: What is called, the first one first.
        type: list
        elements: str
        choices: [all_reduce, all_gather, reduce_scatter]
        default: [all_reduce]
      max_bytes:
        description: Size in bytes of the largest message; the smallest is 8.
        type: int
        default: 67108864
      repeats:
        description: How often the largest message is timed, after a warm-up.
        type: int
        default: 5
      min_busbw_gbps:
        description:
          - Least bus bandwidth in GB/s (10^9 bytes) at the largest message; 0 for none. It is judged for V(nccl) only.
        type: float
        default: 0
      warn_busbw_gbps:
        description: Bus bandwidth in GB/s below which the verdict warns; 0 for none.
        type: float
        default: 0
      baseline_busbw_gbps:
        description: What this chassis reached before, in GB/s; a tenth less is a warning. 0 for none.
        type: float
        default: 0
      timeout_s:
        description: Seconds for each number of ranks, and for the import of torch before the first.
        type: int
        default: 180
  collective_when:
    description:
      - V(idle) skips operations and collective, saying so, when a process uses the GPUs, so that a busy node is safe.
    type: str
    choices: [always, idle]
    default: always
  baseline:
    description:
      - Verdicts from before the change. What failed there already is marked C(preexisting) and fails nothing now.
    type: list
    elements: dict
    default: []
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
  sysroot:
    description: Directory that stands for C(/) where sysfs, procfs and the kernel's files are read; for tests.
    type: path
    default: /
  simulated:
    description: Whether the node simulates its GPUs. The result and every verdict then say so.
    type: bool
    default: false
  strict:
    description:
      - Fail the task, with the first failing verdict as its message, when a verdict stands in the way of going
        live, that is when its status is none of V(pass), V(warn) and V(skipped) and O(baseline) did not have it.
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
    collective: {backend: nccl, ranks: [2, 4, 8], min_busbw_gbps: 15}

- name: See whether all GPUs are there
  bedplate_verify:
    layers: [driver]
    expect:
      gpus: 8
      gpu_ids: ["10de:2bb1", "10de:2bb5"]

- name: Report what is wrong on a container node and go on
  bedplate_verify:
    generation: /opt/bedplate/current
    collective: {backend: gloo}
    expect: {gpus: 8}
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
from ansible.module_utils.bedplate.child import ChildError, child_failed
from ansible.module_utils.bedplate.verdicts import failing, sentence, worst
from ansible.module_utils.bedplate.verify import summary, verify


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the options of the module."""
    layers = ["driver", "toolkit", "stack"]
    checks = ["driver", "gpus", "node", "toolkit", "imports", "operations", "collective"]
    choices = ["preflight", "idle", *checks[:4], "extension", *checks[4:]]
    return {
        "layers": {"type": "list", "elements": "str", "choices": layers, "default": layers},
        "checks": {"type": "list", "elements": "str", "choices": choices, "default": checks},
        "driver": {"type": "dict", "options": _driver()},
        "gpu_wait": {"type": "float", "default": 0},
        "toolkit": {"type": "dict", "options": _toolkit()},
        "expect": {"type": "dict", "apply_defaults": True, "options": _expect()},
        "generation": {"type": "path"},
        "imports": {"type": "list", "elements": "str", "default": ["torch"]},
        "import_timeout": {"type": "float", "default": 180},
        "operations": {"type": "list", "elements": "str", "default": []},
        "operation_timeout": {"type": "float", "default": 180},
        "collective": {"type": "dict", "apply_defaults": True, "options": _collective()},
        "collective_when": {"type": "str", "choices": ["always", "idle"], "default": "always"},
        "baseline": {"type": "list", "elements": "dict", "default": []},
        "user": {"type": "str", "default": "bedplate"},
        "tools": {"type": "path", "default": "/opt/bedplate/tools"},
        "sysroot": {"type": "path", "default": "/"},
        "simulated": {"type": "bool", "default": False},
        "strict": {"type": "bool", "default": True},
    }


def _driver() -> dict[str, dict[str, Any]]:
    return {
        "version": {"type": "str", "required": True},
        "flavour": {"type": "str", "choices": ["open", "proprietary"], "default": "open"},
        "parameters": {"type": "dict", "default": {}},
        "source": {"type": "str", "choices": ["nvidia", "distro", "none"], "default": "none"},
        "packages": {"type": "dict", "default": {}},
    }


def _toolkit() -> dict[str, dict[str, Any]]:
    return {
        "version": {"type": "str", "required": True},
        "path": {"type": "str", "default": ""},
        "source": {"type": "str", "choices": ["nvidia", "wheels", "none"], "default": "none"},
        "default": {"type": "bool", "default": False},
        "components": {"type": "list", "elements": "str", "default": []},
        "host_compiler": {"type": "str", "default": ""},
    }


def _expect() -> dict[str, dict[str, Any]]:
    return {
        "gpus": {"type": "int"},
        "gpu_ids": {"type": "list", "elements": "str", "default": []},
        "arch": {"type": "str"},
        "bar1_min_mib": {"type": "int"},
        "pcie_width": {"type": "int"},
        "ecc": {"type": "bool"},
        "iommu": {"type": "str", "choices": ["any", "off", "pt"], "default": "any"},
    }


def _collective() -> dict[str, dict[str, Any]]:
    operations = ["all_reduce", "all_gather", "reduce_scatter"]
    return {
        "backend": {"type": "str", "choices": ["gloo", "nccl"], "default": "nccl"},
        "ranks": {"type": "list", "elements": "int", "default": [2]},
        "pairs": {"type": "bool", "default": False},
        "operations": {"type": "list", "elements": "str", "choices": operations, "default": ["all_reduce"]},
        "max_bytes": {"type": "int", "default": 67108864},
        "repeats": {"type": "int", "default": 5},
        "min_busbw_gbps": {"type": "float", "default": 0},
        "warn_busbw_gbps": {"type": "float", "default": 0},
        "baseline_busbw_gbps": {"type": "float", "default": 0},
        "timeout_s": {"type": "int", "default": 180},
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    try:
        verdicts = verify(module.params)
    except ChildError as error:
        verdicts = [child_failed(error, layer="node", subject="the verification")]
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
