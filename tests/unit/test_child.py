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


def test_a_zombie_grandchild_holds_nobody_up_and_is_no_process_left(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        """
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            os.close(read_end)
            zombie = os.fork()
            if zombie == 0:
                os._exit(0)
            while open(f"/proc/{zombie}/stat").read().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
            os.write(write_end, str(zombie).encode())
            os.close(write_end)
            time.sleep(60)
        os.close(write_end)
        answer(int(os.read(read_end, 20)))
        """,
    )
    assert outcome.left_processes == 1  # the zombie's parent; a zombie runs nothing
    assert outcome.elapsed_s < 5
    assert not alive(outcome.result)


STUCK = """
#include <signal.h>
#include <unistd.h>
int main(void) {
    /* A parent waits for its vfork child in uninterruptible sleep: state D, as one stuck in a driver. */
    if (vfork() == 0) { sleep(60); _exit(0); }
    return 0;
}
"""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of the processes whose environment was read."""
    pids: list[int] = []
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "environ":
            pids.append(int(path.parent.name))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    return pids


@pytest.fixture
def stuck(tmp_path: Path) -> str:
    """A program that goes to uninterruptible sleep."""
    (tmp_path / "stuck.c").write_text(STUCK)
    subprocess.run(["cc", "-o", tmp_path / "stuck", tmp_path / "stuck.c"], check=True)
    return str(tmp_path / "stuck")


START_STUCK = """
process = subprocess.Popen([{!r}], start_new_session={})
while open(f"/proc/{{process.pid}}/stat").read().rpartition(")")[2].split()[0] != "D":
    time.sleep(0.01)
answer(process.pid)
"""


def test_what_is_in_uninterruptible_sleep_is_found_without_reading_its_memory(
    tmp_path: Path, read: list[int], stuck: str
) -> None:
    outcome = run(tmp_path, START_STUCK.format(stuck, False))
    assert outcome.left_processes >= 1
    assert outcome.result not in read
    assert not alive(outcome.result)


def test_what_is_in_uninterruptible_sleep_elsewhere_is_not_read(tmp_path: Path, read: list[int], stuck: str) -> None:
    """Its child, which has the same environment and sleeps as anybody does, gives it away."""
    outcome = run(tmp_path, START_STUCK.format(stuck, True))
    assert read
    assert outcome.result not in read
    assert not alive(outcome.result)


def test_nobody_is_read_who_cannot_be_the_probes(tmp_path: Path, read: list[int]) -> None:
    """Not what ran before it, and not what is in its session, which is known to be its own."""
    before = subprocess.Popen(["sleep", "60"], start_new_session=True)
    time.sleep(0.05)  # the kernel counts in hundredths of a second
    try:
        outcome = run(tmp_path, "pid = os.fork()\nif pid == 0:\n    time.sleep(60)\nanswer(pid)")
        assert outcome.left_processes == 1
        assert not {before.pid, os.getpid(), outcome.result} & set(read)
        assert before.poll() is None
    finally:
        before.kill()
        before.wait()


def test_a_process_that_ends_while_it_is_looked_at_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a file of /proc that was opened before its process ended gives ESRCH."""
    process = subprocess.Popen(["sleep", "60"])
    assert child._user(process.pid) == os.geteuid()
    real = Path.read_text

    def read_text(path: Path, **kwargs: str) -> str:
        with path.open() as stream:
            process.kill()
            process.wait()
            return stream.read()

    monkeypatch.setattr(Path, "read_text", read_text)
    assert child._user(process.pid) is None
    monkeypatch.setattr(Path, "read_text", real)
    assert child._user(process.pid) is None


@as_root
def test_other_users_are_not_read(tmp_path: Path, read: list[int]) -> None:
    body = "os.path.exists('go') or time.sleep(0.5)\nanswer(1)"
    noise = subprocess.Popen(["sh", "-c", "while :; do setsid sleep 0.4; done"])
    try:
        assert run(tmp_path, body, user="nobody", python="/usr/bin/python3").result == 1
        assert not read
        assert run(tmp_path, body).result == 1
        assert read  # of the same user, since the probe, in a session of its own: only its environment tells
    finally:
        noise.kill()
        noise.wait()


