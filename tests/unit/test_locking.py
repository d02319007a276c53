"""Locking: one hash per package and target, the file that an installer takes, and nothing lost when it fails."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uv
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.tags import Tag
from small_wheels import make_wheel, profile_data, sha256, write_profile

from bedplate.controller import locking
from bedplate.controller.abi_index import save_index
from bedplate.controller.errors import BedplateError
from bedplate.controller.locking import NewLock, differences, make_lock, record_abi
from bedplate.controller.profiles import Profile, load_profile
from bedplate.controller.resolver import Resolved, Sources, Upgrade, explain
from bedplate.controller.wheels import Candidate, choose, target_tags
from bedplate.node.abi.exports import Release, TorchIndex
from bedplate.node.verdicts import Verdict

TARGET = "cp312-x86_64"
NO_UPGRADE = Upgrade()


class Site:
    """A directory of wheels and profiles."""

    def __init__(self, path: Path) -> None:
        self.wheels = path / "wheels"
        self.profiles = path / "profiles"
        self.wheels.mkdir()

    @property
    def sources(self) -> Sources:
        return Sources(no_index=True, find_links=[str(self.wheels)])

    def profile(self, *requirements: str, **stack: object) -> Profile:
        write_profile(self.profiles, "small", profile_data(*requirements, **stack))
        return load_profile("small", [self.profiles])

    def lock(self, *requirements: str, upgrade: Upgrade = NO_UPGRADE, **stack: object) -> NewLock:
        profile = self.profile(*requirements, **{"targets": [TARGET], **stack})
        new = make_lock(profile, [], self.sources, upgrade)
        new.write()
        return new

    def versions(self) -> dict[str, str]:
        lock = load_profile("small", [self.profiles]).target_lock(TARGET)
        return {file.name: file.version for file in lock.files}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


# which wheel


def installed_by_uv(wheels: Path, to: Path, glibc: str) -> str:
    """Return the file name that uv installs alpha from, for TARGET."""
    command = [uv.find_uv_bin(), "pip", "install", "alpha", "--target", str(to), "--quiet", "--no-index", "--no-cache"]
    command += ["--find-links", str(wheels), "--python", sys.executable, "--python-version", "3.12"]
    command += ["--python-platform", f"x86_64-manylinux_{glibc.replace('.', '_')}"]
    subprocess.run(command, check=True, capture_output=True)
    return (to / "alpha.py").read_text().split("'")[1]


TAGS = [
    "py3-none-any",
    "py2.py3-none-any",
    "py312-none-any",
    "cp312-cp312-manylinux_2_28_x86_64",
    "cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64",
    "cp312-cp312-manylinux2014_x86_64",
    "cp312-cp312-linux_x86_64",
    "cp312-cp312-manylinux_2_35_x86_64",
    "cp312-none-manylinux_2_28_x86_64",
    "cp312-abi3-manylinux_2_28_x86_64",
    "cp310-abi3-manylinux_2_5_x86_64.manylinux1_x86_64",
    "cp311-cp311-manylinux_2_28_x86_64",
    "py3-none-manylinux_2_12_x86_64.manylinux2010_x86_64",
    "py3-none-manylinux_2_27_aarch64",
    "cp312-cp312t-manylinux_2_28_x86_64",
    "cp312-cp312-musllinux_1_2_x86_64",
]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(["", "1", "3", "10"])), min_size=1, max_size=6),
    st.sampled_from(["2.28", "2.34"]),
)
def test_choice_is_uvs_choice(
    tmp_path_factory: pytest.TempPathFactory, offers: list[tuple[str, str]], glibc: str
) -> None:
    work = tmp_path_factory.mktemp("choice")
    paths = {make_wheel(work / "wheels", "alpha", "1.0", tag, build=build) for tag, build in offers}
    candidates = [Candidate(path.name, str(path), path.name, None) for path in paths]
    mine = chosen(candidates, target_tags(TARGET, glibc))
    if mine == "ambiguous":  # uv takes one of them; a lock must not
        return
    if mine == "none":
        with pytest.raises(subprocess.CalledProcessError):
            installed_by_uv(work / "wheels", work / "site", glibc)
        return
    assert mine == installed_by_uv(work / "wheels", work / "site", glibc)


def chosen(candidates: list[Candidate], tags: list[Tag]) -> str:
    try:
        return choose(candidates, tags, None).file
    except BedplateError as error:
        return "none" if str(error) == "no wheel fits" else "ambiguous"


def test_build_number_wins_as_for_torch_2_10(site: Site) -> None:
    tag = "cp312-cp312-manylinux_2_28_x86_64"
    make_wheel(site.wheels, "alpha", "1.0", tag)
    make_wheel(site.wheels, "alpha", "1.0", tag, build="3")
    new = site.lock("alpha==1.0")
    assert [file.file for file in new.data.targets[TARGET].files] == [f"alpha-1.0-3-{tag}.whl"]


def test_tags_of_a_target() -> None:
    tags = target_tags("cp311-aarch64", "2.28")
    assert tags[0] == Tag("cp311", "cp311", "manylinux_2_28_aarch64")
    assert Tag("cp311", "cp311", "manylinux_2_29_aarch64") not in tags
    assert Tag("cp310", "abi3", "manylinux2014_aarch64") in tags
    assert tags[-1] == Tag("py30", "none", "any")


def test_names_that_are_no_wheels_are_passed_over() -> None:
    candidates = [Candidate("alpha-1.0.tar.gz", "", "a", 1), Candidate("alpha-1.0-py3-none-any.whl", "", "b", 1)]
    assert choose(candidates, target_tags(TARGET, "2.28"), None).sha256 == "b"


# what is written


def test_lock_files(site: Site) -> None:
    make_wheel(site.wheels, "beta-two", "2.0+cu130")
    make_wheel(site.wheels, "alpha", "1.0", requires="beta-two")
    new = site.lock("alpha==1.0", targets=[TARGET, "cp311-x86_64"])
    folder = site.profiles / "small"
    alpha, beta = (next(site.wheels.glob(f"{stem}*")) for stem in ("alpha", "beta"))
    assert (folder / "cp311-x86_64.lock").read_text() == (
        "# Written by `bedplate lock small` for cp311-x86_64. Do not edit.\n"
        f"alpha==1.0 \\\n    --hash=sha256:{sha256(alpha)}\n"
        f"beta-two==2.0+cu130 \\\n    --hash=sha256:{sha256(beta)}\n"
    )
    data = yaml.safe_load((folder / "lock.yml").read_text())
    assert list(data) == ["schema", "inputs_sha256", "tools", "targets", "abi"]
    assert data["targets"][TARGET]["files"][1] == {
        "name": "beta-two",
        "version": "2.0+cu130",
        "file": "beta_two-2.0+cu130-py3-none-any.whl",
        "size": beta.stat().st_size,
        "sha256": sha256(beta),
    }
    assert data["abi"]["status"] == "unchecked"
    assert sorted(path.name for path in folder.iterdir()) == [
        "cp311-x86_64.lock",
        "cp312-x86_64.lock",
        "lock.yml",
        "profile.yml",
    ]
    assert new.changes[TARGET] == ["+ alpha 1.0", "+ beta-two 2.0+cu130"]


def test_uv_installs_from_the_lock(site: Site, tmp_path: Path) -> None:
    make_wheel(site.wheels, "alpha", "1.0", requires="beta")
    make_wheel(site.wheels, "beta", "2.0")
    site.lock("alpha==1.0")
    lock = site.profiles / "small" / f"{TARGET}.lock"
    command = [uv.find_uv_bin(), "pip", "install", "--require-hashes", "-r", str(lock), "--target", str(tmp_path / "s")]
    options = ["--python", sys.executable, "--no-index", "--find-links", str(site.wheels), "--no-cache"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    assert (tmp_path / "s" / "beta.py").exists()


def test_locking_again_changes_no_byte(site: Site) -> None:
    make_wheel(site.wheels, "alpha", "1.0")
    site.lock("alpha==1.0")
    before = {path.name: path.read_bytes() for path in (site.profiles / "small").iterdir()}
    again = make_lock(load_profile("small", [site.profiles]), [], site.sources, NO_UPGRADE)
    assert again.differing() == []
    again.write()
    assert {path.name: path.read_bytes() for path in (site.profiles / "small").iterdir()} == before


def test_a_lock_moves_only_when_asked(site: Site) -> None:
    make_wheel(site.wheels, "alpha", "1.0", requires="beta, gamma")
    make_wheel(site.wheels, "alpha", "1.1", requires="beta, gamma")
    for name in ("beta", "gamma"):
        make_wheel(site.wheels, name, "1.0")
    site.lock("alpha==1.0")
    for name in ("beta", "gamma"):
        make_wheel(site.wheels, name, "2.0")
    assert site.lock("alpha==1.1").changes[TARGET] == ["~ alpha 1.0 -> 1.1"]
    assert site.lock("alpha==1.1", upgrade=Upgrade(packages=["beta"])).changes[TARGET] == ["~ beta 1.0 -> 2.0"]
    assert site.lock("alpha==1.1", upgrade=Upgrade(everything=True)).changes[TARGET] == ["~ gamma 1.0 -> 2.0"]


def test_the_uv_stays_as_long_as_the_content(site: Site) -> None:
    make_wheel(site.wheels, "alpha", "1.0")
    make_wheel(site.wheels, "alpha", "1.1")
    site.lock("alpha==1.0")
    lock = site.profiles / "small" / "lock.yml"
    lock.write_text(lock.read_text().replace(f"uv: {uv_version()}", "uv: 0.1.0"))
    assert site.lock("alpha==1.0").data.tools == {"uv": "0.1.0"}
    assert site.lock("alpha==1.1").data.tools == {"uv": uv_version()}


def test_a_lock_that_is_no_text_is_written_anew(site: Site) -> None:
    make_wheel(site.wheels, "alpha", "1.0")
    site.lock("alpha==1.0")
    lock = site.profiles / "small" / "lock.yml"
    lock.write_bytes(b"schema: \xff\n")
    new = make_lock(load_profile("small", [site.profiles]), [], site.sources, NO_UPGRADE)
    assert new.differing() == [lock]


class Check:
    """Stands for the ABI check: `status` is what it finds next, `calls` how often it was asked."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site = site
        self.status = "pass"
        self.calls = 0
        monkeypatch.setattr(locking, "check_lock", self.check)

    def check(self, *_: object, **__: object) -> list[Verdict]:
        self.calls += 1
        code = {"pass": "abi.ok", "fail": "abi.undefined_symbol", "inconclusive": "abi.unreadable_file"}[self.status]
        return [Verdict(code, self.status, "stack", "small", f"It is {self.status}.", {}, "Do something.")]

    def lock(self, **stack: object) -> tuple[str, bool]:
        """Lock as the command does; return the recorded status, and whether the files were asked."""
        before = self.calls
        self.site.lock("alpha==1.0", **stack)
        record_abi(load_profile("small", [self.site.profiles]))
        lock = load_profile("small", [self.site.profiles]).lock
        assert lock is not None
        return lock.abi.status, self.calls > before


