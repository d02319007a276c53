"""verify.yml, its report, its evidence and the timer, on real nodes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from testbed import ROOT, Node

pytestmark = pytest.mark.node

GOOD = "tiny-good"
BROKEN = (
    "python3 -m zipfile -e /srv/wheels/torch-2.10.0+tiny*.whl /opt/bedplate/current/venv/lib/python3*/site-packages"
)
TIMER = "bedplate-verify.timer"
PROM = "/var/lib/prometheus/node-exporter/bedplate.prom"


def records(reports: Path) -> dict[str, dict[str, Any]]:
    """Return what the only run below a directory recorded, by host."""
    (run,) = reports.iterdir()
    return {path.parent.name: json.loads(path.read_text()) for path in run.glob("*/verdicts.json")}


def codes(record: dict[str, Any], *statuses: str) -> set[str]:
    return {verdict["code"] for verdict in record["verdicts"] if verdict["status"] in statuses}


def report(reports: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("bedplate"), "report", "--reports", reports]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def tree(node: Node) -> str:
    """Return names, sizes and times of all that Bedplate has on the node."""
    return node.sh("find /opt/bedplate /var/lib/bedplate -name __pycache__ -prune -o -printf '%p %s %T@\n' | sort")


def test_a_sound_node_passes_and_nothing_on_it_changes(live: Node, tmp_path: Path) -> None:
    before = tree(live)
    play = live.play("verify.yml", GOOD, bedplate_reports=str(tmp_path))
    assert play.code == 0, play.output
    assert " changed=0 " in play.output
    assert tree(live) == before
    record = records(tmp_path)[live.name]
    assert (record["outcome"], record["generation"], record["simulated"]) == ("verified", live.current(), True)
    assert {"stack.drift", "stack.profile", "abi.ok", "import.ok", "collective.ok", "gpu.count"} <= codes(
        record, "pass"
    )
    assert not codes(record, "fail", "warn", "inconclusive")
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*/*")} == {0o700}
    assert not list(tmp_path.rglob("evidence*"))
    assert report(tmp_path).returncode == 0


def test_every_fault_of_every_host_is_reported_with_its_evidence(live: Node, second: Node, tmp_path: Path) -> None:
    live.sh(BROKEN)
    live.sh("echo 'HF_TOKEN=hunter2' >> /opt/bedplate/current/environment")
    before = tree(live)
    both = f"{live.name},{second.name}"
    play = live.play("verify.yml", GOOD, "--limit", both, bedplate_reports=str(tmp_path))
    assert play.code == 2, play.output
    assert play.output.count(" changed=0 ") == 2
    assert tree(live) == before
    assert live.sh("ls -d /tmp/bedplate* /var/tmp/bedplate* 2>/dev/null || true") == ""

    found = records(tmp_path)
    # The first fault keeps no check from running: the collective does not need the kernels.
    assert codes(found[live.name], "fail") == {"stack.drift", "abi.undefined_symbol", "import.undefined_symbol"}
    assert "collective.ok" in codes(found[live.name], "pass")
    assert codes(found[second.name], "fail") >= {"stack.absent"}
    assert {host["outcome"] for host in found.values()} == {"failed"}

    shown = report(tmp_path)
    assert shown.returncode == 1
    assert "2 of 2 hosts failed" in shown.stdout
    assert "FAIL  sgl_kernel  import.undefined_symbol (stack)" in shown.stdout
    assert "Provision it: playbooks/site.yml" in shown.stdout

    (path,) = tmp_path.glob(f"*/{live.name}/evidence.tar.gz")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size < 10_000_000
    with tarfile.open(path) as archive:
        parts = {
            member.name.removeprefix("evidence/"): archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }
    assert set(parts) >= {
        "verdicts.json", "versions.json", "requirements.lock", "profile.json", "environment.json", "state.json",
        "node.json", "pci.txt", "loader-1-sgl_kernel.txt", "maps-1-sgl_kernel.txt", "manifest.json",
    }  # fmt: skip
    assert b"undefined symbol: _ZN3c104cuda29c10_cuda_check_implementation" in parts["loader-1-sgl_kernel.txt"]
    assert b"libtorch" in parts["maps-1-sgl_kernel.txt"]
    assert b"torch 2.10.0+tiny" in parts["versions.json"]
    assert b"--hash=sha256:" in parts["requirements.lock"]
    assert json.loads(parts["state.json"])["active"] == live.current()
    assert not [name for name, data in parts.items() if b"hunter2" in data]


PATCH = r"""
import glob, sys
(path,) = glob.glob("/opt/bedplate/current/venv/lib/python3*/site-packages/torch/distributed.py")
mark = '    \"\"\"Replace the elements on every rank by the sum over all ranks.\"\"\"\n'
text = open(path).read()
assert mark in text
open(path, "w").write(text.replace(mark, mark + sys.argv[1]))
"""


def patch(node: Node, code: str) -> None:
    """Have the live torch run something at the start of its all-reduce."""
    node.sh(f"python3 -c {shlex.quote(PATCH)} {shlex.quote(code)}")


# As NCCL does: a segment is made, which any full file system allows, and then its pages are touched.
TOUCH_SHM = """    import mmap
    with open(f"/dev/shm/bedplate-test-{_rank}", "wb+") as stream:
        stream.truncate(8 << 20)
        segment = mmap.mmap(stream.fileno(), 8 << 20)
        for at in range(0, 8 << 20, 4096):
            segment[at] = 1
