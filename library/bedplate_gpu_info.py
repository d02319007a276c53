#!/usr/bin/python
# Copyright: the Bedplate contributors. Apache-2.0 (see LICENSE).
"""Ansible module: report a node's GPUs, as NVML, the PCI bus and the kernel show them."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: bedplate_gpu_info
short_description: Report the GPUs as NVML, the PCI bus and the kernel show them
description:
  - Asks NVML for the driver version and the GPUs, and reads from sysfs, procfs and the kernel log what surrounds them.
    Both are done in child processes with a time limit, since a broken driver or device may never answer.
  - It reports and never judges; an error of NVML is part of the report, and does not fail the task. The module
    M(bedplate_verify) judges.
version_added: "0.1.0"
options:
  tools:
    description: Directory of the node's tools; it holds C(lib/pynvml.py).
    type: path
    default: /opt/bedplate/tools
  root:
    description: Directory that stands for C(/) when sysfs, procfs and the kernel log are read; for tests.
    type: path
    default: /
  timeout:
    description: Seconds after which NVML, or the reading of the node, is killed.
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

- name: Show the GPUs on the bus and their drivers
  ansible.builtin.debug:
    msg: "{{ node_gpus.host.gpus | items2dict(key_name='bus_id', value_name='driver') }}"
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
      description: Its name, such as C(NVML_ERROR_DRIVER_NOT_LOADED); C(TIMEOUT), C(CRASH) or C(PYNVML_MISSING).
      type: str
    text:
      description: The words for it.
      type: str
driver_version:
  description: The version of the driver, or null.
  type: str
  returned: always
  sample: 580.82.07
nvml_version:
  description: The version of NVML, or null.
  type: str
  returned: always
  sample: 13.580.82.07
cuda_version:
  description: The newest CUDA of the driver as major * 1000 + minor * 10, or null.
  type: str
  returned: always
  sample: "13000"
count:
  description: How many GPUs NVML has; null when it could not be asked.
  type: int
  returned: always
gpus:
  description:
    - One dictionary for each GPU that NVML has. What a GPU does not support is null.
    - A GPU that answers with an error has only C(index), C(error) and, as far as they are known, C(bus_id) and
      C(pci_id).
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
      description: The PCI address, with eight digits of domain.
      type: str
    pci_id:
      description: Vendor and device, such as C(10de:2bb5).
      type: str
    compute_capability:
      description: Such as C(12.0).
      type: str
    vbios:
      description: Version of the VBIOS.
      type: str
    memory_bytes:
      description: Total memory.
      type: int
    memory_used_bytes:
      description: Memory in use.
      type: int
    bar1_bytes:
      description: Size of BAR1, the window into the memory.
      type: int
    ecc:
      description: Whether ECC is on.
      type: bool
    ecc_pending:
      description: Whether ECC is on after the next reset.
      type: bool
    ecc_errors:
      description:
        - Numbers of errors C(corrected) and C(uncorrected) since the driver was loaded, and with C(_total) over the
          GPU's life.
      type: dict
    remapped_rows:
      description:
        - Rows of memory, C(correctable) and C(uncorrectable), and whether a remapping is C(pending) or has C(failed).
      type: dict
    retired_pages:
      description:
        - Pages of memory, C(single_bit) and C(double_bit), and whether one is C(pending); GPUs before Ampere.
      type: dict
    pcie_width:
      description: Current number of PCIe lanes.
      type: int
    pcie_width_max:
      description: Largest number of PCIe lanes.
      type: int
    pcie_gen:
      description: Current generation of the link; low while the GPU rests.
      type: int
    pcie_gen_max:
      description: Largest generation of the link.
      type: int
    pcie_replays:
      description: How often the link has sent something again.
      type: int
    persistence:
      description: Whether persistence mode is on.
      type: bool
    temperature_c:
      description: Degrees Celsius.
      type: int
    throttle:
      description: Why the clocks are held down, in words; empty when they are not.
      type: list
      elements: str
    processes:
      description: Ids of the processes on the GPU.
      type: list
      elements: int
    utilization:
      description: Per cent.
      type: int
    recovery_action:
      description: What the driver says must be done to recover the GPU, such as C(none) or C(gpu-reset).
      type: str
    unanswered:
      description: NVML functions that gave another error than "not supported", with the error's name.
      type: dict
host:
  description: What sysfs, procfs and the kernel log show; works without a driver.
  type: dict
  returned: always
  contains:
    error:
      description: Why not everything could be read, or null.
      type: str
    gpus:
      description:
        - One dictionary for each NVIDIA display device on the PCI bus, with C(bus_id), C(pci_id), C(class), C(driver),
          C(answers), C(width), C(width_max), C(speed_gts), C(speed_max_gts), C(bars), C(numa_node), C(aer),
          C(iommu_group), C(iommu_type) and C(bridges), the bus ids of the bridges above it from the root port down.
      type: list
      elements: dict
    bridges:
      description:
        - Those bridges, with C(bus_id), C(pci_id), their link, C(aer), and C(acs), the access control services.
      type: list
      elements: dict
    cmdline:
      description: The kernel's command line.
      type: str
    iommu:
      description:
        - The C(mode) in which the IOMMU treats the GPUs (off, pt, translated, vfio, unknown), C(units), C(settings).
      type: dict
    modules:
      description: Version by name of the loaded ones among nvidia, nvidia_uvm, nouveau and vfio_pci.
      type: dict
    hmm:
      description: Whether the loaded nvidia_uvm uses HMM; null when it is not loaded.
      type: bool
    shm:
      description: Size and free space of /dev/shm, C(total_bytes) and C(free_bytes).
      type: dict
    memlock_bytes:
      description: How much memory a process may lock; null for no limit.
      type: int
    kernel_log:
      description:
        - The C(source), whether it is C(complete) since boot and the C(reason) why not; C(xids), C(init_failures) and
          C(link_down), each with C(bus_id), C(count), C(first_s), C(last_s) and C(text).
      type: dict
    forward_compat:
      description: Directories of the loader's path with a libcuda for forward compatibility.
      type: list
      elements: str
    users:
      description:
        - Processes that have a device of the driver open, with C(pid), C(comm), C(user), C(devices), C(daemon).
      type: list
      elements: dict
simulated:
  description: The option O(simulated).
  type: bool
  returned: always
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.bedplate.child import ChildError
from ansible.module_utils.bedplate.hardware.gpu import query
from ansible.module_utils.bedplate.hardware.host import inspect


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the options of the module."""
    return {
        "tools": {"type": "path", "default": "/opt/bedplate/tools"},
        "root": {"type": "path", "default": "/"},
        "timeout": {"type": "float", "default": 60},
        "simulated": {"type": "bool", "default": False},
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    options = module.params
    try:
        found = query(options["tools"], timeout_s=options["timeout"])
        host = inspect(options["root"], timeout_s=options["timeout"])
    except ChildError as error:
        module.fail_json(msg=f"The node could not be looked at: {error}")
    module.exit_json(changed=False, simulated=options["simulated"], **found, host=host)


if __name__ == "__main__":
    main()
