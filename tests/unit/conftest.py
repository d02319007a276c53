"""Modules run in-process here, so that a failing test shows a traceback and not a module's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

RunModule = Callable[..., dict[str, Any]]


@pytest.fixture
def run_module(capsys: pytest.CaptureFixture[str]) -> RunModule:
    """Run library/NAME.py in this process: run_module("bedplate_state", action="read", check=True).

    Keyword arguments are the module's options; ``check`` and ``diff`` are Ansible's modes. Returns the
    module's JSON, which has ``failed: true`` when it called fail_json.
    """

    def run(name: str, *, check: bool = False, diff: bool = False, **options: Any) -> dict[str, Any]:
        module = import_module(name)
        basic.AnsibleModule  # noqa: B018  # loaded before the arguments are patched
        capsys.readouterr()
        arguments = {**options, "_ansible_check_mode": check, "_ansible_diff": diff}
        with patch_module_args(arguments), pytest.raises(SystemExit):
            module.main()
        out = capsys.readouterr().out
        result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return result

    return run
