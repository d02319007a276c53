#!/usr/bin/python
"""Ansible module: the node's journal of generations."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bedplate_state
short_description: Journal of the environments on a node, and the switch between them
description:
  - Keeps what is live, what was live before, and what is being changed, in C(state.json), and publishes the
    local
    fact C(bedplate).
  - A generation goes live, and the node goes back, by one rename of the link C(current). A change that was
    interrupted is settled by the next run.
  - Every action except V(read) holds a lock on the node while it works. A change from V(begin) to its end
    belongs to one
    O(run_id).
version_added: "0.1.0"
author: Bedplate maintainers
options:
  action:
    description:
      - V(read) reports and never changes anything.
      - V(begin) announces a change to O(generation) and makes room for it.
      - V(layer) announces the change of driver or toolkit, or concludes it.
      - V(end) ends a run that changed no generation, and lets go what O(hold) kept.
      - V(step) notes how far the run is.
      - V(built) seals the environment that was built.
      - V(commit) makes it live, after it was verified.
      - V(fail) ends the run before its commit; what is live stays live.
      - V(rollback) goes back. In a run that committed it restores what was live before; with
        O(kind=rollback) it goes to
        O(generation) or to the previous verified one; in a run that changed nothing it does nothing.
      - V(settle) ends what an interrupted run left.
      - V(prune) removes old generations.
    type: str
    choices: [read, begin, layer, step, built, commit, end, fail, rollback, settle, prune]
    default: read
  generation:
    description:
      - Id of the generation. Needed by O(action=begin) with O(kind=provision).
      - With O(action=read), RV(clean) also asks that it is the active one.
    type: str
    default: ""
  profile:
    description: Name of the profile, kept with the generation.
    type: str
    default: ""
  target:
    description: Target of the lock, such as V(cp311-x86_64), kept with the generation.
    type: str
    default: ""
  kind:
    description: What the run does. V(layers) changes driver or toolkit and leaves the generations alone.
    type: str
    choices: [provision, rollback, layers]
    default: provision
  run_id:
    description: Identity of the run that makes the change. Needed by every action except read, settle and
      prune.
    type: str
    default: ""
  holder:
    description: Who makes the change (C(controller), C(user), C(pid), C(pid_start), C(boot_id)); printed in
      messages.
    type: dict
    default: {}
  take_over:
    description:
      - Settle the unfinished change of another run and go on. Set it only when that run is known to be dead
        or the operator
        says so.
    type: bool
    default: false
  layer:
    description: The layer that O(action=layer) is about.
    type: str
    choices: [driver, toolkit]
  phase:
    description: V(begin) before the first package or file is touched, V(done) after the layer was verified.
    type: str
    choices: [begin, done]
    default: begin
  record:
    description:
      - What the layer is changed to, with the key C(version) and what its role needs to install it again; the driver's
        C(packages) are exact versions by name.
    type: dict
    default: {}
  found:
    description: What the node had before, for a layer that Bedplate did not install. It can be gone back to.
    type: dict
    default: {}
  layers:
    description: With O(action=read), the wanted record of driver and toolkit. RV(clean) asks for them, too.
    type: dict
    default: {}
  hold:
    description: With O(action=rollback), keep the node for this run while driver and toolkit go back, until V(end).
    type: bool
    default: false
  step:
    description: Name of the step. The words commit, switch and undo are Bedplate's own.
    type: str
    default: ""
  reason:
    description: Why the run failed or goes back, one sentence.
    type: str
    default: ""
  verdicts:
    description: Verdicts of the run, kept with its record.
    type: list
    elements: dict
    default: []
  keep:
    description: How many generations O(action=prune) leaves. The protected ones count, and stay in any
      case.
    type: int
    default: 3
  root:
    description: Directory of the generations and of the link C(current).
    type: path
    default: /opt/bedplate
  state_dir:
    description: Directory of C(state.json) and of the lock.
    type: path
    default: /var/lib/bedplate
  facts_dir:
    description: Directory of the local fact C(bedplate.fact).
    type: path
    default: /etc/ansible/facts.d
  lock_timeout:
    description: Seconds to wait for the lock.
    type: float
    default: 30
attributes:
  check_mode:
    support: full
    description: Decides and reports the change, and writes nothing.
  diff_mode:
    support: full
    description: Shows the state before and after.
"""

EXAMPLES = r"""
- name: Announce the change of the driver
  bedplate_state:
    action: layer
    layer: driver
    run_id: 20261201T214928-4711
    record: {version: 580.82.07, source: nvidia, flavour: open, packages: {nvidia-open-580: 580.82.07-0ubuntu1}}

- name: Look at the node
  bedplate_state:
    generation: cu128-torch2.9.1-0123456789ab
  register: node_state

- name: Announce the change
  bedplate_state:
    action: begin
    generation: cu128-torch2.9.1-0123456789ab
    profile: cu128-torch2.9.1
    target: cp311-x86_64
    run_id: 20261201T214928-4711
    holder: {controller: deploy1, user: ops, pid: 4711}

- name: Go back to the previous verified generation
  bedplate_state:
    action: rollback
    kind: rollback
    run_id: 20261201T220000-4712
"""

