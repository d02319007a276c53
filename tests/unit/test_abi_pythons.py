"""Module bedplate_abi as Ansible sends it, run by the Pythons that nodes have: 3.9 (RHEL 9) to 3.13."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from abi_libraries import CHECK_UNSIGNED, environment, needs_compiler

ROOT = Path(__file__).resolve().parents[2]
ANSIBLE = Path(sys.executable).with_name("ansible")

pytestmark = needs_compiler


def interpreter(version: str) -> str:
    """Return an interpreter of that version on this machine; skip the test where there is none."""
    places = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    places += sorted(Path.home().glob(f".local/share/uv/python/cpython-{version}.*/bin/python{version}"))
    found = [str(place) for place in places] + list(filter(None, [shutil.which(f"python{version}")]))
    for path in found:  # pyenv's stand-ins answer for versions that are not chosen here, with an error
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    pytest.skip(f"no Python {version} on this machine")


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.11", "3.12", "3.13"])
def test_the_module_runs(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    site = environment(tmp_path / "env", CHECK_UNSIGNED, "2.10.0")
    options = {
        "site_packages": str(site),
        "python": python,
        "index": str(ROOT / "data" / "abi" / "torch-x86_64.idx"),
        "strict": False,
    }
    command = [str(ANSIBLE), "localhost", "-i", "localhost,", "-c", "local", "-m", "bedplate_abi", "--check"]
    command += ["-a", json.dumps(options), "-e", json.dumps({"ansible_python_interpreter": python})]
    environ = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.oneline",
    }
    environ |= {
        "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1",
        "ANSIBLE_LOCAL_TEMP": str(tmp_path),
        "ANSIBLE_REMOTE_TEMP": str(tmp_path),
    }
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.partition("=> ")[2].splitlines()[0])
    verdict = result["verdicts"][0]
    assert (verdict["code"], verdict["status"]) == ("abi.undefined_symbol", "fail")
    assert verdict["evidence"]["symbols"][0]["nearest_mangled"] == CHECK_UNSIGNED
    assert verdict["evidence"]["satisfied_by"][-1] == "2.9.1"