def test_an_environment_that_cannot_be_read_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is locked for ever, by a call into a driver that does not come back. Here the reading sleeps."""
    read: list[int] = []
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "environ" and "stuck-one" in Path(path.parent, "cmdline").read_text():
            read.append(int(path.parent.name))
            time.sleep(8)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    outcome = run(
        tmp_path,
        """
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        pids = [subprocess.Popen([*command, name], start_new_session=True).pid for name in ("stuck-one", "other")]
        time.sleep(0.3)
        answer(pids)
        """,
    )
    stuck, other = outcome.result
    try:
        assert outcome.elapsed_s < 5
        assert read == [stuck]  # and not again in the next round
        assert not alive(other)
    finally:
        os.kill(stuck, 9)


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
        "open('result.json', 'w').write('[' * 200_000)",
    ],
)
def test_a_forged_result_file_is_no_answer(tmp_path: Path, body: str) -> None:
    outcome = run(tmp_path, body)
    assert outcome.result is None
    assert outcome.exit_code == 0


def test_more_stages_than_any_probe_has_are_not_read(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        """
        stage('long', 'x' * 100_000)
        answer(1)
        for number in range(3000):
            open(f'stage-{number}', 'w').write('y' * 100_000)
        """,
    )
    assert outcome.result == 1
    assert len(outcome.stages) == child.STAGES_LIMIT
    assert {len(text) for text in outcome.stages.values()} == {child.STAGE_LIMIT}


def test_a_probe_that_removes_its_directory_has_answered_nothing(tmp_path: Path) -> None:
    outcome = run(tmp_path, "import shutil\nanswer(1)\nstage('a', 'b')\nshutil.rmtree(os.getcwd())")
    assert (outcome.exit_code, outcome.result, outcome.stages) == (0, None, {})


def test_memory_is_limited(tmp_path: Path) -> None:
    outcome = run(tmp_path, "x = []\nwhile True: x.append(bytearray(1 << 24))", memory_bytes=1 << 28)
    assert outcome.exit_code == 1
    assert "MemoryError" in outcome.stderr


HOLD = """
        import mmap
        held = mmap.mmap(-1, 150 << 20, flags=mmap.MAP_{kind} | mmap.MAP_ANONYMOUS)
        for at in range(0, len(held), 4096):
            held[at] = 1
        """


@pytest.mark.parametrize("kind", ["SHARED", "PRIVATE"])
def test_memory_of_all_processes_together_is_limited(tmp_path: Path, kind: str) -> None:
    """Each of three is within the limit of one process; together they are not."""
    body = "for _ in range(2):\n    if os.fork() == 0:\n        break\n"
    body += textwrap.dedent(HOLD.format(kind=kind)) + "time.sleep(30)"
    outcome = run(tmp_path, body, memory_bytes=400 << 20)
    assert outcome.memory_exceeded
    assert (outcome.signal, outcome.timed_out, outcome.left_processes) == ("SIGKILL", False, 0)
    assert outcome.ending() == "used more memory than it may, and was killed"
    assert outcome.elapsed_s < 10


def test_address_space_is_not_limited(tmp_path: Path) -> None:
    """CUDA reserves far more of it than it uses (PROT_NONE), and must still start."""
    outcome = run(
        tmp_path,
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        reserved = libc.mmap(None, 1 << 40, 0, 0x4022, -1, 0)  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
        answer(reserved not in (None, ctypes.c_void_p(-1).value))
        """,
        memory_bytes=1 << 28,
    )
    assert outcome.result is True


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
def test_a_process_of_the_probe_user_cannot_get_a_file_of_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports are checked several at once: package code runs as the probe's user while the next directory is made."""
    roots = tmp_path / "roots"
    roots.write_text("root's alone")
    seen: list[Path] = []
    real = os.chown

    def chown(path: Path, user: int, group: int, **kwargs: bool) -> None:
        real(path, user, group, **kwargs)
        if Path(path).is_dir():  # from now on it is the user's: what is in it can be anything at any time
            seen.append(Path(path))
            for file in Path(path).iterdir():
                file.unlink()
                file.symlink_to(roots)

    monkeypatch.setattr(os, "chown", chown)
    run(tmp_path, "answer(1)", user="nobody", python="/usr/bin/python3")
    assert seen
    assert roots.stat().st_uid == 0


