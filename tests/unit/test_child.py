"""Every misbehaviour here is a real process that misbehaves."""

from __future__ import annotations

import importlib.util
import os
import pwd
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType

import pytest

from bedplate.node import child
from bedplate.node.child import ChildError, Outcome, read_environment, run_probe

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a probe as another user")


def probe(tmp_path: Path, body: str) -> ModuleType:
    """Return a probe module whose main has the given body."""
    path = tmp_path / "the_probe.py"
    imports = "import os, signal, subprocess, sys, time"
    path.write_text(
        f"{imports}\n\ndef main(config, answer, stage):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
    )
    spec = importlib.util.spec_from_file_location("the_probe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(tmp_path: Path, body: str, **kwargs: object) -> Outcome:
    arguments = {"python": sys.executable, "timeout_s": 20.0, "config": {}, **kwargs}
    return run_probe(probe(tmp_path, body), arguments.pop("config"), **arguments)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_config_goes_in_and_the_last_answer_comes_out(tmp_path: Path) -> None:
    outcome = run(tmp_path, "answer(1); answer(config['n'] + 1); stage('a', 'half')", config={"n": 41})
    assert outcome.result == 42
    assert outcome.stages == {"a": "half"}
    assert (outcome.exit_code, outcome.signal, outcome.timed_out, outcome.left_processes) == (
        0,
        None,
        False,
        0,
    )
    assert outcome.ending() == "ended with exit code 0"


def test_what_a_package_prints_is_no_answer(tmp_path: Path) -> None:
    outcome = run(tmp_path, """print('{"result": 1}'); print("x", file=sys.stderr); sys.exit(0)""")
    assert outcome.result is None
    assert outcome.exit_code == 0
    assert (outcome.stdout, outcome.stderr) == ('{"result": 1}\n', "x\n")


def test_output_is_capped_at_the_end_and_a_flood_does_not_block(tmp_path: Path) -> None:
    outcome = run(tmp_path, "os.write(1, b'x' * 5_000_000 + b'the end'); answer(1)")
    assert outcome.result == 1
    assert len(outcome.stdout) == child.OUTPUT_LIMIT
    assert outcome.stdout.endswith("xthe end")


def test_a_hang_is_killed_and_tells_where_it_was(tmp_path: Path) -> None:
    outcome = run(tmp_path, "stage('x', 'asleep')\ntime.sleep(60)", timeout_s=1.0)
    assert outcome.timed_out
    assert outcome.signal == "SIGTERM"
    assert outcome.stages == {"x": "asleep"}
    assert "the_probe" in outcome.stderr or "in main" in outcome.stderr
    assert 1.0 <= outcome.elapsed_s < 3.5
    assert "did not end in time" in outcome.ending()


def test_a_hang_that_ignores_sigterm_is_killed_too(tmp_path: Path) -> None:
    outcome = run(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)", timeout_s=0.5)
    assert outcome.timed_out
    assert outcome.signal == "SIGKILL"
    assert outcome.elapsed_s < 0.5 + child.TERM_GRACE_S + 2


def test_a_flood_without_end_is_killed(tmp_path: Path) -> None:
    outcome = run(tmp_path, "while True: os.write(1, b'x' * 65536)", timeout_s=0.5)
    assert outcome.timed_out
    assert outcome.elapsed_s < 4


def test_a_signal_has_its_name_and_the_fault_handler_its_traceback(tmp_path: Path) -> None:
    outcome = run(tmp_path, "import ctypes\nctypes.string_at(0)")
    assert outcome.signal == "SIGSEGV"
    assert outcome.exit_code is None
    assert "Segmentation fault" in outcome.stderr
    assert outcome.ending() == "died by SIGSEGV"


@pytest.mark.parametrize("leave", ["", "os.setsid()"], ids=["in the session", "in its own session"])
def test_what_forks_and_lives_on_with_open_pipes_is_killed(tmp_path: Path, leave: str) -> None:
    outcome = run(
        tmp_path,
        f"""
        pid = os.fork()
        if pid == 0:
            {leave}
            time.sleep(60)
        answer(pid)
        time.sleep(0.3)
        """,
    )
    assert outcome.left_processes == 1
    assert outcome.elapsed_s < 5
    assert not alive(outcome.result)


def test_closed_pipes_do_not_end_the_wait(tmp_path: Path) -> None:
    outcome = run(tmp_path, "os.close(1); os.close(2); time.sleep(0.5); answer('late')")
    assert outcome.result == "late"


def test_ending_early_without_an_answer(tmp_path: Path) -> None:
    outcome = run(tmp_path, "os._exit(0)")
    assert (outcome.result, outcome.exit_code) == (None, 0)


@pytest.mark.parametrize(
    "body",
    [
        "open('result.json', 'w').write('{{{')",
        "os.mkfifo('result.json')",
        "os.mkfifo('result.json'); os.fork() or (os.open('result.json', os.O_RDWR), time.sleep(9))",
        "os.symlink('/etc/passwd', 'result.json')",
        "open('result.json', 'wb').write(b'\\xff\\xfe')",
        "os.mkdir('result.json')",
    ],
)
def test_a_forged_result_file_is_no_answer(tmp_path: Path, body: str) -> None:
    outcome = run(tmp_path, body)
    assert outcome.result is None
    assert outcome.exit_code == 0


def test_memory_is_limited(tmp_path: Path) -> None:
    outcome = run(tmp_path, "x = []\nwhile True: x.append(bytearray(1 << 24))", memory_bytes=1 << 28)
    assert outcome.exit_code == 1
    assert "MemoryError" in outcome.stderr


def test_no_core_dump_and_first_to_go_when_memory_runs_out(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        """
        import resource
        answer([list(resource.getrlimit(resource.RLIMIT_CORE)), open('/proc/self/oom_score_adj').read()])
        """,
    )
    assert outcome.result == [[0, 0], "1000\n"]


def test_the_environment_is_built_from_nothing_and_the_caches_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    outcome = run(
        tmp_path,
        "answer([dict(os.environ), os.getcwd(), sys.flags.isolated])",
        environment={"NCCL_DEBUG": "WARN", "TRITON_CACHE_DIR": "/srv/live"},
    )
    variables, directory, isolated = outcome.result
    assert isolated
    assert "SECRET_TOKEN" not in variables
    assert "LD_PRELOAD" not in variables
    assert variables["NCCL_DEBUG"] == "WARN"
    assert variables["HOME"] == directory
    for name in child.CACHE_VARIABLES:
        assert variables[name].startswith(directory), name
    assert not Path(directory).exists()


@as_root
def test_root_runs_probes_as_the_given_user(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        "answer([os.getuid(), os.getgid(), os.getgroups(), os.access('/etc/shadow', os.R_OK)])",
        user="nobody",
        python="/usr/bin/python3",
    )
    nobody = pwd.getpwnam("nobody")
    assert outcome.result == [nobody.pw_uid, nobody.pw_gid, [nobody.pw_gid], False], outcome.stderr


@as_root
def test_another_user_can_be_asked_under_a_tight_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        outcome = run(tmp_path, "answer(os.getuid())", user="nobody", python="/usr/bin/python3")
    finally:
        os.umask(before)
    assert outcome.result == pwd.getpwnam("nobody").pw_uid, outcome.stderr


@as_root
def test_an_unknown_user_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="the user nosuchuser does not exist here"):
        run(tmp_path, "answer(1)", user="nosuchuser")


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="/no/python cannot be started"):
        run(tmp_path, "answer(1)", python="/no/python")


def test_a_probe_dies_with_its_caller(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    probe(tmp_path, f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)")
    caller = (
        f"import sys; sys.path[:0] = [{str(Path(child.__file__).parents[2])!r}, {str(tmp_path)!r}]; "
        "import the_probe; from bedplate.node.child import run_probe; "
        "run_probe(the_probe, {}, python=sys.executable, timeout_s=60)"
    )
    # The killed caller leaves its directory behind: here, in a place that pytest removes.
    process = subprocess.Popen([sys.executable, "-c", caller], env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(pid_file.read_text())
    assert alive(pid)
    process.kill()
    process.wait()
    time.sleep(0.2)
    assert not alive(pid)


def test_environment_file(tmp_path: Path) -> None:
    path = tmp_path / "environment"
    path.write_text("# comment\n; too\n\nA=1\nB='two words'\nC=\"x=y\"\nD=\nnonsense\n E = f\n=g\n")
    assert read_environment(path) == {"A": "1", "B": "two words", "C": "x=y", "D": "", "E": " f"}
    assert read_environment(tmp_path / "missing") == {}
