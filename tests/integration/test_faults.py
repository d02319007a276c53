"""What goes wrong in the field, done on purpose to a real node: a clear error, and nothing live is lost."""

from __future__ import annotations

import http.server
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed import Node

pytestmark = pytest.mark.node

GOOD, NEXT = "tiny-good", "tiny-next"
GOOD_TORCH, NEXT_TORCH = "2.9.1+tiny", "2.9.2+tiny"


def assert_still_good(node: Node) -> None:
    """The first profile is live, works, and nothing says otherwise."""
    assert node.current().startswith(f"{GOOD}-")
    assert node.live_torch() == GOOD_TORCH
    state = node.state()
    assert state["active"] == node.current()
    assert state["intent"] is None


# ---- interruptions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "sigkill"])
@pytest.mark.parametrize(
    ("task", "after_s"),
    [
        ("Write the intent", 0.2),
        ("Create the virtual environment", 0.1),
        ("Install the locked wheels", 0.4),
        ("Import the packages and run the collective", 1.0),
        ("Go live with one rename", 0.0),
    ],
    ids=["intent", "venv", "wheels", "verify", "commit"],
)
def test_interrupted_upgrade(live: Node, how: signal.Signals, task: str, after_s: float) -> None:
    play = live.interrupt(NEXT, task, how, after_s)
    assert play.code != 0
    # At once, with nothing repaired: what `current` names works.
    assert live.live_torch() in (GOOD_TORCH, NEXT_TORCH)
    again = live.play("site.yml", NEXT)
    assert again.code == 0, again.output
    assert live.live_torch() == NEXT_TORCH
    assert live.state()["intent"] is None
    assert live.statuses() == {GOOD: "verified", NEXT: "verified"}


def test_two_runs_at_once(live: Node) -> None:
    first = live.start("site.yml", NEXT)
    assert first.stdout is not None
    for line in first.stdout:
        if "Create the virtual environment]" in line:
            break
    second = live.play("site.yml", "tiny-incident", bedplate_allow_refused=True)
    assert second.code != 0
    assert "is being changed by" in second.output
    assert f"pid {first.pid}" in second.output
    first.communicate(timeout=200)
    assert first.returncode == 0
    assert live.live_torch() == NEXT_TORCH
    assert "tiny-incident" not in live.statuses()


def test_node_vanishes_and_returns(live: Node) -> None:
    process = live.start("site.yml", NEXT)
    assert process.stdout is not None
    for line in process.stdout:
        if "Install the locked wheels]" in line:
            live.sh("kill -9 $(pgrep -f sshd) || true", check=False)
            break
    process.communicate(timeout=200)
    assert process.returncode != 0
    live.sh("systemctl restart ssh")
    assert live.live_torch() == GOOD_TORCH
    again = live.play("site.yml", NEXT)
    assert again.code == 0, again.output
    assert live.live_torch() == NEXT_TORCH


# ---- wheels -----------------------------------------------------------------------------------------------------


def tampered(source: Path, folder: Path, victim: str) -> Path:
    """Copy the wheels, with one of them changed: same name, same version, other bytes."""
    shutil.copytree(source, folder)
    (wheel,) = folder.glob(f"{victim}-*.whl")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.comment = b"changed after it was locked"
    return folder


def test_wheel_with_another_hash(live: Node, tiny: Path, tmp_path: Path) -> None:
    with serve(tampered(tiny / "wheels", tmp_path / "wheels", f"torch-{NEXT_TORCH}")) as url:
        play = live.play("site.yml", NEXT, bedplate_wheels_source="mirror", bedplate_wheels_location=url)
    assert play.code != 0
    assert "hash" in play.output.lower()
    assert "torch" in play.output
    assert_still_good(live)


