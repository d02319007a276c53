"""Reading profiles: every mistake is named with file, line, key, and what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from small_wheels import make_wheel, profile_data, write_profile

from bedplate.controller import profiles
from bedplate.controller.errors import BedplateError
from bedplate.controller.locking import make_lock
from bedplate.controller.profiles import Profile, check_name, find_profiles, for_deploy, load_profile, python_of
from bedplate.controller.resolver import Sources, Upgrade
from bedplate.controller.schema import ProfileData, split_pin

ROOT = Path(__file__).resolve().parents[2]
TARGET = "cp312-x86_64"


def load_error(tmp_path: Path, data: dict[str, Any] | str) -> str:
    write_profile(tmp_path, "small", data)
    with pytest.raises(BedplateError) as caught:
        load_profile("small", [tmp_path])
    return str(caught.value).replace(f"{tmp_path}/small/", "")


def locked(tmp_path: Path, name: str = "small", **extra: Any) -> Profile:
    make_wheel(tmp_path / "wheels", "alpha", "1.0")
    write_profile(tmp_path / "profiles", name, profile_data() | extra)
    profile = load_profile(name, [tmp_path / "profiles"])
    sources = Sources(no_index=True, find_links=[str(tmp_path / "wheels")])
    make_lock(profile, [], sources, Upgrade()).write()
    return load_profile(name, [tmp_path / "profiles"])


# names and places


@pytest.mark.parametrize("name", ["../etc", "a/b", "with space", "a" * 300, "", "-x", ".hidden", "Upper", "a\n", "ü"])
def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BedplateError, match=r"is not a profile name: 1 to 64 characters of a-z 0-9 \. _ -"):
        load_profile(name, [tmp_path])


def test_a_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(BedplateError, match=r"it has 300") as caught:
        check_name("a" * 300)
    assert len(str(caught.value)) < 250


@given(st.text(max_size=80))
def test_a_name_that_passes_is_one_path_component(name: str) -> None:
    try:
        check_name(name)
    except BedplateError:
        return
    assert Path("/profiles", name).resolve().parent == Path("/profiles")
    assert 1 <= len(name) <= 64


def test_unknown_name_shows_the_near_one_and_the_list(tmp_path: Path) -> None:
    write_profile(tmp_path, "cu130-torch2.11", profile_data())
    write_profile(tmp_path, "other", profile_data())
    with pytest.raises(BedplateError) as caught:
        load_profile("cu130-torch2.1", [tmp_path])
    assert str(caught.value) == (
        f"no profile `cu130-torch2.1` in {tmp_path}; did you mean `cu130-torch2.11`? Known: cu130-torch2.11, other."
    )


def test_first_directory_wins_and_files_are_no_profiles(tmp_path: Path) -> None:
    for part in ("one", "two"):
        write_profile(tmp_path / part, "same", profile_data() | {"description": part})
    (tmp_path / "one" / "not-a-profile").mkdir()
    assert list(find_profiles([tmp_path / "one", tmp_path / "two", tmp_path / "absent"])) == ["same"]
    assert load_profile("same", [tmp_path / "one", tmp_path / "two"]).data.description == "one"


def test_environment_names_the_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_PROFILES", f"{tmp_path}/a:{tmp_path}/b")
    assert profiles.search_path() == [tmp_path / "a", tmp_path / "b"]
    monkeypatch.delenv("BEDPLATE_PROFILES")
    assert profiles.search_path()[0].resolve() == ROOT / "profiles"


# mistakes in profile.yml


def test_unknown_key_near_name_and_allowed_keys(tmp_path: Path) -> None:
    data = profile_data(requirments=["torch==2.9.1"])
    assert load_error(tmp_path, data) == (
        "profile.yml:10: stack.requirments: unknown key; did you mean `requirements`? Allowed here: targets, glibc, "
        "requirements, indexes, hashes, system_packages"
    )


def test_all_mistakes_are_listed_at_once(tmp_path: Path) -> None:
    data = profile_data() | {"verify": {"imports": [], "collective": {"backend": "ncll", "ranks": [0]}}}
    del data["expect"]
    lines = load_error(tmp_path, data).splitlines()
    assert lines == [
        "profile.yml:1: expect: this key is missing",
        "profile.yml:11: verify.imports: list should have at least 1 item after validation, not 0 (is [])",
        "profile.yml:13: verify.collective.backend: is `ncll`; did you mean `nccl`? Allowed: nccl, gloo",
        "profile.yml:15: verify.collective.ranks[0]: input should be greater than or equal to 1 (is 0)",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("glibc: 2.34", "stack.glibc: must be text, is 2.34: put it in quotes"),
        ('glibc: "2.29"', "stack.glibc: `2.29` is not one of 2.17, 2.28, 2.31"),
        ("targets: [cp312]", "stack.targets[0]: `cp312` does not have the right form, such as `cp312-x86_64`"),
        ("targets: [cp311-x86_64, cp311-x86_64]", "stack.targets: given twice: cp311-x86_64"),
        ("requirements: [torch>=2]", "`torch>=2` is not an exact pin: write torch==VERSION, nothing else"),
        ("requirements: ['torch==2.*']", "`torch==2.*` is not an exact pin"),
        ("requirements: [torch==2; python_version>'3']", "is not an exact pin"),
        ("requirements: ['torch @ https://x/y.whl']", "is not an exact pin"),
        ("requirements: ['not a pin']", "`not a pin` is not a requirement: write NAME==VERSION"),
        ("requirements: [a-b==1, A_b==2]", "stack: given twice: a-b"),
        (
            "hashes: {alpha==1.0: {cp313-x86_64: [" + "a" * 64 + "]}}",
            "name the target cp313-x86_64, which `targets` does not list",
        ),
        ("hashes: {alpha==1.0: {cp312-x86_64: [abc]}}", "`abc` does not have the right form"),
        ("indexes: [{name: x, url: 'ftp://x', packages: [alpha]}]", "`ftp://x` does not have the right form"),
        ("indexes: [{name: x, url: 'https://x', packages: [beta]}]", "lists `beta`, which `requirements` does not pin"),
        ("system_packages: {apt: ['x; rm -rf /']}", "does not have the right form, such as `libnuma1`"),
    ],
)
def test_values_of_the_stack(tmp_path: Path, change: str, message: str) -> None:
    data = profile_data()
    data["stack"] |= yaml.safe_load(change)
    text = load_error(tmp_path, data)
    assert message in text
    assert text.startswith("profile.yml:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "profile.yml:1: the file is empty"),
        ("- a", "profile.yml:1: must be a mapping of keys"),
        ("schema: 1\nstack:\n  glibc: a\n  glibc: b\n", "profile.yml:4: key `glibc` is given twice, first in line 3"),
        ("schema: 1\nstack: [\n", "profile.yml:3: not valid YAML: "),
        ("a: &x {b: 1}\nc: *x\n", "profile.yml:1: aliases (`*name`) are not allowed here"),
        ("a: &x [*x]\n", "aliases (`*name`) are not allowed here"),
        ("1: a\n", "profile.yml:1: keys must be text; put `1` in quotes"),
        ("a: 2026-13-45\n", "profile.yml:1: not valid YAML: month must be in 1..12"),
        ("a: \x00\n", "profile.yml:1: not valid YAML: "),
        ("schema: 2\n", "profile.yml:1: schema: is `2`. Allowed: 1"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, message: str) -> None:
    assert message in load_error(tmp_path, text)


@given(st.text(min_size=1, max_size=20), st.sampled_from(["", "stack", "expect", "verify.collective"]))
def test_any_unknown_key_is_named(tmp_path_factory: pytest.TempPathFactory, key: str, place: str) -> None:
    data: dict[str, Any] = profile_data()
    block, model = data, ProfileData
    for part in filter(None, place.split(".")):
        block = block[part]
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation  # type: ignore[assignment]
    if key in {field.alias or name for name, field in model.model_fields.items()}:
        return
    block[key] = 1
    text = load_error(tmp_path_factory.mktemp("key"), data)
    assert f"{place}.{key}".lstrip(".") in text if place else key in text
    assert "unknown key" in text
    assert "Allowed here: " in text


@given(st.text(max_size=30))
def test_pins_are_split_or_refused(pin: str) -> None:
    try:
        name, version = split_pin(pin)
    except ValueError:
        return
    assert split_pin(f"{name}=={version}") == (name, version)


# locks


def test_unlocked_profile_names_the_command(tmp_path: Path) -> None:
    write_profile(tmp_path, "small", profile_data())
    with pytest.raises(BedplateError) as caught:
        for_deploy("small", TARGET, [tmp_path])
    assert str(caught.value) == f"profile small is not locked: run `bedplate lock small --profiles {tmp_path}`"


def test_locked_profile_has_all_that_a_role_needs(tmp_path: Path) -> None:
    profile = locked(tmp_path)
    plan = for_deploy("small", "cp311-x86_64", [tmp_path / "profiles"])
    lock_file = tmp_path / "profiles" / "small" / "cp311-x86_64.lock"
    assert plan["id"] == profile.id
    assert plan["python"] == "3.11"
    assert plan["lock_file"] == str(lock_file)
    assert plan["lock_text"] == lock_file.read_text()
    assert plan["packages"] == 1
    assert plan["bytes"] == (tmp_path / "wheels" / "alpha-1.0-py3-none-any.whl").stat().st_size
    assert plan["system_packages"] == {"apt": [], "dnf": []}
    assert plan["driver"] is None
    assert {key: plan["expect"][key] for key in ("gpus", "gpu_ids", "arch", "iommu")} == {
        "gpus": 8,
        "gpu_ids": [],
        "arch": None,
        "iommu": "any",
    }
    assert for_deploy("small", "", [tmp_path / "profiles"])["target"] == TARGET, "empty means the first"


def test_refused_profile_needs_permission(tmp_path: Path) -> None:
    locked(tmp_path, refused="It does not load.")
    with pytest.raises(BedplateError, match=r"^profile small is refused: It does not load\. To deploy it all the same"):
        for_deploy("small", TARGET, [tmp_path / "profiles"])
    plan = for_deploy("small", TARGET, [tmp_path / "profiles"], allow_refused=True)
    assert plan["refused"] == "It does not load."


def test_changed_profile_makes_the_lock_stale(tmp_path: Path) -> None:
    profile = locked(tmp_path)
    write_profile(tmp_path / "profiles", "small", profile_data("alpha==1.1"))
    with pytest.raises(BedplateError, match=r"lock\.yml does not match .*profile\.yml: the profile changed after"):
        load_profile("small", [tmp_path / "profiles"]).target_lock(TARGET)
    # what no lock depends on may change
    write_profile(tmp_path / "profiles", "small", profile_data() | {"expect": {"gpus": 4}})
    changed = load_profile("small", [tmp_path / "profiles"])
    assert changed.lock_problem() is None
    assert changed.id != profile.id


def test_edited_missing_and_damaged_locks(tmp_path: Path) -> None:
    profile = locked(tmp_path)
    file = profile.lock_path(TARGET)
    original = file.read_text()
    file.write_text(original.replace("alpha==1.0", "alpha==1.1"))
    assert "is not the file that was locked (its sha256 differs" in str(profile.target_problem(TARGET))
    file.unlink()
    assert f"{file} is missing: run `bedplate lock small" in str(profile.target_problem(TARGET))
    file.write_text(original)
    assert profile.target_problem(TARGET) is None
    (profile.path / "lock.yml").write_text("schema: 1\ntargets: 7\n")
    with pytest.raises(BedplateError, match=r"lock\.yml:2: targets: .*\n.*\nWrite it anew: `bedplate lock small"):
        load_profile("small", [tmp_path / "profiles"]).target_lock(TARGET)


def test_target_that_the_profile_does_not_have(tmp_path: Path) -> None:
    problem = locked(tmp_path).target_problem("cp313-x86_64")
    assert problem is not None
    assert problem.startswith("profile small has no target `cp313-x86_64`; did you mean `cp31")
    assert problem.endswith("Its targets: cp312-x86_64, cp311-x86_64")


def test_id_depends_on_profile_and_locks_only(tmp_path: Path) -> None:
    one = locked(tmp_path / "a")
    two = locked(tmp_path / "b")
    assert one.id == two.id
    assert one.id.startswith("small-")
    assert len(one.id) == len("small-") + 12
    lock_file = one.path / "lock.yml"
    lock_file.write_text(lock_file.read_text().replace("unchecked", "pass"))
    assert load_profile("small", [tmp_path / "a" / "profiles"]).id == one.id
    one.lock_path(TARGET).write_text("")
    assert load_profile("small", [tmp_path / "a" / "profiles"]).id != two.id


def test_python_of() -> None:
    assert [python_of("cp39-x86_64"), python_of("cp312-aarch64")] == ["3.9", "3.12"]


# the profiles that are shipped


def test_shipped_profiles() -> None:
    shipped = {name: load_profile(name, [ROOT / "profiles"]) for name in find_profiles([ROOT / "profiles"])}
    assert set(shipped) == {"cu128-torch2.9.1", "cu130-torch2.11", "cu130-torch2.9.1", "incident-torch2.10"}
    states = {name: profile.lock_problem() for name, profile in shipped.items()}
    assert (
        states.pop("cu130-torch2.9.1") == "profile cu130-torch2.9.1 is not locked: run `bedplate lock cu130-torch2.9.1`"
    )
    assert set(states.values()) == {None}
    assert [name for name, profile in shipped.items() if profile.data.refused] == ["incident-torch2.10"]
    for profile in shipped.values():
        for lock in profile.lock.targets.values() if profile.lock else ():
            assert all(file.size for file in lock.files)


def test_unknown_operation_is_named_with_the_near_one(tmp_path: Path) -> None:
    data = profile_data()
    write_profile(tmp_path, "small", data | {"verify": {**data["verify"], "operations": ["gem"]}})
    with pytest.raises(BedplateError, match=r"verify\.operations\[0\]: `gem` is no operation; did you mean `gemm`\?"):
        load_profile("small", [tmp_path])
