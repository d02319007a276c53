"""Break each detector on purpose and see whether a test fails: what no test notices is a survivor.

    python tests/mutation.py [--list] [--jobs N] [MODULE...]

Two kinds of changes to src/bedplate/node/<module>.py, one at a time, each in a copy of the tree:

- "off": the condition of an ``if`` whose body makes a verdict or a finding becomes False: this detector never speaks;
- "by hand" (``BY_HAND``): one passage is replaced by another that is wrong in a way that a reader might overlook.

The tests of the module (``TESTS``) run on the copy until the first failure; only those that run the changed line, where
any does in its own process (lines_run.py). A mutant whose tests fail, or do not end in
``LIMIT_S``, is killed. First the tests must pass on the copy unchanged, or nothing is proved. Exit code 1 when anything
survived. It takes minutes for each module: it is for the person who changes a detector, not for every commit.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NODE = Path("src/bedplate/node")
LIMIT_S = 600
MANY = 150  # tests that are named on a command line; for more the files are

# module: the tests that must notice.
TESTS = {
    "child": ["test_child"],
    "child_start": ["test_child"],
    "stack/imports": ["test_imports"],
    "stack/import_child": ["test_imports"],
    "stack/check": ["test_stack"],
    "stack/nvcc_child": ["test_stack"],
    "stack/operations": ["test_operations"],
    "stack/operation_child": ["test_operations"],
    "stack/collective": ["test_collective"],
    "stack/rank_child": ["test_collective"],
    "hardware/gpu": ["test_gpu"],
    "hardware/gpu_verdicts": ["test_host"],
    "hardware/host_verdicts": ["test_host"],
    "hardware/xid": ["test_xid"],
    "driver/judge": ["test_driver", "test_driver_files"],
    "driver/preflight": ["test_driver_preflight"],
    "driver/next_boot": ["test_driver", "test_driver_files"],
    "toolkit/check": ["test_toolkit"],
    "toolkit/layout": ["test_toolkit_layout", "test_toolkit"],
    "abi/judge": ["test_abi"],
}

# What makes a verdict: an ``if`` with one of these in its body is a detector.
SPEAKS = ("erdict(", "verdicts.append", "found.append", "found.add", "check.add(", "check.end(", "setdefault(")

# module: (old, new), each old text exactly once in the file.
BY_HAND: dict[str, list[tuple[str, str]]] = {
    "child": [
        ('"RssShmem:"', '"Shared:"'),
        ("if _stat(pid)[SESSION] == str(session):", "if pid == session:"),
        ("> memory_bytes:", "> 100 * memory_bytes:"),
        ("_signal_session(process.pid, signal.SIGTERM)", "pass"),
        ('fields[STATE] != "D" and ', ""),
        ("int(fields[START_TIME]) >= since and ", ""),
        (" and _user(pid) == user:", ":"),
        ("if fields[SESSION] == str(session):", "if False:"),
        ("thread.join(max(0.0, deadline - time.monotonic()))", "thread.join()"),
        (" and pid not in unread", ""),
        ("os.O_NOFOLLOW", "0"),
        ("_remove_stale()\n    try", "pass\n    try"),
        ("[START_TIME] == started:", "[START_TIME] != started:"),
        ("for left in _marked(path.name, None, int(started), owner, set()):", "for left in []:"),
        ("start_new_session=True", "start_new_session=False"),
        ('"-I", ', ""),
    ],
    "child_start": [
        ("(resource.RLIMIT_CORE, (0, 0))", "(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))"),
        ("resource.RLIMIT_DATA", "resource.RLIMIT_AS"),
        ("faulthandler.enable()", "pass"),
        ("prctl(PR_SET_PDEATHSIG, signal.SIGKILL)", "prctl(PR_SET_PDEATHSIG, 0)"),
    ],
    "stack/imports": [
        ("if not is_driver(name)", "if True"),
        ("if not path.startswith(inside)", "if not path.startswith('/')"),
        ("os.path.realpath(environment)", "environment"),
        ("if len(paths) > 1", "if len(paths) > 2"),
        (r'(?:-[0-9a-f]{8,})?\.so", name)', r'\.so", name)'),
        ("outcome.left_processes:\n            count", "False:\n            count"),
        ("key=lambda m: m.start()", "key=lambda m: -m.start()"),
        ("run(asking=True).result", "run(asking=False).result"),
        ("available_bytes() // IMPORT_BYTES", "100"),
    ],
    "stack/import_child": [
        ("mode=os.RTLD_NOW", "mode=os.RTLD_LAZY"),
        ("current.__cause__ or current.__context__", "current.__cause__"),
        ("answer(result)\n        stage(", "stage("),
    ],
    "stack/check": [
        ("number % 10000 // 100", "number % 1000 // 100"),
        ("wanted[1] >= minor", "wanted[1] <= minor"),
        ("return wanted >= (major, minor)", "return True"),
        ("return wanted == (major, minor)", "return wanted[0] == major"),
        ('version.partition("+")[0]', "version"),
        ("len(bases) == 1", "len(bases) <= 2"),
        ('seen != torch["cuda"]', 'seen.partition(".")[0] != torch["cuda"].partition(".")[0]'),
        ('.split(".")[:3]', '.split(".")[:2]'),
        ("len(both) > 1", "len(both) > 2"),
    ],
    "stack/operations": [
        ('found["error"] is None', "True"),
        ("first += 1\n    if not verdicts", "first += 100\n    if not verdicts"),
        ("if gpus and count < gpus", "if gpus and count > gpus"),
        ("illegal (?:memory access|instruction)", "illegal instruction"),
        ("misaligned address", "unaligned address"),
        ("no kernel image is available", "no image"),
        ("PTX was compiled with an unsupported toolchain", "PTX was compiled wrong"),
        ('answer.get("count", count)', 'answer.get("count", 0)'),
        ('"inconclusive", f"The GPU', '"fail", f"The GPU'),
    ],
    "stack/operation_child": [
        ("wrong = ~((got - want).abs() <= limit)", "wrong = ~~(~((got - want).abs() <= 2 * limit + 1))"),
        ("tolerance * float(want.abs().max())", "10 * tolerance * float(want.abs().max())"),
        ("if got.shape != want.shape", "if len(got.shape) != len(want.shape)"),
        ('if found["error"]:\n            return', "if False:\n            return"),
        ("os.kill(left, signal.SIGKILL)", "pass"),
        ("while current is not None and len(chain) < 10", "while False"),
    ],
    "stack/collective": [
        ('"all_reduce": lambda n: 2 * (n - 1) / n', '"all_reduce": lambda n: (n - 1) / n'),
        ('"all_gather": lambda n: (n - 1) / n', '"all_gather": lambda n: 1.0'),
        ("size / median / 1e9", "size / min(times) / 1e9"),
        ("times = [max(column)", "times = [min(column)"),
        ("BASELINE_SHARE * baseline", "baseline"),
        ("if busbw < limit", "if busbw <= limit"),
        ('settings["backend"] == "nccl" and ranks > 1', "ranks > 1"),
        ("min(idle) < max(0.5", "max(idle) < max(9.0"),
        ('if variables.get("NCCL_P2P_DISABLE") == "1"', "if False"),
        ("elif not occupied", "else"),
        ("run([hung], NO_P2P)", "run([hung], {})"),
        ('if second["timed_out"]:', "if False:"),
        ("not short or not (said", "not (said"),
        ('or result.get("signal") == signal.SIGBUS', ""),
        ('0 if "signal" in item or "exit_code" in item else 1', "0"),
        ("time.monotonic() > deadline:\n            return sentences", "True:\n            return sentences"),
        ('"killed" in item or "signal" in item', '"signal" in item'),
        ("itertools.combinations(range(max(", "itertools.combinations(range(min("),
    ],
    "stack/rank_child": [
        ("(rank + 1) * 0xD1B54A32D192ED03", "0xD1B54A32D192ED03"),
        ("position * 0x9E3779B97F4A7C15", "0x9E3779B97F4A7C15"),
        ("DTYPES[dtype][1] // ranks", "DTYPES[dtype][1]"),
        ("512 * 1024, 512 * 1024 + 8", "512 * 1024"),
        ("if not self.torch.equal(got, want)", "if False"),
        ("self.rank * share : (self.rank + 1) * share", ": share"),
        ("os.kill(pid, signal.SIGTERM)", "pass"),
        ("for repeat in range(1 + repeats)", "for repeat in range(max(1, repeats))"),
        ('if found["timed_out"]:\n            break', "if False:\n            break"),
        ("min(deadline, time.monotonic() + FAILURE_GRACE_S)", "deadline"),
    ],
}


@dataclass(frozen=True)
class Mutant:
    """One change: where, a name for people, and the whole changed text."""

    module: str
    name: str
    text: str
    lines: range


def off(module: str, source: str) -> list[Mutant]:
    """Return a mutant for each detector of a file, switched off."""
    found = []
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.If):
            continue
        body = "\n".join(ast.unparse(statement) for statement in node.body if not isinstance(statement, ast.If))
        if not any(word in body for word in SPEAKS):
            continue
        test = node.test
        start = sum(len(line.encode()) for line in lines[: test.lineno - 1]) + test.col_offset
        end = sum(len(line.encode()) for line in lines[: (test.end_lineno or 0) - 1]) + (test.end_col_offset or 0)
        raw = source.encode()
        # ``and`` keeps what the condition assigns or asks; the parentheses keep it one expression.
        text = (raw[:start] + b"(False and (" + raw[start:end] + b"))" + raw[end:]).decode()
        found.append(Mutant(module, f"line {test.lineno}, off: if {ast.unparse(test)[:90]}", text, lines_of(test)))
    return found


def lines_of(test: ast.expr) -> range:
    """Return the lines of an expression."""
    return range(test.lineno, (test.end_lineno or test.lineno) + 1)


def mutants(module: str) -> list[Mutant]:
    """Return all changes of a module. Raises SystemExit when one made by hand does not fit the file any more."""
    source = (ROOT / NODE / f"{module}.py").read_text(encoding="utf-8")
    found = off(module, source)
    for old, new in BY_HAND.get(module, []):
        if source.count(old) != 1:
            raise SystemExit(f"mutation.py: {module}.py has {source.count(old)} times, and not once: {old!r}")
        first = source[: source.index(old)].count("\n") + 1
        lines = range(first, first + old.count("\n") + 1)
        name = f"by hand: {old.strip()[:60]!r} -> {new.strip()[:50]!r}"
        found.append(Mutant(module, name, source.replace(old, new), lines))
    return found


def run_tests(tree: Path, tests: list[str], *options: str, **environment: str) -> tuple[bool, str]:
    """Run tests in a tree; return whether they passed, and the line that says why not."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *tests]
    # The private temporary directory takes along what a broken child leaves behind.
    with tempfile.TemporaryDirectory(prefix="bedplate-mutant-") as scratch:
        try:
            done = subprocess.run(
                [*command, f"--basetemp={scratch}/pytest"],
                cwd=tree,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False, "its tests did not end in time"
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, failures[0] if failures else done.stdout[-200:]


def copy_tree(to: Path) -> None:
    """Copy what git knows, with changes that are not committed yet, and the links as links."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source, target = ROOT / name, to / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def try_module(module: str) -> list[tuple[Mutant, bool, str]]:
    """Try every mutant of a module in a copy of its own; return (mutant, killed, by what)."""
    found = []
    with tempfile.TemporaryDirectory(prefix="bedplate-mutation-") as directory:
        tree = Path(directory)
        copy_tree(tree)
        path, out = tree / NODE / f"{module}.py", tree / "lines.json"
        everything = [f"tests/unit/{name}.py" for name in TESTS[module]]
        environment = {"PYTHONPATH": str(tree / "tests"), "LINES_FILE": str(path), "LINES_OUT": str(out)}
        passed, why = run_tests(tree, everything, "-p", "lines_run", **environment)
        if not passed:
            raise SystemExit(f"mutation.py: the tests of {module} fail without any change: {why}")
        run = {int(line): tests for line, tests in json.loads(out.read_text(encoding="utf-8")).items()}
        original = path.read_text(encoding="utf-8")
        for mutant in mutants(module):
            path.write_text(mutant.text, encoding="utf-8")
            began = time.monotonic()
            tests = list(dict.fromkeys(test for line in mutant.lines for test in run.get(line, ())))
            passed, why = run_tests(tree, tests if 0 < len(tests) <= MANY else everything)
            word = "SURVIVED" if passed else "killed"
            print(f"{word:8} {module}: {mutant.name} ({time.monotonic() - began:.0f} s) {why}", flush=True)
            found.append((mutant, not passed, why))
        path.write_text(original, encoding="utf-8")
    return found


def main() -> None:
    """Try the modules of the command line, all by default."""
    parser = argparse.ArgumentParser(description="Break each detector on purpose and see whether a test fails.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(TESTS))
    parser.add_argument("--list", action="store_true", help="show the changes, try none")
    parser.add_argument("--jobs", type=int, default=1, help="modules at a time")
    arguments = parser.parse_args()
    modules = arguments.modules or list(TESTS)
    unknown = [module for module in modules if module not in TESTS]
    if unknown:
        parser.error(f"no tests are known for {', '.join(unknown)}; known: {', '.join(TESTS)}")
    if arguments.list:
        for module in modules:
            for mutant in mutants(module):
                print(f"{module}: {mutant.name}")
        return
    with ThreadPoolExecutor(max_workers=arguments.jobs) as pool:
        results = [result for found in pool.map(try_module, modules) for result in found]
    survivors = [mutant for mutant, killed, _ in results if not killed]
    print(f"\n{len(results)} mutants, {len(results) - len(survivors)} killed, {len(survivors)} survived")
    for mutant in survivors:
        print(f"survived: {mutant.module}: {mutant.name}")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
