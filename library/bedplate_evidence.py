#!/usr/bin/python
# Copyright: the Bedplate contributors. Apache-2.0 (see LICENSE).
"""Ansible module: gather on a node what explains a failure, in one archive."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: bedplate_evidence
short_description: Gather what explains a failure into one archive on the node
description:
  - Writes a C(.tar.gz) of less than 10 MB into a new private directory. It holds the verdicts, the versions and the
    lock of the generation, the loader's trace and the memory map of imports that fail, the kernel's log since the run
    began, the tree of PCI devices, C(nvidia-smi topo -m) where there is one, the journal, and a manifest.
  - What looks like a secret is left out (users in URLs, tokens, keys), and so is every environment variable that is not
    on a list of harmless ones. Links are not followed. Everything that runs has a time limit.
  - A part that cannot be had is named in the manifest with the reason, and what was cut says so.
  - The caller fetches the archive and removes its directory.
version_added: "0.1.0"
options:
  verdicts:
    description: The verdicts of the failed verification, as RV(bedplate_verify#module:verdicts).
    type: list
    elements: dict
    default: []
  reason:
    description: Why the run failed, as text.
    type: str
    default: ""
  run_id:
    description: Name of the run.
    type: str
    default: ""
  age:
    description: Seconds since the run began; the kernel's log is taken from there.
    type: float
    default: 0
  generation:
    description: Directory of the generation that fails. Empty when there is none.
    type: str
    default: ""
  state_dir:
    description: Directory of the journal.
    type: path
    default: /var/lib/bedplate
  user:
    description: The user to run traced imports as when the module runs as root. Empty stays root.
    type: str
    default: bedplate
  sysroot:
    description: Directory that stands for C(/) when the kernel's files are read. For tests.
    type: path
    default: /
  directory:
    description: Where to make the private directory. Empty means the node's place for temporary files.
    type: str
    default: ""
  trace_timeout:
    description: Seconds for each traced import.
    type: float
    default: 90
attributes:
  check_mode:
    description: Gathers nothing in check mode, and says so.
    support: full
author:
  - Bedplate contributors
"""

EXAMPLES = r"""
- name: Gather the evidence
  bedplate_evidence:
    verdicts: "{{ node_verified.verdicts }}"
    generation: /opt/bedplate/generations/cu130-torch2.11-0123456789ab
    run_id: "{{ bedplate_run.run_id }}"
  register: node_evidence

- name: Fetch it
  ansible.builtin.fetch:
    src: "{{ node_evidence.archive }}"
    dest: reports/
"""

RETURN = r"""
archive:
  description: Path of the archive on the node, or null in check mode.
  type: str
  returned: success
archive_bytes:
  description: Its size.
  type: int
  returned: success
parts:
  description: What it holds.
  type: list
  elements: dict
  returned: success
  contains:
    name:
      description: File name in the archive.
      type: str
    bytes:
      description: Size; 0 when it could not be had.
      type: int
    cut:
      description: Number of bytes that were left out.
      type: int
    note:
      description: What was cut, or why it could not be had.
      type: str
msg:
  description: What was done, one sentence.
  type: str
  returned: always
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.bedplate.evidence import Request, collect, write_archive
from ansible.module_utils.bedplate.verdicts import Verdict


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the options of the module."""
    return {
        "verdicts": {"type": "list", "elements": "dict", "default": []},
        "reason": {"type": "str", "default": ""},
        "run_id": {"type": "str", "default": ""},
        "age": {"type": "float", "default": 0},
        "generation": {"type": "str", "default": ""},
        "state_dir": {"type": "path", "default": "/var/lib/bedplate"},
        "user": {"type": "str", "default": "bedplate"},
        "sysroot": {"type": "path", "default": "/"},
        "directory": {"type": "str", "default": ""},
        "trace_timeout": {"type": "float", "default": 90},
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    given = module.params
    if module.check_mode:
        message = "No evidence is gathered in check mode."
        module.exit_json(changed=False, archive=None, archive_bytes=0, parts=[], msg=message)
    try:
        request = Request(
            verdicts=[Verdict.from_dict(verdict) for verdict in given["verdicts"]],
            reason=given["reason"],
            run_id=given["run_id"],
            age_s=given["age"],
            generation=given["generation"],
            state_dir=given["state_dir"],
            user=given["user"],
            root=given["sysroot"],
            trace_timeout_s=given["trace_timeout"],
        )
        parts = collect(request)
        path = write_archive(parts, given["directory"])
    except (KeyError, ValueError) as error:
        module.fail_json(msg=f"verdicts: this is not a list of verdicts ({error}); give those of bedplate_verify.")
    except OSError as error:
        module.fail_json(msg=f"The archive cannot be written: {error}. Free space there.")
    size = os.path.getsize(path)
    module.exit_json(
        changed=True,
        archive=path,
        archive_bytes=size,
        parts=[{"name": p.name, "bytes": len(p.data), "cut": p.cut, "note": p.note} for p in parts],
        msg=f"{path}: {len(parts)} parts, {size} bytes.",
    )


if __name__ == "__main__":
    main()