RETURN = r"""
state:
  description: The whole state after the action.
  returned: success
  type: dict
  contains:
    layers:
      description: Driver and toolkit, each with what it C(is), C(was) before the run C(run_id), is on the way C(to).
      type: dict
    active:
      description: Id of the live generation, or null.
      type: str
    previous:
      description: Id of the verified generation that a rollback goes to, or null.
      type: str
    generations:
      description: Entry of each generation by id, with profile, target, status, created, verified and
        reason.
      type: dict
    intent:
      description: The change under way, or null.
      type: dict
    runs:
      description: The last 20 runs, newest last.
      type: list
      elements: dict
current:
  description: Id that the link C(current) names, or null.
  returned: success
  type: str
message:
  description: What was done or found, one sentence.
  returned: success
  type: str
settled:
  description: What was found unfinished and how it was ended, or null.
  returned: success
  type: str
switch_ms:
  description: Milliseconds that the switch took (link, rename and fsync), or null when nothing was
    switched.
  returned: success
  type: float
removed:
  description: Ids of the generations whose files were removed.
  returned: success
  type: list
  elements: str
clean:
  description: The active generation is the one C(current) names and the wanted one, verified, undamaged,
    and no change is
    under way.
  returned: action is read
  type: bool
drift:
  description: First 20 differences between the active generation and what was built.
  returned: action is read
  type: list
  elements: str
drift_counts:
  description: Number of differences by kind.
  returned: action is read
  type: dict
generation:
  description: Id of the generation that the run goes to.
  returned: action is begin
  type: str
directory:
  description: Path of its directory.
  returned: action is begin
  type: str
reused:
  description: It is complete already, so that no build is needed.
  returned: action is begin
  type: bool
manifest:
  description: Numbers of distributions (dists), files, bytes and files that differ from their RECORD.
  returned: action is built, and it was sealed now
  type: dict
to_undo:
  description: Driver and toolkit as this run found them, where it changed them, the newest first; C(record) is null
    when there was none.
  returned: action is rollback
  type: list
  elements: dict
error:
  description: Code of the refusal; one of busy, locked, corrupt, no_space, io, refused, invalid, missing.
  returned: failure, but for a question about packages
  type: str
verdicts:
  description: Why the package manager could not be asked, as one verdict of the first of O(layers).
  returned: failure of a question about packages, action is read
  type: list
  elements: dict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.bedplate.packages.apt_query import PackageError
from ansible.module_utils.bedplate.state.generations import Generations, StateError, perform
from ansible.module_utils.bedplate.state.journal import Paths
from ansible.module_utils.bedplate.verdicts import sentence


def argument_spec() -> dict[str, dict[str, Any]]:
    actions = ["read", "begin", "layer", "step", "built", "commit", "end", "fail", "rollback", "settle", "prune"]
    return {
        "action": {"type": "str", "choices": actions, "default": "read"},
        "generation": {"type": "str", "default": ""},
        "profile": {"type": "str", "default": ""},
        "target": {"type": "str", "default": ""},
        "kind": {"type": "str", "choices": ["provision", "rollback", "layers"], "default": "provision"},
        "run_id": {"type": "str", "default": ""},
        "holder": {"type": "dict", "default": {}},
        "take_over": {"type": "bool", "default": False},
        "layer": {"type": "str", "choices": ["driver", "toolkit"]},
        "phase": {"type": "str", "choices": ["begin", "done"], "default": "begin"},
        "record": {"type": "dict", "default": {}},
        "found": {"type": "dict", "default": {}},
        "layers": {"type": "dict", "default": {}},
        "hold": {"type": "bool", "default": False},
        "step": {"type": "str", "default": ""},
        "reason": {"type": "str", "default": ""},
        "verdicts": {"type": "list", "elements": "dict", "default": []},
        "keep": {"type": "int", "default": 3},
        "root": {"type": "path", "default": "/opt/bedplate"},
        "state_dir": {"type": "path", "default": "/var/lib/bedplate"},
        "facts_dir": {"type": "path", "default": "/etc/ansible/facts.d"},
        "lock_timeout": {"type": "float", "default": 30},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    given = module.params
    try:
        paths = Paths.of(given["root"], given["state_dir"], given["facts_dir"])
        node = Generations(paths, check=module.check_mode, lock_timeout_s=given["lock_timeout"])
        module.exit_json(**perform(node, given))
    except StateError as exc:
        module.fail_json(msg=str(exc), error=exc.code)
    except PackageError as exc:
        # Only layers are asked about packages, and all of them of one database: the first speaks for it.
        verdict = exc.verdict(next(iter(given["layers"])))
        module.fail_json(msg=sentence(verdict), verdicts=[verdict.to_dict()])


if __name__ == "__main__":
    main()