class Mirror(http.server.SimpleHTTPRequestHandler):
    """Lists and serves a directory; subclasses break off."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serve(folder: Path, handler: type[Mirror] = Mirror) -> Iterator[str]:
    """Serve a directory to the node and yield the URL by which the node reaches it."""

    def make(*args: object) -> Mirror:
        return handler(*args, directory=str(folder))  # type: ignore[arg-type]

    server = http.server.ThreadingHTTPServer(("0.0.0.0", 0), make)  # noqa: S104  # the node is on a bridge
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://host.containers.internal:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


class Truncating(Mirror):
    """Promises whole wheels and sends half of each."""

    def copyfile(self, source: object, outputfile: object) -> None:
        data = source.read()  # type: ignore[attr-defined]
        whole = data if not self.path.endswith(".whl") else data[: len(data) // 2]
        outputfile.write(whole)  # type: ignore[attr-defined]


class SimpleIndex(Mirror):
    """The same files as a package index (PEP 503): a page per project."""

    def do_GET(self) -> None:
        parts = self.path.strip("/").split("/")
        if parts[0] != "simple" or parts[-1].endswith(".whl"):
            self.path = f"/{parts[-1]}"
            super().do_GET()
            return
        wheels = sorted(Path(self.directory).glob(f"{parts[-1].replace('-', '_')}-*.whl"))
        page = "".join(f'<a href="/{wheel.name}">{wheel.name}</a>' for wheel in wheels).encode()
        self.send_response(200 if wheels else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)


def test_wheels_from_an_index_by_the_same_lock(live: Node, tiny: Path) -> None:
    with serve(tiny / "wheels", SimpleIndex) as url:
        play = live.play("site.yml", NEXT, bedplate_wheels_source="index", bedplate_wheels_location=f"{url}simple/")
    assert play.code == 0, play.output
    assert live.live_torch() == NEXT_TORCH


def test_truncated_download(live: Node, tiny: Path) -> None:
    with serve(tiny / "wheels", Truncating) as url:
        play = live.play("site.yml", NEXT, bedplate_wheels_source="mirror", bedplate_wheels_location=url)
    assert play.code != 0
    assert "could not install the locked wheels" in play.output
    assert_still_good(live)


class Dying(Mirror):
    """Answers the listing, then fails."""

    def do_GET(self) -> None:
        if self.path.endswith(".whl"):
            self.send_error(503)
        else:
            super().do_GET()


def test_mirror_down_half_way_and_back(live: Node, tiny: Path) -> None:
    with serve(tiny / "wheels", Dying) as url:
        play = live.play("site.yml", NEXT, bedplate_wheels_source="mirror", bedplate_wheels_location=url)
    assert play.code != 0
    assert "503" in play.output
    assert_still_good(live)
    with serve(tiny / "wheels") as url:
        again = live.play("site.yml", NEXT, bedplate_wheels_source="mirror", bedplate_wheels_location=url)
    assert again.code == 0, again.output
    assert live.live_torch() == NEXT_TORCH


def test_mirror_unreachable(live: Node) -> None:
    play = live.play(
        "site.yml",
        NEXT,
        bedplate_wheels_source="mirror",
        bedplate_wheels_location="http://host.containers.internal:9/",
    )
    assert play.code != 0
    assert "could not install the locked wheels" in play.output
    assert_still_good(live)


# ---- the node's condition -----------------------------------------------------------------------------------------


def test_disk_full_in_the_build(live: Node) -> None:
    """The first generation moves onto a small file system, so that the second does not fit on it."""
    live.sh(
        "mv /opt/bedplate/generations /opt/bedplate/g && mkdir /opt/bedplate/generations"
        " && mount -t tmpfs -o size=$(( $(du -sm /opt/bedplate/g | cut -f1) + 1 ))m none /opt/bedplate/generations"
        " && cp -a /opt/bedplate/g/. /opt/bedplate/generations/"
        " && dd if=/dev/zero of=/opt/bedplate/generations/.ballast bs=1k 2>/dev/null; true"
    )
    play = live.play("site.yml", NEXT)
    assert play.code != 0
    assert "No space left" in play.output
    live.sh("rm -f /opt/bedplate/generations/.ballast")
    assert_still_good(live)


def test_damaged_cache_of_uv_says_what_to_remove(live: Node) -> None:
    live.sh("rm -rf /opt/bedplate/cache/uv/archive-v0/*")
    play = live.play("site.yml", NEXT)
    assert play.code != 0
    assert "uv's own cache is damaged; nothing else is kept in it: remove /opt/bedplate/cache/uv" in play.output
    assert_still_good(live)
    live.sh("rm -rf /opt/bedplate/cache/uv")
    assert live.play("site.yml", NEXT).code == 0


def test_a_gpu_is_missing(node: Node) -> None:
    node.sh("echo count=7 > /etc/fakegpu.conf")
    play = node.play("site.yml", "tiny-good", bedplate_expected_gpus=8)
    assert play.code != 0
    assert node.current() == "", "a stack went live without all its GPUs"
    verdicts = node.state()["runs"][-1]["verdicts"]
    assert [v["code"] for v in verdicts if v["status"] == "fail"] == ["gpu.count"]


def test_a_gpu_that_was_missing_before_is_reported_and_not_blamed_on_the_change(live: Node) -> None:
    live.sh("echo count=7 > /etc/fakegpu.conf")
    play = live.play("site.yml", NEXT, bedplate_expected_gpus=8)
    assert play.code == 0, play.output
    assert live.statuses()[NEXT] == "verified"
    verdicts = live.state()["runs"][-1]["verdicts"]
    assert [(v["code"], v["preexisting"]) for v in verdicts if v["status"] == "fail"] == [("gpu.count", True)]


def test_rollout_stops_at_the_canary(live: Node, second: Node) -> None:
    play = live.play("site.yml", "tiny-wrongsum", "--limit", "gpu_nodes")
    assert play.code != 0
    assert f"[{second.name}]" in play.output, "the second node was not in the play"
    assert_still_good(live)
    assert live.statuses()["tiny-wrongsum"] == "failed"
    assert second.sh("ls /opt") == "", "the next wave began although the canary failed"


def test_a_run_limited_by_tags_goes_back_too(live: Node) -> None:
    play = live.play("site.yml", "tiny-wrongsum", "--tags", "stack")
    assert play.code != 0
    assert "tiny-wrongsum" in play.output
    assert_still_good(live)
    assert live.statuses()["tiny-wrongsum"] == "failed"


def test_rollback_is_one_rename_without_network(live: Node) -> None:
    upgraded = live.play("site.yml", NEXT)
    assert upgraded.code == 0, upgraded.output
    live.sh("mv /opt/bedplate/cache /opt/bedplate/tools /root/")  # neither uv nor its cache may be needed
    started = time.monotonic()
    play = live.play("rollback.yml", NEXT, "--skip-tags", "verify")
    seconds = time.monotonic() - started
    live.sh("mv /root/cache /root/tools /opt/bedplate/")
    assert play.code == 0, play.output
    assert_still_good(live)
    assert live.state()["runs"][-1]["switch_ms"] < 50
    assert seconds < 15


# ---- what an operator mistypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ("tiny-god", "tiny-good"),
        ("../tiny-good", "not a profile name"),
        ("tiny good", "not a profile name"),
        ("t" * 300, "not a profile name"),
    ],
    ids=["misspelt", "traversal", "space", "long"],
)
def test_bad_profile_name_reaches_no_node(node: Node, profile: str, says: str) -> None:
    play = node.play("site.yml", profile)
    assert play.code != 0
    assert says in play.output
    assert node.sh("ls /opt") == ""


def test_misspelt_variable(node: Node) -> None:
    play = node.play("site.yml", GOOD, bedplate_wheel_source="index")
    assert play.code != 0
    assert "bedplate_wheels_source" in play.output
    assert node.sh("ls /opt") == ""


def test_misspelt_key_and_stale_lock(node: Node, tiny: Path, tmp_path: Path) -> None:
    node_profiles = tmp_path / "profiles"
    shutil.copytree(tiny / "profiles", node_profiles)
    profile = node_profiles / GOOD / "profile.yml"
    original = profile.read_text()

    profile.write_text(original.replace("requirements:", "requirement:"))
    play = node.play("site.yml", GOOD, bedplate_profiles=[str(node_profiles)])
    assert play.code != 0
    assert "requirements" in play.output

    profile.write_text(original.replace(GOOD_TORCH, NEXT_TORCH))
    play = node.play("site.yml", GOOD, bedplate_profiles=[str(node_profiles)])
    assert play.code != 0
    assert f"bedplate lock {GOOD}" in play.output

    (node_profiles / GOOD / "lock.yml").unlink()
    play = node.play("site.yml", GOOD, bedplate_profiles=[str(node_profiles)])
    assert play.code != 0
    assert f"bedplate lock {GOOD}" in play.output
    assert node.sh("ls /opt") == ""


# ---- the happy numbers ----------------------------------------------------------------------------------------------


def test_second_run_changes_nothing_and_is_short(live: Node) -> None:
    started = time.monotonic()
    play = live.play("site.yml", GOOD)
    seconds = time.monotonic() - started
    assert play.code == 0, play.output
    recap = play.output[play.output.index("PLAY RECAP") :]
    assert "changed=0" in recap
    ok = int(recap.split("ok=")[1].split()[0])
    assert ok <= 13, recap
    assert seconds < 30
