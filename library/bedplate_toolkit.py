#!/usr/bin/python
"""Ansible module: CUDA toolkits on a node, side by side, and the links to them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bedplate_toolkit
short_description: CUDA toolkits on a node, side by side, and the links to them
description:
  - A toolkit from NVIDIA's wheels lies in O(root)C(/toolkits) under an id of its own and is never changed there.
    C(/usr/local/cuda-13.0) is a link to it, C(/usr/local/cuda) names the default one; both move by one rename.
  - What is a directory, or a link that others made, is refused and not replaced.
version_added: "0.2.0"
author: Bedplate maintainers
options:
  action:
    description:
      - V(read) reports what is there and what O(version) consists of, and never changes anything.
      - V(prepare) makes room for building the toolkit, and removes what an interrupted build left.
      - V(layout) makes a toolkit of the wheels that were unpacked into C(site) of the build.
      - V(publish) gives the build its final name and points C(/usr/local/cuda-X.Y) at it.
      - V(switch) points C(/usr/local/cuda-X.Y) at O(target), a toolkit that is on disk.
      - V(point) points C(/usr/local/cuda) at O(target), or removes it when that is empty.
      - V(prune) removes toolkits that no link names and that are not in O(keep).
    type: str
    choices: [read, prepare, layout, publish, switch, point, prune]
    default: read
  version:
    description: The release, such as V(13.0.1). Needed by every action except point and prune.
    type: str
    default: ""
  lock:
    description: Text of the lock of the release's wheels, with O(action=read).
    type: str
    default: ""
  components:
    description: The parts of the toolkit, with O(action=read); none means all that the source has.
    type: list
    elements: str
    default: []
  packages:
    description: Report the apt packages of the release, with O(action=read).
    type: bool
    default: false
  id:
    description: Id of a toolkit from wheels, with the actions prepare, layout and publish.
    type: str
    default: ""
  target:
    description: The toolkit to point at, with the actions switch and point.
    type: str
    default: ""
  keep:
    description: Toolkits to keep with O(action=prune), by directory or by version.
    type: list
    elements: str
    default: []
  root:
    description: Directory of what Bedplate has on the node.
    type: path
    default: /opt/bedplate
  prefix:
    description: Directory of the links C(cuda-X.Y) and C(cuda).
    type: path
    default: /usr/local
attributes:
  check_mode:
    support: full
    description: Decides and reports the change, and makes none.
  diff_mode:
    support: full
    description: Shows what a link names before and after.
"""

EXAMPLES = r"""
- name: See which toolkit the lock makes, and whether it is there
  bedplate_toolkit:
    version: 13.0.1
    components: [nvcc, cudart]
    lock: "{{ lookup('ansible.builtin.file', 'toolkit-13.0.1-x86_64.lock') }}"
  register: node_toolkit

- name: Make it the default
  bedplate_toolkit:
    action: point
    target: /usr/local/cuda-13.0
"""

RETURN = r"""
toolkit:
  description: What is on the node.
  returned: action is read
  type: dict
  contains:
    path:
      description: Where the release belongs, such as C(/usr/local/cuda-13.0).
      type: str
    kind:
      description: What is there; V(absent), V(ours), V(link) or V(directory).
      type: str
    target:
      description: What the link names, or empty.
      type: str
    default_kind:
      description: What C(/usr/local/cuda) is; V(absent), V(link), V(alternatives) or V(directory).
      type: str
    default_target:
      description: What it names in the end, or empty.
      type: str
    default_names:
      description: What it names itself, or empty; with alternatives what they name.
      type: str
    default_version:
      description: The release that it names says that it is, or empty.
      type: str
    ready:
      description: Directory of the whole toolkit with the wanted id, or empty.
      type: str
    build:
      description: Directory for building it.
      type: str
    instances:
      description: The version of each toolkit from wheels, by directory.
      type: dict
    half_built:
      description: Builds that were interrupted.
      type: list
      elements: str
    free_bytes:
      description: Free space where toolkits from wheels go.
      type: int
    python:
      description: The interpreter that runs this module.
      type: str
wanted:
  description: What the lock makes of the components; empty without O(lock).
  returned: action is read
  type: dict
  contains:
    id:
      description: Id of the toolkit.
      type: str
    lock:
      description: The part of the lock that brings the components.
      type: str
    files:
      description: Names of the wheels.
      type: list
      elements: str
    bytes:
      description: Their size together.
      type: int
packages:
  description: The upstream version of each apt package, by name; empty without O(packages).
  returned: action is read
  type: dict
compiler:
  description: Whether the wanted toolkit has nvcc.
  returned: action is read
  type: bool
made:
  description: What was laid out; components with their versions, number of files, bytes.
  returned: action is layout
  type: dict
instance:
  description: Directory of the toolkit.
  returned: action is publish
  type: str
removed:
  description: What was removed; in check mode what would be.
  returned: action is prepare or prune
  type: list
  elements: str
error:
  description: Code of the refusal; one of invalid, io, missing, no_space, refused.
  returned: failure
  type: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.bedplate.state.durable import StateError
from ansible.module_utils.bedplate.toolkit.layout import Places, perform


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the options of the module."""
    actions = ["read", "prepare", "layout", "publish", "switch", "point", "prune"]
    return {
        "action": {"type": "str", "choices": actions, "default": "read"},
        "version": {"type": "str", "default": ""},
        "lock": {"type": "str", "default": ""},
        "components": {"type": "list", "elements": "str", "default": []},
        "packages": {"type": "bool", "default": False},
        "id": {"type": "str", "default": ""},
        "target": {"type": "str", "default": ""},
        "keep": {"type": "list", "elements": "str", "default": []},
        "root": {"type": "path", "default": "/opt/bedplate"},
        "prefix": {"type": "path", "default": "/usr/local"},
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    given = module.params
    try:
        result = perform(Places(given["root"], given["prefix"]), given, check=module.check_mode)
    except StateError as error:
        module.fail_json(msg=str(error), error=error.code)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