@pytest.fixture
def check(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    monkeypatch.setenv("BEDPLATE_ABI_INDEX", str(tmp_path / "torch.idx"))
    save_index(TorchIndex(), tmp_path / "torch.idx")
    make_wheel(site.wheels, "alpha", "1.0")
    return Check(site, monkeypatch)


def test_a_verdict_stays_as_long_as_what_it_was_found_on(check: Check, site: Site, tmp_path: Path) -> None:
    assert check.lock() == ("pass", True)
    assert check.lock() == ("pass", False)
    again = make_lock(load_profile("small", [site.profiles]), [], site.sources, NO_UPGRADE)
    assert again.differing() == []
    assert check.lock(glibc="2.17") == ("pass", True)
    assert check.lock(glibc="2.17") == ("pass", False)
    index = TorchIndex()
    index.add(Release("2.9.1"), {"libc10.so": ["_ZN3c103fooEv"]})
    save_index(index, tmp_path / "torch.idx")
    assert check.lock(glibc="2.17") == ("pass", True)
    save_index(index, tmp_path / "torch-x86_64.private.idx")
    assert check.lock(glibc="2.17") == ("pass", True)
    assert check.lock(glibc="2.17") == ("pass", False)


def test_a_verdict_goes_with_the_architecture(check: Check, site: Site) -> None:
    check.lock()
    data = profile_data("alpha==1.0", targets=[TARGET]) | {"expect": {"gpus": 8, "arch": "sm_120"}}
    write_profile(site.profiles, "small", data)
    new = make_lock(load_profile("small", [site.profiles]), [], site.sources, NO_UPGRADE)
    assert new.data.abi.status == "unchecked"


def test_a_fail_is_asked_again_and_only_an_answer_clears_it(check: Check) -> None:
    check.status = "fail"
    assert check.lock() == ("fail", True)
    check.status = "inconclusive"
    assert check.lock() == ("fail", True), "an index out of reach proves nothing"
    check.status = "pass"
    assert check.lock() == ("pass", True)


def test_a_verdict_without_what_it_was_found_on_is_asked_for_again(check: Check, site: Site) -> None:
    check.lock()
    lock = site.profiles / "small" / "lock.yml"
    lock.write_text(re.sub(r", basis_sha256: [0-9a-f]{64}", "", lock.read_text()))
    assert load_profile("small", [site.profiles]).lock_problem() is None
    assert check.lock() == ("pass", True)
    assert "basis_sha256" in lock.read_text()


def uv_version() -> str:
    return subprocess.run([uv.find_uv_bin(), "--version"], capture_output=True, text=True, check=True).stdout.split()[1]


def test_one_target_alone(site: Site) -> None:
    make_wheel(site.wheels, "alpha", "1.0")
    make_wheel(site.wheels, "alpha", "1.1")
    both = [TARGET, "cp311-x86_64"]
    profile = site.profile("alpha==1.0", targets=both)
    make_lock(profile, ["cp311-x86_64"], site.sources, NO_UPGRADE).write()
    profile = load_profile("small", [site.profiles])
    assert profile.target_problem("cp311-x86_64") is None
    assert str(profile.target_problem(TARGET)).startswith(
        f"profile small is not locked for {TARGET}: run `bedplate lock"
    )
    make_lock(profile, [TARGET], site.sources, NO_UPGRADE).write()
    assert load_profile("small", [site.profiles]).lock_problem() is None
    changed = site.profile("alpha==1.1", targets=both)
    with pytest.raises(BedplateError, match=r"^cp311-x86_64 was locked before the profile changed .* lock all targets"):
        make_lock(changed, [TARGET], site.sources, NO_UPGRADE)
    with pytest.raises(BedplateError, match="has no target `cp313-x86_64`"):
        make_lock(changed, ["cp313-x86_64"], site.sources, NO_UPGRADE)


def test_a_target_that_is_dropped_loses_its_file(site: Site) -> None:
    make_wheel(site.wheels, "alpha", "1.0")
    site.lock("alpha==1.0", targets=[TARGET, "cp311-x86_64"])
    site.lock("alpha==1.0", targets=[TARGET])
    assert not (site.profiles / "small" / "cp311-x86_64.lock").exists()
    assert load_profile("small", [site.profiles]).lock_problem() is None


# hashes


def test_hashes_choose_the_file(site: Site) -> None:
    plain = make_wheel(site.wheels, "alpha", "1.0")
    make_wheel(site.wheels, "alpha", "1.0", "cp312-cp312-manylinux_2_28_x86_64")
    new = site.lock("alpha==1.0", hashes={"alpha==1.0": {TARGET: [sha256(plain)]}})
    assert new.data.targets[TARGET].files[0].file == plain.name


def test_no_allowed_hash_names_package_allowed_and_found(site: Site) -> None:
    wheel = make_wheel(site.wheels, "alpha", "1.0")
    with pytest.raises(BedplateError) as caught:
        site.lock("alpha==1.0", hashes={"alpha==1.0": {TARGET: ["0" * 64]}})
    assert str(caught.value) == (
        f"profile small, {TARGET}: alpha==1.0: no file has an allowed sha256. Allowed: {'0' * 64}. Found: "
        f"{sha256(wheel)} ({wheel.name}).\nNothing was changed; try again with `bedplate lock small "
        f"--profiles {site.profiles}`"
    )
    assert not (site.profiles / "small" / "lock.yml").exists()


def test_a_constraint_that_meets_nothing_is_a_mistake(site: Site) -> None:
    make_wheel(site.wheels, "alpha", "1.0")
    with pytest.raises(BedplateError, match=r"constrains alpha==1\.1, but the set for cp312-x86_64 has alpha==1\.0"):
        site.lock("alpha==1.0", hashes={"alpha==1.1": {TARGET: ["0" * 64]}})
    with pytest.raises(BedplateError, match=r"constrains beta==1, but the set for cp312-x86_64 has no beta"):
        site.lock("alpha==1.0", hashes={"beta==1": {TARGET: ["0" * 64]}})


# indexes


class Web(ThreadingHTTPServer):
    """Serves a directory; `simple(package, links)` writes the page of a package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(("127.0.0.1", 0), partial(Quiet, directory=str(path)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def simple(self, package: str, links: dict[str, Path]) -> None:
        page = self.path / "simple" / package
        page.mkdir(parents=True, exist_ok=True)
        lines = []
        for url, wheel in links.items():
            target = self.path / url
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(wheel.read_bytes())
            lines.append(f'<a href="/{url}#sha256={sha256(wheel)}">{wheel.name}</a>')
        (page / "index.html").write_text("<!DOCTYPE html><html><body>" + "\n".join(lines) + "</body></html>")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("UV_NO_CACHE", "1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with Web(tmp_path / "web") as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def test_an_index_serves_its_packages_and_no_others(site: Site, web: Web, tmp_path: Path) -> None:
    good = make_wheel(tmp_path / "good", "alpha", "1.0", requires="beta")
    bad = make_wheel(tmp_path / "bad", "beta", "9.0")
    web.simple("alpha", {f"x/{good.name}": good})
    web.simple("beta", {f"x/{bad.name}": bad})
    make_wheel(site.wheels, "beta", "1.0")
    index = {"name": "extra", "url": f"{web.url}/simple", "packages": ["alpha"]}
    profile = site.profile("alpha==1.0", targets=[TARGET], indexes=[index])
    sources = Sources(index_url=f"{web.url}/empty", find_links=[str(site.wheels)])
    (web.path / "empty").mkdir()
    make_lock(profile, [], sources, NO_UPGRADE).write()
    assert site.versions() == {"alpha": "1.0", "beta": "1.0"}


def test_one_version_two_files_is_no_pin(site: Site, web: Web, tmp_path: Path) -> None:
    """As on the index that lists eight files under sgl-kernel 0.3.21+cu130."""
    one = make_wheel(tmp_path / "one", "alpha", "1.0")
    two = make_wheel(tmp_path / "two", "alpha", "1.0", requires="beta")
    web.simple("alpha", {f"one/{one.name}": one, f"two/{two.name}": two})
    index = {"name": "extra", "url": f"{web.url}/simple", "packages": ["alpha"]}
    make_wheel(site.wheels, "beta", "1.0")
    sources = Sources(index_url=f"{web.url}/simple", find_links=[str(site.wheels)])
    profile = site.profile("alpha==1.0", targets=[TARGET], indexes=[index])
    with pytest.raises(
        BedplateError, match=r"alpha==1\.0: 2 different files fit equally well: .* Allow one in `stack\.h"
    ):
        make_lock(profile, [], sources, NO_UPGRADE)
    hashes = {"alpha==1.0": {TARGET: [sha256(one)]}}
    profile = site.profile("alpha==1.0", targets=[TARGET], indexes=[index], hashes=hashes)
    new = make_lock(profile, [], sources, NO_UPGRADE)
    assert new.data.targets[TARGET].files[0].sha256 == sha256(one)
    assert new.data.targets[TARGET].files[0].size is None, "an HTML page gives no size, and none is made up"


def test_an_index_without_hashes_cannot_be_locked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = Candidate("alpha-1.0-py3-none-any.whl", "https://x/alpha-1.0-py3-none-any.whl", None, None)
    monkeypatch.setattr(locking, "resolve", lambda *_: [Resolved("alpha", "1.0", [wheel])])
    with pytest.raises(
        BedplateError, match=r"https://x/alpha-1\.0-py3-none-any\.whl: its index gives no sha256\. Download"
    ):
        site.lock("alpha==1.0")


def test_unreachable_index_is_named_and_nothing_is_lost(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    make_wheel(site.wheels, "alpha", "1.0")
    site.lock("alpha==1.0")
    before = {path.name: path.read_bytes() for path in (site.profiles / "small").iterdir()}
    sources = Sources(index_url="http://127.0.0.1:9/simple")
    with pytest.raises(BedplateError) as caught:
        make_lock(load_profile("small", [site.profiles]), [], sources, NO_UPGRADE)
    text = str(caught.value)
    assert text.startswith(f"profile small, {TARGET}: cannot read http://127.0.0.1:9/simple/alpha/ (Connection refused")
    assert text.endswith(f"try again with `bedplate lock small --profiles {site.profiles}`")
    assert {path.name: path.read_bytes() for path in (site.profiles / "small").iterdir()} == before


def test_credentials_of_an_index_are_never_written_down(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://ci:s3cr@t@127.0.0.1:9/simple")
    make_wheel(site.wheels, "alpha", "1.0", "cp312-cp312-manylinux_2_28_x86_64", requires="torch")
    make_wheel(site.wheels, "torch", "2.9.1")
    site.lock("alpha==1.0")
    abi = record_abi(load_profile("small", [site.profiles]))
    assert abi.status == "inconclusive"
    assert "cannot read the index http://127.0.0.1:9/simple" in abi.reason
    text = (site.profiles / "small" / "lock.yml").read_text()
    assert "http://127.0.0.1:9/simple" in text
    assert "s3cr" not in text


@pytest.mark.parametrize(
    ("index_url", "words"),
    [
        ("http://127.0.0.1:9/mine", "cannot read the index http://127.0.0.1:9/mine"),
        (None, "alpha-1.0-cp312-cp312-manylinux_2_28_x86_64.whl is in none of the given directories, and no index may"),
    ],
)
def test_files_are_asked_from_where_the_lock_was_made(
    site: Site, monkeypatch: pytest.MonkeyPatch, index_url: str | None, words: str
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/public")
    make_wheel(site.wheels, "alpha", "1.0", "cp312-cp312-manylinux_2_28_x86_64", requires="torch")
    make_wheel(site.wheels, "torch", "2.9.1")
    site.lock("alpha==1.0")
    abi = record_abi(load_profile("small", [site.profiles]), index_url=index_url)
    assert abi.status == "inconclusive"
    assert words in abi.reason
    assert "public" not in abi.reason


# what uv refuses


def test_source_only_package_is_named(site: Site) -> None:
    make_wheel(site.wheels, "alpha", "1.0", requires="beta")
    (site.wheels / "beta-1.0.tar.gz").write_bytes(b"not read")
    with pytest.raises(
        BedplateError, match=r"beta(==1\.0)? has no wheels, only source\. Bedplate installs wheels only"
    ):
        site.lock("alpha==1.0")


def test_versions_that_exclude_each_other(site: Site) -> None:
    make_wheel(site.wheels, "alpha", "1.0", requires="beta<2")
    make_wheel(site.wheels, "beta", "2.0")
    with pytest.raises(BedplateError, match=r"no set of wheels fits cp312-x86_64 with glibc 2\.34: because .*beta<2"):
        site.lock("alpha==1.0", "beta==2.0")


def test_wheels_for_other_pythons_only(site: Site) -> None:
    make_wheel(site.wheels, "alpha", "1.0", "cp311-cp311-manylinux_2_28_x86_64")
    with pytest.raises(BedplateError, match=r"alpha==1\.0 has no wheels with a matching Python ABI tag"):
        site.lock("alpha==1.0")


def test_unknown_errors_are_shown_whole() -> None:
    assert explain("something new\nin two lines\n", TARGET, "2.34") == "uv failed: something new\nin two lines"


def test_unwritable_directory(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(site.wheels, "alpha", "1.0")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(BedplateError, match=r"cannot write .*\.lock: No space left on device; it is as it was"):
        site.lock("alpha==1.0")
    assert [path.name for path in (site.profiles / "small").iterdir()] == ["profile.yml"]


@given(
    st.dictionaries(st.text("abc", min_size=1), st.sampled_from("12")),
    st.dictionaries(st.text("abc", min_size=1), st.sampled_from("12")),
)
def test_differences_name_each_changed_package_once(before: dict[str, str], after: dict[str, str]) -> None:
    lines = differences(before, after)
    assert [line.split()[1] for line in lines] == sorted(
        name for name in {*before, *after} if before.get(name) != after.get(name)
    )
