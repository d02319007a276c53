"""The command that the timer runs on a node, and the file it runs from."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tiny_stack
from hypothesis import given
from hypothesis import strategies as st

import bedplate_verify
from bedplate.controller.node_code import node_code
from bedplate.node import __main__ as command
from bedplate.node.packages.apt_query import PackageError
from bedplate.node.verdicts import Verdict

ID_A = "tiny-0123456789ab"
LABEL = r'[a-z_]+="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"([a-z_:]+)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")


def parse(text: str) -> dict[str, dict[str, float]]:
    """Parse the exposition format as strictly as the collector does; return {name: {labels: value}}."""
    found: dict[str, dict[str, float]] = {}
    described: set[str] = set()
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# "):
            _, kind, name, *_ = line.split(" ")
            assert kind in ("HELP", "TYPE")
            described.add(f"{kind} {name}")
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        name, labels, value = match.groups()
        assert {f"HELP {name}", f"TYPE {name}"} <= described, "described before its first sample"
        series = found.setdefault(name, {})
        assert labels not in series, "two samples of one series"
        series[labels or ""] = float(value)
    return found


VERDICTS = st.lists(
    st.builds(
        Verdict,
        code=st.sampled_from(["gpu.count", "import.ok"]),
        status=st.sampled_from(["pass", "fail"]),
        layer=st.sampled_from(["driver", "stack"]),
        subject=st.text(alphabet=st.sampled_from('a"\\\n{},= '), max_size=6),
        message=st.just("."),
    )
)


@given(VERDICTS)
def test_any_verdicts_are_metrics_that_parse(verdicts: list[Verdict]) -> None:
    live = {"generation": "g", "profile": 'p"', "target": ""}
    found = parse(command.exposition(command.samples(verdicts, live, 1.5, 0.25)))
    assert len(found.get("bedplate_verdict", {})) == len({(v.code, v.layer, v.subject, v.status) for v in verdicts})
    assert found["bedplate_failing_verdicts"] == {"": sum(v.status == "fail" for v in verdicts)}
    assert found["bedplate_profile_info"] == {'generation="g",profile="p\\"",target=""': 1}
    assert found["bedplate_last_verification_timestamp_seconds"] == {"": 1.5}


def test_the_options_are_those_of_the_module() -> None:
    config = {"expected_gpus": -1, "user": "", "tools": "/t", "sysroot": "/", "simulated": False}
    record = {"version": "580.82.07", "source": "nvidia", "flavour": "open", "packages": {"a": "1"}}
    profile = {"expect": {"gpus": 8, "arch": "sm_120"}, "verify": {"imports": ["torch"], "import_timeout_s": 9}}
    spec = bedplate_verify.argument_spec()
    options = command.options_of(config, "/g", profile, {"driver": {"is": record}})
    assert set(options) == set(spec)
    for name in ("driver", "expect"):
        assert set(options[name]) == set(spec[name]["options"]), name
    toolkit = command.options_of(config, "/g", profile, {"toolkit": {"is": {"version": "13.0.1"}}})["toolkit"]
    assert set(toolkit) == set(spec["toolkit"]["options"])
    assert set(options["checks"]) <= set(spec["checks"]["choices"]) - {"collective", "operations", "preflight"}
    assert (options["expect"]["gpus"], options["imports"], options["import_timeout"]) == (8, ["torch"], 9)
    assert command.options_of({**config, "expected_gpus": 0}, "/g", profile, {})["expect"]["gpus"] == 0


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node with the tiny stack live, as far as the journal and the disk say so."""
    tiny = tiny_stack.build_wheels(tmp_path / "tiny")
    generation = tiny_stack.make_generation(tmp_path / "root" / "generations" / ID_A, tiny)
    profile = {"verify": {"imports": ["torch", "sgl_kernel"], "import_timeout_s": 60}, "expect": {"gpus": 0}}
    (generation / "profile.json").write_text(json.dumps(profile))
    (tmp_path / "root" / "current").symlink_to(f"generations/{ID_A}")
    entry = {"profile": "tiny", "target": "cp311-x86_64", "status": "verified", "created": "c", "verified": "v"}
    state: dict[str, Any] = {"schema": 1, "active": ID_A, "previous": None, "intent": None, "runs": [], "layers": {}}
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.json").write_text(json.dumps({**state, "generations": {ID_A: entry}}))
    config = {
        "root": str(tmp_path / "root"), "state_dir": str(tmp_path / "state"), "tools": str(tmp_path / "tools"),
        "user": "", "expected_gpus": -1, "sysroot": "/", "simulated": True, "textfile": str(tmp_path / "b.prom"),
    }  # fmt: skip
    (tmp_path / "monitor.json").write_text(json.dumps(config))
    return tmp_path


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command as the unit does: out of the zip, with nothing of this project in the way."""
    return subprocess.run(
        ["/usr/bin/python3", "-m", "bedplate", *map(str, arguments)],
        env={"PYTHONPATH": code, "PATH": os.environ["PATH"]}, cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_out_of_the_zip_on_a_node(node: Path) -> None:
    done = run(node_code(node / "cache")["path"], "monitor", node / "monitor.json")
    assert done.returncode == 0, done.stderr
    found = parse((node / "b.prom").read_text())
    assert found["bedplate_profile_info"] == {f'generation="{ID_A}",profile="tiny",target="cp311-x86_64"': 1}
    verdicts = found["bedplate_verdict"]
    assert verdicts['code="import.ok",layer="stack",subject="sgl_kernel",status="pass"'] == 1
    # there is no manifest.json: the generation was made by hand
    assert verdicts['code="stack.drift",layer="stack",subject="Python stack",status="fail"'] == 1
    assert "fail stack.drift Python stack: What is live is not what was recorded" in done.stdout
    assert (node / "b.prom").stat().st_mode & 0o777 == 0o644
    assert not list(node.glob("*.tmp"))


def test_the_bytes_of_the_extensions_are_asked_each_time(node: Path) -> None:
    """torch is exchanged under a live generation: an update that nobody announced."""
    done = run(node_code(node / "cache")["path"], "monitor", node / "monitor.json")
    verdicts = parse((node / "b.prom").read_text())["bedplate_verdict"]
    assert any(labels.startswith('code="abi.ok",layer="stack"') for labels in verdicts), done.stdout + done.stderr
    shutil.rmtree(tiny_stack.site_packages(node / "root" / "generations" / ID_A) / "torch")
    (wheel,) = (node / "tiny" / "wheels").glob("torch-2.10.0+tiny-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tiny_stack.site_packages(node / "root" / "generations" / ID_A))
    done = run(node_code(node / "cache")["path"], "monitor", node / "monitor.json")
    verdicts = parse((node / "b.prom").read_text())["bedplate_verdict"]
    failed = [labels for labels in verdicts if 'layer="stack"' in labels and 'status="fail"' in labels]
    assert [labels.split(",")[0] for labels in failed] == [
        f'code="{code}"' for code in ("import.undefined_symbol", "abi.undefined_symbol", "stack.drift")
    ]
    assert "fail abi.undefined_symbol sgl-kernel" in done.stdout.replace("sgl_kernel", "sgl-kernel")


def test_an_index_that_is_no_index_is_inconclusive(node: Path) -> None:
    (node / "tools" / "abi").mkdir(parents=True)
    (node / "tools" / "abi" / "torch-x86_64.idx").write_bytes(b"nonsense")
    assert command.main(["monitor", str(node / "monitor.json")]) == 0
    verdicts = parse((node / "b.prom").read_text())["bedplate_verdict"]
    assert any('code="abi.unreadable_file"' in labels and 'status="inconclusive"' in labels for labels in verdicts)


def entry(record: dict[str, Any] | None) -> dict[str, Any]:
    return {"is": record, "was": None, "to": None, "run_id": "r"}


@pytest.mark.parametrize(
    ("layers", "status", "words"),
    [
        ({"toolkit": entry({"version": "13.0.1", "path": "/nonexistent"})}, "fail", "of the toolkit is gone"),
        ({"toolkit": entry({"version": "13.0.1", "path": "/"})}, "pass", ""),
        ({"driver": entry({"version": "1", "packages": {"dpkg": "0.0"}})}, "fail", "Package dpkg of the driver is 1."),
        ({"driver": entry(None)}, "", ""),
    ],
    ids=["gone", "there", "another version", "not Bedplate's"],
)
def test_layers_that_are_not_as_recorded_are_told(
    node: Path, capsys: pytest.CaptureFixture[str], layers: dict[str, Any], status: str, words: str
) -> None:
    state = json.loads((node / "state" / "state.json").read_text())
    (node / "state" / "state.json").write_text(json.dumps({**state, "layers": layers}))
    assert command.main(["monitor", str(node / "monitor.json")]) == 0
    (layer,) = layers
    verdicts = parse((node / "b.prom").read_text())["bedplate_verdict"]
    labels = f'code="{layer}.drift",layer="{layer}",subject="{layer}",status="{status}"'
    assert [name for name in verdicts if f"{layer}.drift" in name] == ([labels] if status else [])
    assert words in capsys.readouterr().out


def test_a_package_manager_that_does_not_answer_is_told(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = json.loads((node / "state" / "state.json").read_text())
    layers = {"driver": entry({"version": "1", "packages": {"dpkg": "1"}})}
    (node / "state" / "state.json").write_text(json.dumps({**state, "layers": layers}))

    def installed(names: list[str]) -> dict[str, str]:
        raise PackageError("packages.query_failed", "dpkg-query", "It did not end within 60 s and was killed.")

    monkeypatch.setattr(command, "installed", installed)
    assert command.main(["monitor", str(node / "monitor.json")]) == 0
    assert 'code="packages.query_failed",layer="driver"' in (node / "b.prom").read_text()


def test_a_damaged_journal_keeps_the_last_metrics_and_says_why(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (node / "b.prom").write_text("old\n")
    (node / "state" / "state.json").write_text("{")
    assert command.main(["monitor", str(node / "monitor.json")]) == 1
    assert "state.json" in capsys.readouterr().err
    assert (node / "b.prom").read_text() == "old\n"


def test_a_bare_node_is_no_error(node: Path) -> None:
    (node / "root" / "current").unlink()
    (node / "state" / "state.json").unlink()
    assert command.main(["monitor", str(node / "monitor.json")]) == 0
    found = parse((node / "b.prom").read_text())
    assert found["bedplate_profile_info"] == {'generation="",profile="",target=""': 1}
    assert 'code="stack.absent",layer="stack",subject="Python stack",status="skipped"' in found["bedplate_verdict"]


@pytest.mark.parametrize("arguments", [[], ["monitor"], ["verify", "x"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_a_missing_configuration_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["monitor", "/nonexistent/monitor.json"]) == 1
    assert "/nonexistent/monitor.json" in capsys.readouterr().err


# ---- the zip ----------------------------------------------------------------------------------------------------


def test_the_zip_is_the_same_each_time_and_holds_the_nodes_part_only(tmp_path: Path) -> None:
    first, second = node_code(tmp_path / "a"), node_code(tmp_path / "b")
    assert first["sha256"] == second["sha256"]
    assert node_code(tmp_path / "a") == first
    with zipfile.ZipFile(first["path"]) as archive:
        names = set(archive.namelist())
    assert {"bedplate/__init__.py", "bedplate/__main__.py", "bedplate/verify.py", "bedplate/driver/judge.py"} <= names
    assert all(re.fullmatch(r"bedplate/(?:\w+/)?\w+\.py", name) for name in names)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [Path(first["path"]).name]