"""


def test_a_rank_that_segfaults_and_an_import_that_prints_and_exits_0(live: Node, tmp_path: Path) -> None:
    patch(live, "    if _rank == 1:\n        __import__('ctypes').string_at(0)\n")
    live.sh(
        "cd /opt/bedplate/current/venv/lib/python3*/site-packages/sgl_kernel && "
        "echo 'import os; print(\"ok\", flush=True); os._exit(0)' > __init__.py"
    )
    play = live.play("verify.yml", GOOD, "--tags", "imports,collective", bedplate_reports=str(tmp_path))
    assert play.code == 2, play.output
    record = records(tmp_path)[live.name]
    failed = {verdict["code"]: verdict["message"] for verdict in record["verdicts"] if verdict["status"] == "fail"}
    assert failed.keys() == {"stack.drift", "import.crash", "collective.rank_failed"}
    assert failed["collective.rank_failed"].startswith("Rank 1 died by SIGSEGV (all-reduce of 8 bytes")
    assert "exit code 0" in failed["import.crash"]


def test_a_full_shared_memory_is_the_nodes_fault(live: Node, tmp_path: Path) -> None:
    patch(live, TOUCH_SHM)
    live.sh("fallocate -l $(($(stat -f -c '%f * %S' /dev/shm) - 1048576)) /dev/shm/bedplate-test-full")
    try:
        play = live.play("verify.yml", GOOD, "--tags", "collective", bedplate_reports=str(tmp_path))
    finally:
        live.sh("rm -f /dev/shm/bedplate-test-*")
    assert play.code == 2, play.output
    (verdict,) = [v for v in records(tmp_path)[live.name]["verdicts"] if v["code"] == "collective.shm_full"]
    assert (verdict["status"], verdict["layer"]) == ("fail", "node")
    assert "MiB free" in verdict["message"]


def test_tags_choose_the_checks(live: Node, tmp_path: Path) -> None:
    play = live.play("verify.yml", GOOD, "--tags", "imports", bedplate_reports=str(tmp_path))
    assert play.code == 0, play.output
    found = {verdict["code"].partition(".")[0] for verdict in records(tmp_path)[live.name]["verdicts"]}
    assert found == {"import", "stack"}


def test_skipped_tags_leave_their_checks_out_and_the_others_in(live: Node, tmp_path: Path) -> None:
    play = live.play("verify.yml", GOOD, "--skip-tags", "collective,abi", bedplate_reports=str(tmp_path))
    assert play.code == 0, play.output
    found = {verdict["code"].partition(".")[0] for verdict in records(tmp_path)[live.name]["verdicts"]}
    assert found >= {"import", "gpu", "stack", "driver"}
    assert not found & {"collective", "operation", "abi"}


def test_another_profile_than_the_inventorys_is_a_warning(live: Node, tmp_path: Path) -> None:
    play = live.play("verify.yml", "tiny-next", "--tags", "abi", bedplate_reports=str(tmp_path))
    assert play.code == 0, play.output
    assert "The inventory asks for tiny-next-" in play.output
    assert codes(records(tmp_path)[live.name], "warn") == {"stack.profile"}


def test_a_generation_that_cannot_be_verified_fails_with_its_reason(live: Node, tmp_path: Path) -> None:
    live.sh("rm /opt/bedplate/current/profile.json")
    play = live.play("verify.yml", GOOD, bedplate_reports=str(tmp_path))
    assert play.code == 2, play.output
    record = records(tmp_path)[live.name]
    assert record["outcome"] == "failed"
    assert "profile.json" in record["reason"]
    assert "run.task_failed" in codes(record, "fail")
    assert all(verdict["action"] for verdict in record["verdicts"] if verdict["status"] == "fail")
    assert list(tmp_path.rglob("evidence.tar.gz"))


def test_the_timer_writes_metrics_and_goes_away_again(live: Node) -> None:
    play = live.play("monitor.yml", GOOD, bedplate_monitor=True)
    assert play.code == 0, play.output
    assert live.sh(f"systemctl is-active {TIMER}; systemctl is-enabled {TIMER}") == "active\nenabled"
    live.sh("systemctl start bedplate-verify.service")
    metrics = live.sh(f"cat {PROM}")
    assert f'bedplate_profile_info{{generation="{live.current()}",profile="{GOOD}",target="cp311-x86_64"}} 1' in metrics
    assert 'bedplate_verdict{code="import.ok",layer="stack",subject="sgl_kernel",status="pass"} 1' in metrics
    assert "bedplate_failing_verdicts 0" in metrics.splitlines()
    assert 'bedplate_verdict{code="abi.ok",layer="stack",' in metrics
    assert "collective" not in metrics
    assert live.sh(f"stat -c %a {PROM}") == "644"

    live.sh(BROKEN)
    live.sh("systemctl start bedplate-verify.service")
    metrics = live.sh(f"cat {PROM}")
    fault = 'bedplate_verdict{code="import.undefined_symbol",layer="stack",subject="sgl_kernel",status="fail"} 1'
    assert fault in metrics.splitlines()
    assert 'bedplate_verdict{code="abi.undefined_symbol",layer="stack",' in metrics
    assert "bedplate_failing_verdicts 3" in metrics.splitlines()

    again = live.play("monitor.yml", GOOD, bedplate_monitor=True)
    assert " changed=0 " in again.output
    gone = live.play("monitor.yml", GOOD, bedplate_monitor=False)
    assert gone.code == 0, gone.output
    assert (
        live.sh(f"systemctl is-active {TIMER}; ls {PROM} /etc/systemd/system/bedplate-*; true", check=False)
        == "inactive"
    )