@as_root
def test_an_unknown_user_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="the user nosuchuser does not exist here"):
        run(tmp_path, "answer(1)", user="nosuchuser")


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="/no/python cannot be started"):
        run(tmp_path, "answer(1)", python="/no/python")


def test_no_room_for_the_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(ChildError, match=r"there is no place for a probe in .*/absent"):
        run(tmp_path, "answer(1)")


def test_a_child_that_cannot_be_started_is_a_verdict() -> None:
    verdict = child.child_failed(ChildError("no python"), layer="stack", subject="torch")
    assert (verdict.code, verdict.status, verdict.layer) == ("node.child_failed", "fail", "stack")
    assert verdict.message == "It could not be checked: no python."


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


def test_what_a_killed_caller_left_is_removed_by_the_next_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lived_on = tmp_path / "lived_on"
    body = (
        f"if os.fork() == 0:\n    os.setsid()\n    open({str(lived_on)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    probe(tmp_path, body)
    caller = (
        f"import sys; sys.path[:0] = [{str(Path(child.__file__).parents[2])!r}, {str(tmp_path)!r}]; "
        "import the_probe; from bedplate.node.child import run_probe; "
        "run_probe(the_probe, {}, python=sys.executable, timeout_s=60)"
    )
    process = subprocess.Popen([sys.executable, "-c", caller], env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 20
    while not (lived_on.exists() and lived_on.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (running,) = tmp_path.glob("bedplate-probe-*")
    foreign = tmp_path / "bedplate-probe-of-somebody"
    foreign.mkdir()
    assert run(tmp_path, "answer(1)").result == 1
    assert running.exists()  # its caller lives
    process.kill()
    process.wait()
    assert alive(int(lived_on.read_text()))
    assert running.exists()
    assert run(tmp_path, "answer(1)").result == 1
    assert not alive(int(lived_on.read_text()))
    assert list(tmp_path.glob("bedplate-probe-*")) == [foreign]


def left_behind(directory: Path, pid: str = "1", started: str = "7", namespace: str = "") -> Path:
    """Return a path that is named as the private directory of a process that is gone."""
    namespace = namespace or os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return directory / f"{child.PREFIX}{namespace}-{pid}-{started}-abcd1234"


@pytest.mark.parametrize("names", [{"pid": "²"}, {"started": "²"}, {"pid": "\u0661"}, {"pid": ""}, {"started": "7-7"}])
def test_a_name_that_is_nearly_one_of_ours_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: dict[str, str]
) -> None:
    """Anybody can make a directory where the private ones are."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left_behind(tmp_path, **names).mkdir()
    assert run(tmp_path, "answer(1)").result == 1
    assert left_behind(tmp_path, **names).exists()


def test_only_a_directory_is_removed_as_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "mine").mkdir()
    left_behind(tmp_path, "1").symlink_to(tmp_path / "mine")
    left_behind(tmp_path, "2").write_text("")
    os.mkfifo(left_behind(tmp_path, "3"))
    assert run(tmp_path, "answer(1)").result == 1
    assert len(list(tmp_path.iterdir())) == 5  # and the_probe.py


@as_root
def test_what_another_user_has_named_as_ours_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither root's time nor root's stack is for a tree that somebody else has made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directories = [left_behind(tmp_path, started=str(user)) for user in (1, 2)]
    for user, directory in enumerate(directories, 1):
        directory.mkdir()
        os.chown(directory, user, user)
    run(tmp_path, "answer(1)", user=pwd.getpwuid(2).pw_name, python="/usr/bin/python3")
    assert [directory.exists() for directory in directories] == [True, False]


def test_a_tree_deeper_than_the_stack_is_removed(tmp_path: Path) -> None:
    body = """
    answer(os.getcwd())
    for _ in range(2 * sys.getrecursionlimit()):
        os.mkdir("d")
        os.chdir("d")
    """
    outcome = run(tmp_path, body)
    assert outcome.exit_code == 0
    assert not Path(outcome.result).exists()


def test_environment_file(tmp_path: Path) -> None:
    path = tmp_path / "environment"
    path.write_text("# comment\n; too\n\nA=1\nB='two words'\nC=\"x=y\"\nD=\nnonsense\n E = f\n=g\n")
    assert read_environment(path) == {"A": "1", "B": "two words", "C": "x=y", "D": "", "E": " f"}
    assert read_environment(tmp_path / "missing") == {}
