"""The locks of the toolkit, their parts, and the tables that must agree with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.toolkit.releases import COMPONENTS, closure, expected_components, lacking, packages, support
from bedplate.node.toolkit.wheels import Wheel, components_of, parse, render, select

FILES = Path(__file__).resolve().parents[2] / "roles" / "cuda_toolkit" / "files"
LOCKS = sorted(FILES.glob("toolkit-*-x86_64.lock"))


def version_of(lock: Path) -> str:
    return lock.name.split("-")[1]


@pytest.mark.parametrize("lock", LOCKS, ids=version_of)
def test_locks_hold_what_the_release_consists_of(lock: Path) -> None:
    version = version_of(lock)
    wheels = parse(lock.read_text())
    found = {component: wheel.version for wheel in wheels for component in components_of(wheel.name)}
    wanted = {name: text for name, text in COMPONENTS[version].items() if name not in lacking(version, "wheels")}
    assert found == wanted
    assert [wheel.name for wheel in wheels] == sorted({wheel.name for wheel in wheels})
    assert "://" not in lock.read_text()


def test_every_release_has_a_lock() -> None:
    assert {version_of(lock) for lock in LOCKS} == set(COMPONENTS)


def test_tables_are_sorted() -> None:
    assert list(COMPONENTS) == sorted(COMPONENTS)
    assert all(list(parts) == sorted(parts) for parts in COMPONENTS.values())


TEXT = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=9)
WHEELS = st.builds(
    Wheel,
    file=TEXT.map(lambda text: f"{text}.whl"),
    size=st.integers(0, 10**10),
    name=TEXT,
    version=TEXT,
    sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
)


@given(st.lists(WHEELS, min_size=1, unique_by=lambda wheel: wheel.name), st.sampled_from(["", "Written by a test."]))
def test_what_is_rendered_is_parsed(wheels: list[Wheel], heading: str) -> None:
    assert parse(render(wheels, heading)) == sorted(wheels, key=lambda wheel: wheel.name)


@given(st.text(max_size=200))
def test_any_text_is_a_lock_or_an_error(text: str) -> None:
    try:
        wheels = parse(text)
    except ValueError:
        return
    assert all(wheel.sha256 in text for wheel in wheels)


def test_a_part_of_a_lock_brings_what_it_needs() -> None:
    text = (FILES / "toolkit-13.0.1-x86_64.lock").read_text()
    chosen = select(text, "13.0.1", ["nvcc"])
    names = {wheel.name for wheel in parse(chosen["lock"])}
    assert names == {"nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-nvvm"}
    assert chosen["bytes"] < 120e6
    assert chosen["id"].startswith("13.0.1-")
    assert select(text, "13.0.1", ["nvcc"]) == chosen
    assert select(text, "13.0.1", [])["id"] != chosen["id"]


def test_what_the_wheels_do_not_bring_is_refused_by_name() -> None:
    text = (FILES / "toolkit-12.8.1-x86_64.lock").read_text()
    with pytest.raises(ValueError, match=r"the wheels of CUDA 12\.8\.1 bring no nvcc.*cuda_toolkit_source=nvidia"):
        select(text, "12.8.1", ["nvcc"])
    with pytest.raises(ValueError, match="has no component nvvc; it has cccl, crt"):
        select(text, "12.8.1", ["nvvc"])


def test_packages_of_a_release_are_leaves_at_its_versions() -> None:
    found = packages("13.0.1", [])
    assert found["libcublas-13-0"] == "13.0.2.14"
    assert found["cuda-cudart-13-0"] == "13.0.88"
    assert found["cuda-toolkit-13-0-config-common"] == "13.0.88"
    assert packages("13.0.2", [])["libcublas-13-0"] == "13.1.0.3"
    assert packages("12.8.1", ["nvcc"])["cuda-nvvm-12-8"] == "12.8.93"
    metas = ("cuda-toolkit-13-0", "cuda-13-0", "cuda-runtime-13-0", "cuda-libraries-13-0", "cuda-compiler-13-0")
    assert not set(metas) & set(found)
    with pytest.raises(ValueError, match=r"13\.0\.9 is not one of the releases"):
        packages("13.0.9", [])
    with pytest.raises(ValueError, match="has no component nvvc"):
        packages("13.0.1", ["nvvc"])


def test_closure_ends_and_is_sorted() -> None:
    assert closure(["cusolver"]) == ["cublas", "cusolver", "cusparse", "nvjitlink"]
    assert closure([]) == []


def test_what_a_toolkit_must_have() -> None:
    assert "nvcc" not in expected_components("12.8.1", "wheels", [])
    assert expected_components("12.8.1", "nvidia", [])["nvcc"] == "12.8.93"
    assert expected_components("13.0.1", "none", []).keys() == {"cccl", "crt", "cudart", "nvcc", "nvvm"}
    assert set(expected_components("14.0.0", "wheels", []).values()) == {""}


def test_a_release_that_is_not_in_the_table_takes_the_limits_of_the_one_before() -> None:
    assert support("13.4.0") == support("13.0.1")
    assert support("12.9.1") == support("12.8.1")
    assert support("11.8.0").driver == support("12.8.1").driver
