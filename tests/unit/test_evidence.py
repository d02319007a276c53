"""The archive that explains a failure: what it holds, what it must not hold, and nodes that do not play along."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_stack
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.child import read_environment
from bedplate.node.evidence import (
    ARCHIVE_LIMIT,
    LIMITS,
    REDACTED,
    TRACED_IMPORTS,
    Part,
    Request,
    allowed_variables,
    collect,
    kernel_log,
    pci_tree,
    redact,
    redact_value,
    verdicts_part,
    versions,
    write_archive,
)
from bedplate.node.evidence_child import AFTER_LINES, BEFORE_LINES, END_LINES, PLACES, Trimmer
from bedplate.node.stack.imports import check_imports
from bedplate.node.verdicts import Verdict

BROKEN = Verdict("import.error", "fail", "stack", "torch", "It raised.", {"error": []})


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Request:
    """The incident on the tiny stack: torch 2.10 with a kernel package made for 2.9.1, verified."""
    place = tmp_path_factory.mktemp("incident")
    tiny = tiny_stack.build_wheels(place / "tiny")
    generation = tiny_stack.make_generation(place / "g", tiny, torch="2.10.0+tiny")
    (generation / "requirements.lock").write_text("torch==2.10.0+tiny --hash=sha256:00\n")
    with (generation / "environment").open("a") as file:
        file.write("NCCL_DEBUG=WARN\nHF_TOKEN=hunter2\nCUDA_API_KEY=hunter2\nMY_OWN=hunter2\n")
    environment = read_environment(generation / "environment")
    verdicts = check_imports(
        ["torch", "sgl_kernel"], python=str(generation / "venv/bin/python"), timeout_s=60, environment=environment
    )
    assert [verdict.code for verdict in verdicts] == ["import.ok", "import.undefined_symbol"]
    return Request(verdicts, "sgl_kernel: broken", "run-1", 5.0, str(generation), str(place), root=str(place / "root"))


def by_name(parts: list[Part]) -> dict[str, Part]:
    assert len({part.name for part in parts}) == len(parts)
    return {part.name: part for part in parts}


# ---- a whole archive --------------------------------------------------------------------------------------------


def test_the_incident(incident: Request, tmp_path: Path) -> None:
    parts = by_name(collect(incident))
    symbol = incident.verdicts[1].evidence["symbol"]
    trace = parts["loader-1-sgl_kernel.txt"].data.decode()
    assert f"undefined symbol: {symbol} (fatal)" in trace
    assert f"symbol={symbol};  lookup in file=" in trace, "the lines before the error say where it was looked for"
    assert "libtorch" in parts["maps-1-sgl_kernel.txt"].data.decode()
    assert json.loads(parts["verdicts.json"].data)[1]["code"] == "import.undefined_symbol"
    assert json.loads(parts["versions.json"].data)["distributions"] == ["sgl_kernel 0.3.21+tiny", "torch 2.10.0+tiny"]
    assert parts["requirements.lock"].data.startswith(b"torch==2.10.0+tiny --hash=sha256:00")
    assert parts["reason.txt"].data == b"sgl_kernel: broken"
    environment = json.loads(parts["environment.json"].data)
    assert environment["NCCL_DEBUG"] == "WARN"
    assert set(environment) == {"LD_LIBRARY_PATH", "NCCL_DEBUG"}
    assert all(b"hunter2" not in part.data for part in parts.values())

    manifest = json.loads(parts["manifest.json"].data)
    listed = {part["name"]: part for part in manifest["parts"]}
    assert set(listed) == set(parts) - {"manifest.json"}
    assert manifest["run_id"] == "run-1"
    assert "No such file" in listed["state.json"]["note"]

    path = Path(write_archive(list(parts.values()), str(tmp_path)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert {member.name for member in members} == {f"evidence/{name}" for name in parts}
    assert all(member.isreg() and member.mode == 0o600 and (member.uid, member.gid) == (0, 0) for member in members)


def test_a_node_that_has_nothing_still_says_so(tmp_path: Path) -> None:
    parts = by_name(collect(Request([BROKEN], generation=str(tmp_path / "gone"), root=str(tmp_path))))
    assert parts["verdicts.json"].data
    for name in ("state.json", "versions.json", "requirements.lock", "pci.txt", "dmesg.txt"):
        assert not parts[name].data
        assert parts[name].note.startswith("could not be had: "), name
    assert "no interpreter" in parts["loader-1-torch.txt"].note
    assert parts["nvidia-smi-topo.txt"].note == "there is no nvidia-smi"


def test_all_parts_at_their_limits_are_below_the_archives() -> None:
    traced = sum(LIMITS[name] for name in ("maps", "loader")) * (TRACED_IMPORTS - 1)
    assert sum(LIMITS.values()) + traced < 0.95 * ARCHIVE_LIMIT


def test_hostile_subjects_name_no_other_files(tmp_path: Path) -> None:
    verdicts = [replace(BROKEN, subject=subject) for subject in ("../../etc/cron.d/x", ".hidden", "a\nb", "", "fifth")]
    names = by_name(collect(Request(verdicts, generation=str(tmp_path), root=str(tmp_path))))
    traces = [name for name in names if name.startswith("loader-")]
    assert len(traces) == TRACED_IMPORTS + 1
    assert all("/" not in name and "\n" not in name for name in names)
    assert "fifth" in names["loader-others.txt"].note


def test_two_subjects_that_look_alike_keep_their_own_files(tmp_path: Path) -> None:
    verdicts = [replace(BROKEN, subject=subject) for subject in ("a b", "a_b")]
    traces = [part.name for part in collect(Request(verdicts, generation=str(tmp_path))) if "loader-" in part.name]
    assert len(set(traces)) == 2


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space"):
        write_archive([Part("a", b"x")], str(tmp_path))
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


# ---- files that somebody else may have written ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "shadow"
    secret.write_text("root:hash")
    lock = tmp_path / "requirements.lock"
    {"link": lambda: lock.symlink_to(secret), "pipe": lambda: os.mkfifo(lock), "directory": lock.mkdir}[kind]()
    part = by_name(collect(Request(generation=str(tmp_path), root=str(tmp_path))))["requirements.lock"]
    assert not part.data
    assert part.note.startswith("could not be had: ")


def test_a_file_that_is_too_long_keeps_its_beginning(tmp_path: Path) -> None:
    limit = LIMITS["requirements.lock"]
    (tmp_path / "requirements.lock").write_bytes(b"a" * 3 * limit)
    part = by_name(collect(Request(generation=str(tmp_path), root=str(tmp_path))))["requirements.lock"]
    assert (len(part.data), part.cut) == (limit, 2 * limit)
    assert part.note == f"cut: the first {limit} of {3 * limit} bytes"


def test_long_verdicts_lose_evidence_and_no_verdict() -> None:
    many = [
        replace(BROKEN, subject=f"m{n}", evidence={"stderr": "x" * 50_000, "list": ["y"] * 900}) for n in range(100)
    ]
    part = verdicts_part(many)
    assert len(part.data) <= LIMITS["verdicts.json"]
    assert part.cut > 0
    assert part.note.startswith("cut: ")
    assert [verdict["subject"] for verdict in json.loads(part.data)] == [verdict.subject for verdict in many]
    assert verdicts_part(many[:2]).cut == 0


# ---- secrets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "--index-url https://me:hunter2@example.org/simple",
        "https://hunter2@example.org/",
        "Authorization: Bearer hunter2hunter2",
        "PASSWORD=hunter2",
        "db_password: 'hunter2'",
        '"aws_secret": "hunter2"',
        "HF_TOKEN=hunter2",
        "api-key = hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nDEK-Info: AES-128-CBC,0\nhunter2\n-----END RSA PRIVATE KEY-----",
        r'"{\"password\": \"hunter2\"}"',
        "password: 'correct horse hunter2'",
        '"password": "it\'s-hunter2"',
        r'"password": "ab\"hunter2"',
        r'"password": "ab\\\\hunter2"',
        """HF_TOKEN="x'hunter2\"""",
        "https://user:pa/hunter2@host/",
        "run --password hunter2",
        "run --hf-token 'hunter2'",
        "Authorization: Token hunter2",
        "-H 'Authorization: Token hunter2' https://example.org",
        "token='" + "x" * 2000 + "hunter2'",
        'token="no end hunter2',
    ],
)
def test_secrets_in_texts(text: str) -> None:
    assert "hunter2" not in redact(text)
    assert REDACTED in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "hf_abcdefghijklmnopqrstuvwx",
        "ghp_abcdefghijklmnopqrstuvwx",
        "github_pat_abcdefghijklmnop_qrstuvwx",
        "nvapi-abcdefghijklmnopqrstuvwx",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJlMTIz",
    ],
)
def test_tokens_of_known_form(text: str) -> None:
    assert text not in redact(f"using {text} now")


