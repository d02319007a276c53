"""The parsers of sysfs and configuration space: right on what the kernel writes, and total on everything else."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from host_tree import ACS_REDIRECTING, HostTree, aer, config_space, gpu_bus_id, resource
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.hardware import pci

ACS_AT = 0x148  # where host_tree puts it


def test_gpus_on_the_bus_are_found_without_a_driver(tmp_path: Path) -> None:
    tree = HostTree(tmp_path, gpus=2)
    tree.bind(1, None)
    assert pci.gpus_on_bus(str(tmp_path)) == [
        {"bus_id": gpu_bus_id(0), "pci_id": "10de:2bb5", "class": "0x030200", "driver": "nvidia"},
        {"bus_id": gpu_bus_id(1), "pci_id": "10de:2bb5", "class": "0x030200", "driver": None},
    ]


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("vendor", "0x1002\n", "another maker's"),
        ("class", "0x040300\n", "the GPU's sound"),
        ("class", "", "unreadable"),
    ],
)
def test_other_devices_are_no_gpus(tmp_path: Path, file: str, content: str, why: str) -> None:
    tree = HostTree(tmp_path, gpus=2)
    tree.gpu_file(0, file, content)
    assert [gpu["bus_id"] for gpu in pci.gpus_on_bus(str(tmp_path))] == [gpu_bus_id(1)], why


def test_a_machine_without_pci_has_no_gpus(tmp_path: Path) -> None:
    assert pci.gpus_on_bus(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("00000000:C1:00.0", "0000:c1:00.0"),
        ("0000:c1:00.0", "0000:c1:00.0"),
        ("00000001:01:00.0", "0001:01:00.0"),
        ("00010000:01:00.0", "00010000:01:00.0"),  # a domain of more than four digits, as on a VMD or Hyper-V
        ("", ""),
    ],
)
def test_bus_ids_of_nvml_become_those_of_sysfs(text: str, short: str) -> None:
    assert pci.short_bus_id(text) == short


def test_bars() -> None:
    windows = pci.bars(resource(131072))
    assert [(bar["index"], bar["size"] >> 20) for bar in windows] == [(0, 16), (1, 131072), (3, 32)]
    assert all(bar["start"] for bar in windows)
    # "BAR 1: no space for": a size and no address
    assert pci.bars("0x0000000000000000 0x000000000fffffff 0x000000000014220c\n")[0] == {
        "index": 0,
        "start": 0,
        "size": 256 << 20,
    }


@pytest.mark.parametrize(
    ("width", "speed", "read"),
    [
        ("16\n", "32.0 GT/s PCIe\n", (16, 32.0)),
        ("8", "2.5 GT/s PCIe", (8, 2.5)),
        ("63", "Unknown", (None, None)),  # a device that is gone
        ("0", "64.0 GT/s", (None, 64.0)),
        (None, None, (None, None)),
    ],
)
def test_links(width: str | None, speed: str | None, read: tuple[int | None, float | None]) -> None:
    assert (pci.link_width(width), pci.link_speed(speed)) == read


def test_aer_counters() -> None:
    text = aer("correctable", RxErr=3, BadTLP=4)
    assert pci.aer_total(text) == 7
    assert pci.aer_named(text) == {"RxErr": 3, "BadTLP": 4}
    assert pci.aer_total("RxErr 3\nBadTLP 4\n") == 7
    assert pci.aer_total(None) is None


def test_acs_of_a_bridge() -> None:
    found = pci.acs(config_space(0x1022, 0x14AB, ACS_REDIRECTING))
    assert found == {
        "readable": True,
        "capable": True,
        "control": 0x1D,
        "redirect": True,
        "on": ["SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"],
    }
    assert pci.acs(config_space(0x1022, 0x14AB, 0))["redirect"] is False
    assert pci.acs(config_space(0x1022, 0x14AB))["capable"] is False


@pytest.mark.parametrize(("bit", "redirects"), [(0x01, False), (0x04, True), (0x08, True), (0x10, False)])
def test_only_the_two_redirects_redirect(bit: int, redirects: bool) -> None:
    assert pci.acs(config_space(0x1022, 0x14AB, bit))["redirect"] is redirects


def test_what_a_user_may_read_holds_no_acs() -> None:
    assert pci.acs(config_space(0x1022, 0x14AB, ACS_REDIRECTING)[:64])["readable"] is False


def test_a_device_that_is_gone_answers_with_ones() -> None:
    assert pci.answers(b"\xff" * 64) is False
    assert pci.answers(config_space(0x10DE, 0x2BB5)) is True
    assert pci.answers(b"") is None
    assert pci.acs(b"\xff" * 4096)["capable"] is False


def test_a_list_of_capabilities_that_runs_in_a_circle_ends() -> None:
    space = bytearray(config_space(0x1022, 0x14AB))
    struct.pack_into("<I", space, 0x100, 0x0001 | 0x200 << 20)
    struct.pack_into("<I", space, 0x200, 0x0002 | 0x100 << 20)
    assert pci.extended_capability(bytes(space), pci.CAPABILITY_ACS) is None


def test_an_acs_cut_off_by_the_end_is_none() -> None:
    assert pci.acs(config_space(0x1022, 0x14AB, ACS_REDIRECTING)[: ACS_AT + 6])["capable"] is False


@given(st.binary(max_size=4200))
def test_configuration_space_never_raises(space: bytes) -> None:
    found = pci.acs(space)
    assert found["redirect"] == bool(found["control"] & 0x0C)
    assert pci.answers(space) in (True, False, None)


@given(st.binary(min_size=0x100, max_size=0x100), st.lists(st.integers(0, 0xFFFFFFFF), min_size=960, max_size=960))
def test_extended_capabilities_never_loop(head: bytes, words: list[int]) -> None:
    space = head + struct.pack("<960I", *words)
    offset = pci.extended_capability(space, pci.CAPABILITY_ACS)
    assert offset is None or struct.unpack_from("<H", space, offset)[0] == pci.CAPABILITY_ACS


@given(st.one_of(st.none(), st.text(), st.from_regex(r"[0-9a-fx .GT/s\n]{0,80}")))
def test_text_parsers_never_raise(text: str | None) -> None:
    pci.bars(text)
    pci.link_speed(text)
    pci.number(text)
    pci.aer_named(text)
    assert pci.link_width(text) in (None, *pci.LINK_WIDTHS)
    total = pci.aer_total(text)
    assert total is None or total >= 0
    pci.short_bus_id(text or "")


def test_unreadable_files_are_none(tmp_path: Path) -> None:
    assert pci.read_text(tmp_path / "none") is None
    assert pci.read_text(tmp_path) is None
    assert pci.link_name(tmp_path) is None
    os.symlink("../drivers/nvidia", tmp_path / "driver")
    assert pci.link_name(tmp_path / "driver") == "nvidia"
