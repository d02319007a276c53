#!/usr/bin/python
"""Ansible module: judge a package transaction before it happens."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bedplate_packages
short_description: Judge an exact package transaction before it happens
description:
  - Asks apt what installing exactly the given versions would do, and refuses what is more, less or other than that.
  - Changes nothing, in check mode or not. It needs root only where apt's lists need it.
  - Debian and Ubuntu. On RPM systems (dnf 4) versions are C([epoch:]version-release), the option O(pinned) is refused,
    and nothing has been tried on a live host.
attributes:
  check_mode:
    support: full
    description: The module never changes anything.
  diff_mode:
    support: full
    description: Lists the packages and versions before and after.
options:
  action:
    description:
      - V(simulate) judges the transaction.
      - V(resolve) only finds the exact versions.
      - V(installed) reports which of the packages are installed.
      - V(assert) judges, after a change, whether the packages are installed at their exact versions, and with O(pinned)
        whether apt keeps them there.
    type: str
    choices: [simulate, resolve, installed, assert]
    default: simulate
  layer:
    description: The layer that the packages belong to.
    type: str
    choices: [driver, toolkit]
    required: true
  packages:
    description:
      - Name to version of every package of the layer. A version is exact, such as V(580.82.07-0ubuntu1), or only its
        upstream part, such as V(580.82.07), when exactly one version of the package has it.
    type: dict
    required: true
  site:
    description: Part of the address of the repository that has the versions; empty for any.
    type: str
    default: ""
  preview:
    description:
      - Judge as if this repository were configured, before it is added, and in check mode on a node that does not have
        it. Its lists are fetched into a private directory, under the pinned key; the node's own are not touched.
      - A repository that cannot be used is a verdict C(packages.mirror), like any other.
    type: dict
    suboptions:
      uris:
        description: Address of the repository.
        type: str
        required: true
      suites:
        description: Its suite.
        type: str
        default: ./
      key:
        description: Address, or path on the node, of its key, or the armored key itself.
        type: str
        required: true
      fingerprint:
        description: Fingerprint of that key, 40 hexadecimal digits.
        type: str
        required: true
      preferences:
        description: Text of a preferences file that would be there too.
        type: str
        default: ""
      without:
        description: >-
          Names, with shell wildcards, of files of sources and preferences that would not be there any more.
        type: list
        elements: str
        default: []
  own:
    description: Patterns of names of the layer's own packages, with shell wildcards; empty for the built-in ones.
    type: list
    elements: str
    default: []
  allow_downgrade:
    description: Accept that packages go down to an older version.
    type: bool
    default: false
  allow_kernel_change:
    description: Accept, with a warning, that the transaction changes a kernel.
    type: bool
    default: false
  pinned:
    description: With the action V(assert), check that apt's preferences keep the versions.
    type: bool
    default: false
  timeout:
    description: Seconds that one command may take.
    type: float
    default: 60
  strict:
    description: Fail when a verdict stands in the way.
    type: bool
    default: true
author: Bedplate
"""

EXAMPLES = r"""
- name: Judge the move to a driver
  bedplate_packages:
    layer: driver
    packages:
      nvidia-driver-cuda: 580.82.07-1
      nvidia-kernel-open-dkms: 580.82.07-1
    site: developer.download.nvidia.com
  register: driver_plan

- name: Judge it on a node that does not have the repository yet
  bedplate_packages:
    layer: driver
    packages:
      nvidia-driver-cuda: 580.82.07
      nvidia-kernel-open-dkms: 580.82.07
    preview:
      uris: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/
      key: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/3bf863cc.pub
      fingerprint: EB693B3035CD5710E231E123A4B469963BF863CC
      preferences: |
        Package: src:*nvidia*:any src:cuda-drivers:any
        Pin: version 580.82.07-1
        Pin-Priority: 1000
  check_mode: true

- name: See whether the packages are there and kept
  bedplate_packages:
    action: assert
    layer: driver
    packages: "{{ driver_plan.packages }}"
    pinned: true
"""

RETURN = r"""
packages:
  description: Name to exact version of every package that has one.
  type: dict
  returned: action is simulate, resolve or assert
installed:
  description: Name to version of those of the packages that are installed now.
  type: dict
  returned: action is installed, simulate or assert
plan:
  description: What the transaction would do; empty when it could not be simulated.
  type: dict
  returned: action is simulate
  contains:
    steps:
      description: One entry for each package, with action (install, upgrade, downgrade, reinstall, remove), name,
        before, after and origin.
      type: list
      elements: dict
    download_bytes:
      description: Size of the files to download.
      type: int
    disk_bytes:
      description: Growth of what is installed.
      type: int
verdicts:
  description: Why the transaction must not happen, or one verdict C(packages.ok); keys as of M(bedplate_verify).
  type: list
  elements: dict
  returned: action is simulate, resolve or assert
changed:
  description: With the action V(simulate), whether the transaction would change anything; else false.
  type: bool
  returned: always
msg:
  description: The first verdict that stands in the way as C(subject), message and action; else what would change.
  type: str
  returned: action is simulate, resolve or assert
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.bedplate.packages.apt_query import PackageError
from ansible.module_utils.bedplate.packages.manage import perform
from ansible.module_utils.bedplate.verdicts import sentence


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the options of the module."""
    actions = ["simulate", "resolve", "installed", "assert"]
    return {
        "action": {"type": "str", "choices": actions, "default": "simulate"},
        "layer": {"type": "str", "choices": ["driver", "toolkit"], "required": True},
        "packages": {"type": "dict", "required": True},
        "site": {"type": "str", "default": ""},
        "preview": {
            "type": "dict",
            "options": {
                "uris": {"type": "str", "required": True},
                "suites": {"type": "str", "default": "./"},
                "key": {"type": "str", "required": True, "no_log": False},
                "fingerprint": {"type": "str", "required": True},
                "preferences": {"type": "str", "default": ""},
                "without": {"type": "list", "elements": "str", "default": []},
            },
        },
        "own": {"type": "list", "elements": "str", "default": []},
        "allow_downgrade": {"type": "bool", "default": False},
        "allow_kernel_change": {"type": "bool", "default": False},
        "pinned": {"type": "bool", "default": False},
        "timeout": {"type": "float", "default": 60},
        "strict": {"type": "bool", "default": True},
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    try:
        result, refused = perform(module.params)
    except PackageError as error:
        verdict = error.verdict(module.params["layer"])
        module.fail_json(msg=sentence(verdict), verdicts=[verdict.to_dict()])
    if refused and module.params["strict"]:
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