@pytest.mark.parametrize(
    "text",
    [
        "torch==2.9.1 --hash=sha256:0123456789abcdef",
        "tokenizers==0.22.0",
        "https://example.org/a@b",
        "symbol=_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib;  lookup in file=/opt/x.so [0]",
        "max_tokens: 5",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("text", ['{"password": "x", "b": 1}', r'{"a": "{\"token\": \"x\"}"}', '{"api_key":"x"}'])
def test_json_stays_json(text: str) -> None:
    assert REDACTED in str(json.loads(redact(text)))
    assert "'x'" not in str(json.loads(redact(text)))


@given(st.text(min_size=1), st.booleans())
def test_a_quoted_secret_is_redacted_whatever_it_is(value: str, ascii_only: bool) -> None:
    once = json.dumps({"a": 1, "hf_token": value, "z": 2}, ensure_ascii=ascii_only)
    assert json.loads(redact(once)) == {"a": 1, "hf_token": REDACTED, "z": 2}
    twice = json.dumps({"text": once}, ensure_ascii=ascii_only)
    assert json.loads(json.loads(redact(twice))["text"]) == {"a": 1, "hf_token": REDACTED, "z": 2}


@given(st.text())
def test_redacting_twice_is_redacting_once(text: str) -> None:
    assert redact(redact(text)) == redact(text)


@given(st.text(min_size=1))
def test_a_secret_by_name_never_gets_through(value: str) -> None:
    assert redact_value({"password": value, "a": [{"hf_token": value}]}) == {
        "password": REDACTED,
        "a": [{"hf_token": REDACTED}],
    }


def test_environments_in_evidence_keep_harmless_variables_only() -> None:
    evidence = {"environment": {"NCCL_DEBUG": "INFO", "MY_OWN": "x", "NCCL_TOKEN": "x"}, "rank": {"env": {"HOME": "/"}}}
    assert redact_value(evidence) == {"environment": {"NCCL_DEBUG": "INFO"}, "rank": {"env": {}}}


def test_variables_lose_their_secrets() -> None:
    assert allowed_variables({"TORCH_HOME": "https://a:b@c/", "SHELL": "x"}) == {"TORCH_HOME": f"https://{REDACTED}@c/"}


def test_the_slowest_text_is_quick() -> None:
    began = time.monotonic()
    for piece in (
        "a",
        "a-",
        "token",
        "token=",
        "token='",
        "://",
        "-----BEGIN PRIVATE KEY-----",
        "eyJ",
        "bearer ",
        'token=\\"',
        "-token ",
        'token="',
        "://a:",
        "authorization:",
    ):
        redact(piece * (400_000 // len(piece)))
    assert time.monotonic() - began < 10


# ---- the kernel -------------------------------------------------------------------------------------------------


def fake_root(root: Path, kmsg: str, uptime: float = 1000.0) -> Path:
    for name, text in (("dev/kmsg", kmsg), ("proc/uptime", f"{uptime} 1.0\n"), ("proc/cmdline", "iommu=pt token=x\n")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_log_begins_with_the_run_but_for_the_gpus(tmp_path: Path) -> None:
    log = (
        "6,1,10000000,-;NVRM: Xid (PCI:0000:c1:00): 79\n6,2,11000000,-;eth0: link up\n"
        " SUBSYSTEM=net\n6,3,995000000,-;oops since\n"
    )
    parts = by_name(collect(Request(age_s=10, root=str(fake_root(tmp_path, log)))))
    assert parts["dmesg.txt"].data.decode() == (
        "[   10.000000] (before the run) NVRM: Xid (PCI:0000:c1:00): 79\n[  995.000000] oops since\n"
    )
    node = json.loads(parts["node.json"].data)
    assert node["command_line"] == f"iommu=pt token={REDACTED}"


def test_a_quiet_kernel_is_no_missing_log(tmp_path: Path) -> None:
    part = by_name(collect(Request(root=str(fake_root(tmp_path, "6,1,1,-;old\n")))))["dmesg.txt"]
    assert part.note == "the kernel logged nothing since the run began"


@given(st.binary())
def test_any_log_is_read(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:  # Hypothesis does not take pytest's fixtures
        file.write(data)
        file.flush()
        assert all(second >= 0 for second, _ in kernel_log(file.name))


def test_the_pci_tree_shows_who_is_behind_whom(tmp_path: Path) -> None:
    devices = tmp_path / "sys/devices/pci0000:80"
    bus = tmp_path / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    for place, values in {
        "0000:80:01.0": {"vendor": "0x1022", "device": "0x14ab", "class": "0x060400"},
        "0000:80:01.0/0000:81:00.0": {
            "vendor": "0x10de", "device": "0x2bb5", "class": "0x030200", "numa_node": "1", "max_link_width": "16",
            "max_link_speed": "32.0 GT/s PCIe", "current_link_width": "8", "current_link_speed": "2.5 GT/s PCIe",
        },
    }.items():  # fmt: skip
        (devices / place).mkdir(parents=True)
        for name, value in values.items():
            (devices / place / name).write_text(value + "\n")
        (bus / place.rpartition("/")[2]).symlink_to(devices / place)
    (devices / "0000:80:01.0/0000:81:00.0/driver").symlink_to("/sys/bus/pci/drivers/nvidia")
    assert pci_tree(str(tmp_path)) == (
        "0000:80:01.0 1022:14ab class 0x060400 driver none numa ?\n"
        "  0000:81:00.0 10de:2bb5 class 0x030200 driver nvidia numa 1"
        " link 2.5 GT/s PCIe x8 of 32.0 GT/s PCIe x16\n"
    )


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("#!/bin/sh\necho GPU0 GPU1 token=x\n", f"GPU0 GPU1 token={REDACTED}"),
        ("#!/bin/sh\nsleep 60\n", "did not end in time"),
    ],
    ids=["answers", "hangs"],
)
def test_nvidia_smi_may_hang(tmp_path: Path, program: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedplate.node.evidence.COMMAND_TIMEOUT_S", 3.0)
    smi = tmp_path / "usr/bin/nvidia-smi"
    smi.parent.mkdir(parents=True)
    smi.write_text(program)
    smi.chmod(0o755)
    part = by_name(collect(Request(root=str(tmp_path))))["nvidia-smi-topo.txt"]
    assert expected in part.data.decode() + part.note


# ---- versions and traces ----------------------------------------------------------------------------------------


def test_versions_come_from_names_so_that_damage_does_not_matter(tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.12/site-packages"
    for name in ("torch-2.9.1+cu130.dist-info", "a_b-1.dist-info", "numpy"):
        (site / name).mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /usr\nversion_info = 3.12.4\n")
    assert versions(str(tmp_path)) == {"python": "3.12.4", "distributions": ["a_b 1", "torch 2.9.1+cu130"]}


def test_a_trace_that_does_not_end_is_cut_off_and_says_so(incident: Request) -> None:
    site = tiny_stack.site_packages(Path(incident.generation))
    (site / "hangs.py").write_text("import time\ntime.sleep(60)\n")
    hanging = replace(incident, verdicts=[replace(BROKEN, subject="hangs")], trace_timeout_s=3.0)
    part = by_name(collect(hanging))["loader-1-hangs.txt"]
    assert "did not end in time" in part.note
    assert b"symbol=clock_nanosleep;" in part.data, "the last symbol is what it waits in"


def test_hanging_imports_do_not_add_up(incident: Request) -> None:
    site = tiny_stack.site_packages(Path(incident.generation))
    names = ("hangs_a", "hangs_b", "hangs_c")
    for name in names:
        (site / f"{name}.py").write_text("import time\ntime.sleep(60)\n")
    hanging = replace(incident, verdicts=[replace(BROKEN, subject=name) for name in names], trace_timeout_s=1.5)
    began = time.monotonic()
    notes = [part.note for part in collect(hanging) if part.name.startswith("loader-")]
    assert time.monotonic() - began < 15
    assert "the time for traces was over" in notes[2]


PIECES = st.lists(st.sampled_from([b"x", b"\n", b"error:", b"err", b"or:", b"line\nline\n"]), max_size=60)


@given(PIECES)
def test_trimming_does_not_depend_on_how_the_output_comes(pieces: list[bytes]) -> None:
    whole, split = Trimmer([b"error:"]), Trimmer([b"error:"])
    whole.feed(b"".join(pieces))
    for piece in pieces:
        split.feed(piece)
    assert whole.text() == split.text()


def test_trimming_keeps_what_is_around_the_words_and_the_end() -> None:
    trimmer = Trimmer([b"error:"])
    lines = [f"line {number}" for number in range(10_000)]
    lines[5_000] = "error: here"
    stream = io.BytesIO("\n".join(lines).encode())
    while piece := stream.read(4096):
        trimmer.feed(piece)
    place, end = trimmer.text().split("\n...\n")
    assert place.split("\n") == lines[5_000 - BEFORE_LINES : 5_000 + AFTER_LINES + 1]
    assert end.split("\n") == lines[-END_LINES - 1 :]


def test_of_many_places_the_last_ones_stay() -> None:
    trimmer = Trimmer([b"error:"])
    for number in range(50):
        trimmer.feed(f"error: {number}\n".encode() + b"line\n" * 300)
    assert trimmer.text().count("error:") == PLACES
    assert "error: 49" in trimmer.text()


# ---- the module -------------------------------------------------------------------------------------------------


def test_the_module_writes_one_archive(run_module: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    options = {"verdicts": [BROKEN.to_dict()], "directory": str(tmp_path), "sysroot": str(tmp_path), "user": ""}
    result = run_module("bedplate_evidence", **options)
    assert result["archive_bytes"] == os.path.getsize(result["archive"]) < ARCHIVE_LIMIT
    assert {part["name"] for part in result["parts"]} >= {"verdicts.json", "manifest.json"}
    assert result["changed"]


def test_the_module_in_check_mode_writes_nothing(run_module: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = run_module("bedplate_evidence", check=True, directory=str(tmp_path))
    assert (result["archive"], result["changed"]) == (None, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verdicts": [{"code": "import.ok"}]}, "not a list of verdicts"),
        ({"directory": "/nonexistent"}, "Free space there"),
    ],
)
def test_the_module_says_what_it_cannot_do(
    run_module: Callable[..., dict[str, Any]], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    result = run_module("bedplate_evidence", **{"sysroot": str(tmp_path), "user": "", **options})
    assert result["failed"]
    assert message in result["msg"]
