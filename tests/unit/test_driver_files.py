"""The parsers under the driver checks: right on what tools write, and quiet on everything else."""

from __future__ import annotations

import contextlib
import lzma
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from driver_tree import KERNEL, NEXT_KERNEL, OPEN, VERSION, Tree, elf_module, healthy, key, signature_list, signed
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bedplate.node.driver import check as driver
from bedplate.node.driver import der, initramfs, kernel_modules, modprobe_config, package_state, secure_boot
from bedplate.node.driver.kernel_modules import ModuleError
from bedplate.node.driver.sysroot import Sysroot
from bedplate.node.verdicts import Verdict

MODULE = elf_module({"license": OPEN, "version": VERSION, "name": "nvidia", "license2": "x"})

# Roots that stand for "/": what a test reads must lie below them, whatever links say.


def test_absolute_links_stay_inside_the_root(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("/usr/src/headers/Makefile", "all:\n")
    tree.link("/lib/modules/k/build", "/usr/src/headers")
    tree.link("/lib/modules/k/up", "../../../../../../usr/src/headers")
    root = Sysroot(str(tmp_path))
    assert root.text("/lib/modules/k/build/Makefile") == "all:\n"
    assert root.text("/lib/modules/k/up/Makefile") == "all:\n"
    assert root.unreadable == {}


def test_what_is_no_file_is_noted_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("/loop")
    root = Sysroot(str(tmp_path))
    assert [root.read(f"/{name}") for name in ("fifo", "directory", "loop", "nothing", "a\0b")] == [None] * 5
    assert set(root.unreadable) == {"/fifo", "/directory", "/loop", "/a\0b"}
    assert root.names("/fifo") == []
    assert (root.mtime("/nothing"), root.size("/nothing"), root.free_bytes("/nothing")) == (None, None, None)


def test_a_file_that_may_not_be_read_is_not_taken_for_absent(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (tmp_path / "file").write_text("x")
    (tmp_path / "file").chmod(0)
    root = Sysroot(str(tmp_path))
    assert root.text("/file") is None
    assert root.unreadable == {"/file": "Permission denied"}


# Modules


def test_modinfo_and_signature_of_a_module() -> None:
    assert kernel_modules.modinfo(MODULE) == {
        "license": OPEN,
        "version": VERSION,
        "name": "nvidia",
        "license2": "x",
    }
    assert kernel_modules.signature(MODULE)["signed"] is False
    found = kernel_modules.signature(signed(MODULE, key("somebody")))
    assert (found["signed"], found["signer"], found["error"]) == (True, "somebody", "")
    assert found["serial"] == f"{key('somebody').certificate.serial_number:x}"


@pytest.mark.skipif(not shutil.which("modinfo"), reason="kmod is not installed")
def test_kmod_reads_the_same(tmp_path: Path) -> None:
    (tmp_path / "nvidia.ko").write_bytes(signed(MODULE, key("somebody")))
    done = subprocess.run(["modinfo", "-0", tmp_path / "nvidia.ko"], capture_output=True, check=True)
    theirs = kernel_modules.parse_modinfo_output(done.stdout)
    ours = kernel_modules.read_module(Sysroot("/"), str(tmp_path / "nvidia.ko"))
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_a_signature_as_openssl_makes_it(tmp_path: Path) -> None:
    """The kernel's sign-file calls the same code of OpenSSL, with the same flags."""
    common = ["openssl", "req", "-new", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "36500"]
    subprocess.run(
        [*common, "-subj", "/O=Bedplate/CN=DKMS module signing key", "-keyout", "k", "-out", "c"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "m").write_bytes(MODULE)
    sign = [
        "openssl",
        "cms",
        "-sign",
        "-binary",
        "-noattr",
        "-nocerts",
        "-nosmimecap",
        "-outform",
        "DER",
        "-md",
        "sha512",
    ]
    subprocess.run([*sign, "-in", "m", "-signer", "c", "-inkey", "k", "-out", "s"], cwd=tmp_path, check=True)
    subprocess.run(["openssl", "x509", "-in", "c", "-outform", "DER", "-out", "d"], cwd=tmp_path, check=True)
    signature, certificate = (tmp_path / "s").read_bytes(), der.certificate((tmp_path / "d").read_bytes())
    module = (
        MODULE + signature + struct.pack(">BBBBB3xI", 0, 0, 2, 0, 0, len(signature)) + kernel_modules.SIGNATURE_MAGIC
    )
    found = kernel_modules.signature(module)
    assert (found["signer"], found["serial"]) == ("DKMS module signing key", certificate.serial)
    assert found["_signer"].is_by(certificate)
    assert not found["_signer"].is_by(der.certificate(key("another").der))


def test_a_signature_by_key_id() -> None:
    who = der.Signer("", b"", "", b"\x01\x02\x03")
    assert not who.is_by(der.certificate(key("somebody").der))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x7fELF",
        MODULE[:100],
        MODULE[: len(MODULE) - 64],
        MODULE.replace(b"\0.modinfo", b"\0.modinfx"),
        b"x" * 4096,
    ],
)
def test_a_damaged_module_is_named(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ModuleError):
        kernel_modules.modinfo(data)
    (tmp_path / "nvidia.ko").write_bytes(data)
    found = kernel_modules.read_module(Sysroot(str(tmp_path)), "/nvidia.ko")
    assert (found["version"], found["license"], bool(found["error"])) == (None, None, True)


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".zst"])
def test_a_damaged_compressed_module_is_named(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"nvidia.ko{suffix}").write_bytes(lzma.compress(MODULE)[:80])
    found = kernel_modules.read_module(Sysroot(str(tmp_path)), f"/nvidia.ko{suffix}")
    assert (found["version"], bool(found["error"])) == (None, True)


@pytest.mark.parametrize("trailer", [b"", b"\xff" * 40, struct.pack(">BBBBB3xI", 0, 0, 2, 0, 0, 2**32 - 1)])
def test_a_signature_that_cannot_be_read_is_no_signature_by_anybody(trailer: bytes) -> None:
    found = kernel_modules.signature(trailer + kernel_modules.SIGNATURE_MAGIC)
    assert (found["signed"], found["signer"], bool(found["error"])) == (True, "", True)


def test_a_module_whose_signature_cannot_be_read_is_inconclusive(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    tree.unloaded()
    tree.efi(secure_boot=True)
    for release in (KERNEL, NEXT_KERNEL):
        path = f"/lib/modules/{release}/updates/dkms/nvidia.ko"
        tree.write(path, tree.at(path).read_bytes() + b"\xff" * 40 + kernel_modules.SIGNATURE_MAGIC)
    verdicts = driver.judge(tree.inspect(), {"version": VERSION, "flavour": "open"})
    found = [verdict.status for verdict in verdicts if verdict.code == "driver.secure_boot"]
    assert found == ["inconclusive"] * 2


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=400), st.integers(0, len(MODULE)), st.booleans())
def test_modules_of_any_bytes(data: bytes, at: int, replaces: bool) -> None:
    module = MODULE[:at] + data + (MODULE[at + len(data) :] if replaces else MODULE[at:])
    with contextlib.suppress(ModuleError):
        assert all(isinstance(value, str) for value in kernel_modules.modinfo(module).values())
    kernel_modules.signature(data + kernel_modules.SIGNATURE_MAGIC)


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=300))
def test_der_of_any_bytes(data: bytes) -> None:
    with contextlib.suppress(der.DerError):
        assert der.certificate(data).serial
    with contextlib.suppress(der.DerError):
        assert der.signer(data).issuer or der.signer(data).key_id


@settings(deadline=None)  # the machine may be busy
@given(st.integers(0, 600), st.integers(0, 255))
def test_der_with_one_byte_changed(at: int, value: int) -> None:
    data = bytearray(key("somebody").der)
    data[at % len(data)] = value
    with contextlib.suppress(der.DerError):
        assert der.certificate(bytes(data)).serial


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=300))
def test_key_lists_of_any_bytes(data: bytes) -> None:
    keys, _ = secure_boot.key_list(signature_list(key("first").der) + data)
    assert keys[0].subject == "first"


def test_a_key_list_that_ends_early_is_not_whole() -> None:
    data = signature_list(key("first").der, key("second").der)
    assert [item.subject for item in secure_boot.key_list(data)[0]] == ["first", "second"]
    assert secure_boot.key_list(data)[1]
    assert not secure_boot.key_list(data[:-1])[1]


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=200))
def test_output_of_modinfo_of_any_bytes(data: bytes) -> None:
    assert isinstance(kernel_modules.parse_modinfo_output(data)["signed"], bool)


def test_output_of_modinfo() -> None:
    output = (
        b"filename=/x/nvidia.ko.zst\0version=580.82.07\0license=Dual MIT/GPL\0sig_id=PKCS#7\0signer=A\0sig_key=0A:0B\0"
    )
    assert kernel_modules.parse_modinfo_output(output) == {
        "version": VERSION,
        "license": OPEN,
        "signed": True,
        "signer": "A",
        "serial": "a0b",
    }


# Kernels


@pytest.mark.parametrize("name", ["vmlinuz-0-rescue-abc", "vmlinuz-6.8.0.old", "vmlinuz.old", "vmlinuz"])
def test_images_that_nobody_boots(tmp_path: Path, name: str) -> None:
    tree = Tree(tmp_path)
    tree.write(f"/boot/{name}", "")
    tree.kernel(KERNEL)
    assert kernel_modules.kernels(Sysroot(str(tmp_path)))["bootable"] == [KERNEL]


def test_kernels_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for release in ("6.8.0-100-generic", "6.8.0-9-generic", "6.11.0-1-generic"):
        tree.kernel(release)
    found = kernel_modules.kernels(Sysroot(str(tmp_path)))["bootable"]
    assert found == ["6.8.0-9-generic", "6.8.0-100-generic", "6.11.0-1-generic"]


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.text("0123456789.-abc", min_size=1, max_size=12), max_size=6))
def test_any_names_of_kernels_can_be_sorted(names: list[str]) -> None:
    assert sorted(sorted(names, key=kernel_modules.natural)) == sorted(names)


def test_modules_of_the_kernel_itself_are_not_the_drivers(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.module(KERNEL, "", "nvidiafb", place="kernel/drivers/video/fbdev/nvidia")
    tree.module(KERNEL, "", "nvidia-wmi-ec-backlight", place="kernel/drivers/platform/x86")
    assert kernel_modules.module_files(Sysroot(str(tmp_path)), KERNEL) == []


def test_states_of_dkms(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.dkms(VERSION, KERNEL)
    tree.dkms("575.57.08", KERNEL, installed=False)
    tree.write("/var/lib/dkms/nvidia-current-open/535.261.03/build/make.log", "no log of DKMS\n")
    tree.write("/var/lib/dkms/zfs/2.2.2/x", "")
    tree.link("/var/lib/dkms/nvidia/kernel-gone-x86_64", "550.1.1/gone/x86_64")
    states = kernel_modules.dkms_states(Sysroot(str(tmp_path)))
    assert [(item["module"], item["version"], item["kernel"], item["state"]) for item in states] == [
        ("nvidia", "575.57.08", KERNEL, "built"),
        ("nvidia", VERSION, KERNEL, "installed"),
        ("nvidia-current-open", "535.261.03", "", "added"),
    ]


# initramfs


@pytest.mark.parametrize(
    ("names", "nvidia", "nouveau", "firmware"),
    [
        (["usr/lib/modules/6.1/updates/dkms/nvidia-drm.ko.zst"], ["nvidia_drm"], False, []),
        (["lib/modules/6.1/kernel/drivers/gpu/drm/nouveau/nouveau.ko"], [], True, []),
        (["lib/modules/6.1/kernel/drivers/video/fbdev/nvidia/nvidiafb.ko"], [], False, []),
        (
            ["-rw-r--r-- 1 root root 9 Jan 1 00:00 usr/lib/firmware/nvidia/580.82.07/gsp_ga10x.bin"],
            [],
            False,
            [VERSION],
        ),
        (["lib/firmware/nvidia/ga102/gsp/gsp-535.113.01.bin -> x"], [], False, []),
    ],
)
def test_listings(names: list[str], nvidia: list[str], nouveau: bool, firmware: list[str]) -> None:
    found = initramfs.parse(names)
    assert (found["nvidia"], found["nouveau"], found["firmware"], found["listed"]) == (nvidia, nouveau, firmware, True)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.text(max_size=60), max_size=5))
def test_listings_of_any_text(names: list[str]) -> None:
    assert initramfs.parse(names)["listed"]


def test_a_tool_that_cannot_list_is_no_empty_listing(tmp_path: Path) -> None:
    (tmp_path / "initrd.img").write_bytes(b"no image")
    assert initramfs.list_image(str(tmp_path / "absent")) is None
    assert initramfs.parse(None)["listed"] is False


# modprobe


def test_the_last_value_counts_and_a_file_in_etc_hides_its_namesake(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("/usr/lib/modprobe.d/nvidia.conf", "options nvidia_uvm uvm_disable_hmm=9\n")
    tree.write("/etc/modprobe.d/nvidia.conf", "options nvidia-uvm uvm_disable_hmm=0 \\\n  uvm_x=1\n")
    tree.write("/etc/modprobe.d/z.conf", "options nvidia_uvm uvm_disable_hmm=1\ninstall nouveau /bin/false\n")
    tree.write("/etc/modprobe.d/z.conf.dpkg-old", "options nvidia_uvm uvm_disable_hmm=7\n")
    found = modprobe_config.inspect(Sysroot(str(tmp_path)))
    assert found["parameters"]["nvidia_uvm"] == {
        "uvm_disable_hmm": {"value": "1", "file": "/etc/modprobe.d/z.conf"},
        "uvm_x": {"value": "1", "file": "/etc/modprobe.d/nvidia.conf"},
    }
    assert found["blacklisted"] == {"nouveau": "/etc/modprobe.d/z.conf"}


def test_the_kernels_command_line_comes_last(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("/etc/modprobe.d/x.conf", "options nvidia_uvm uvm_disable_hmm=0\n")
    tree.write("/proc/cmdline", "quiet nvidia-uvm.uvm_disable_hmm=1 modprobe.blacklist=nouveau,nvidiafb\n")
    found = modprobe_config.inspect(Sysroot(str(tmp_path)))
    assert found["parameters"]["nvidia_uvm"]["uvm_disable_hmm"] == {"value": "1", "file": "/proc/cmdline"}
    assert set(found["blacklisted"]) == {"nouveau", "nvidiafb"}


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("nvidia-uvm", "nvidia_uvm"),
        ("nvidia-current", "nvidia"),
        ("nvidia-current-uvm", "nvidia_uvm"),
        ("nvidia-current-open-uvm", "nvidia_uvm"),
        ("nvidia_current_open", "nvidia"),
        ("nvidia-tesla-535-drm", "nvidia_drm"),
        ("nouveau", "nouveau"),
    ],
)
def test_names_of_modules(name: str, plain: str) -> None:
    assert modprobe_config.canonical(name) == plain


@pytest.mark.parametrize(
    ("one", "two", "same"), [("Y", "1", True), ("N", "0", True), ("1", "0", False), ("16", "16", True)]
)
def test_values_of_parameters(one: str, two: str, same: bool) -> None:
    assert modprobe_config.same_value(one, two) is same
    assert not modprobe_config.same_value(None, two)


# Any text in any of the files that are read: a report and verdicts, never a traceback.

PATHS = [
    "/boot/vmlinuz-k",
    "/etc/apt/apt.conf.d/50x",
    "/etc/dkms/framework.conf",
    "/etc/modprobe.d/x.conf",
    "/etc/os-release",
    "/lib/modules/k/modules.dep",
    "/lib/modules/k/updates/nvidia.ko",
    "/proc/cmdline",
    "/proc/driver/nvidia/params",
    "/proc/driver/nvidia/version",
    "/proc/keys",
    "/proc/modules",
    "/proc/stat",
    "/proc/sys/kernel/osrelease",
    "/run/reboot-required.pkgs",
    "/sys/bus/pci/devices/0000:01:00.0/vendor",
    "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c",
    "/sys/module/nvidia/parameters/x",
    "/sys/module/nvidia/version",
    "/usr/bin/unattended-upgrade",
    "/var/lib/dkms/mok.pub",
    "/var/lib/dpkg/status",
    "/var/log/apt/history.log",
]
WORDS = st.sampled_from(
    [
        "options",
        "nvidia",
        "=",
        "{",
        "}",
        ";",
        "::",
        '"',
        "\n",
        "\\",
        " ",
        "Package:",
        "Status:",
        "580.82.07",
        "blacklist",
        "(",
    ]
)
CONTENT = st.one_of(st.binary(max_size=80), st.lists(WORDS, max_size=20).map(lambda words: "".join(words).encode()))


@example({"/proc/sys/kernel/osrelease": b"\0"})
@example({"/proc/sys/kernel/osrelease": b"../../../etc"})
@settings(deadline=None)  # the machine may be busy
@given(st.dictionaries(st.sampled_from(PATHS), st.one_of(CONTENT, st.none()), max_size=8))
def test_any_content_in_any_file(files: dict[str, bytes | None]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tree = Tree(Path(directory))
        for path, content in files.items():
            if content is None:
                tree.at(path).mkdir(parents=True)
            else:
                tree.write(path, content)
        report = driver.inspect(directory)
        wanted = {"version": VERSION, "flavour": "open", "source": "nvidia", "parameters": {"nvidia": {"x": "1"}}}
        verdicts = [*driver.preflight(report, wanted), *driver.judge(report, wanted, {})]
        assert all(isinstance(verdict, Verdict) for verdict in verdicts)


def test_a_healthy_tree_with_its_files_cut_short(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink())
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        report = tree.inspect()
        assert driver.judge(report, {"version": VERSION, "flavour": "open"}, {})
        path.write_bytes(whole)


# dpkg and apt


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("libnvidia-compute-580", True),
        ("nvidia-dkms-580-open", True),
        ("libcuda1", True),
        ("firmware-nvidia-gsp", True),
        ("linux-modules-nvidia-580-open-generic", True),
        ("cuda-drivers-580", True),
        ("nvidia-container-toolkit", False),
        ("libnvidia-container1", False),
        ("cuda-toolkit-13-0", False),
        ("nvidia-cuda-toolkit", False),
        ("linux-image-generic", False),
    ],
)
def test_packages_of_the_driver(name: str, ours: bool) -> None:
    assert package_state.is_driver_package(name) is ours


@pytest.mark.parametrize(
    ("version", "upstream"),
    [
        ("580.82.07-0ubuntu1", VERSION),
        ("580.82.07-0ubuntu0.24.04.1", VERSION),
        ("535.216.03-2~bpo12+1", "535.216.03"),
        ("3:580.82.07-1.el9", VERSION),
        ("580.82.07", VERSION),
    ],
)
def test_upstream_versions(version: str, upstream: str) -> None:
    assert package_state.upstream(version) == upstream


def test_settings_of_apt(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("/etc/apt/apt.conf.d/10x", 'A { B "1"; C { "x"; "y"; }; };\n// A::B "0";\n/* A::B "0"; */\n')
    tree.write("/etc/apt/apt.conf.d/20x", 'a::b "2";\nA::C:: "z";\n')
    tree.write("/etc/apt/apt.conf.d/30x.dpkg-dist", 'A::B "3";\n')
    root = Sysroot(str(tmp_path))
    assert package_state.apt_settings(root) == {"a::b": ["2"], "a::c": ["x", "y", "z"]}
    tree.write("/etc/apt/apt.conf", "#clear A::C;\n")
    assert package_state.apt_settings(root) == {"a::b": ["2"]}


@pytest.mark.skipif(not shutil.which("apt-config"), reason="apt is not installed")
def test_apt_reads_the_same_settings(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    text = 'Unattended-Upgrade { Package-Blacklist { "nvidia"; "lib(x)?"; }; };\n'
    text += 'Unattended-Upgrade::Package-Blacklist:: "z";\n'
    tree.write("/etc/apt/apt.conf.d/50unattended-upgrades", text)
    tree.write("/etc/apt/apt.conf", "")
    done = subprocess.run(
        ["apt-config", "dump", "--format=%v%n", "Unattended-Upgrade::Package-Blacklist"],
        capture_output=True, check=True, text=True,
        env={**os.environ, "APT_CONFIG": str(tree.at("/etc/apt/apt.conf.d/50unattended-upgrades"))},
    )  # fmt: skip
    ours = package_state.apt_settings(Sysroot(str(tmp_path)))["unattended-upgrade::package-blacklist"]
    assert ours == [line for line in done.stdout.splitlines() if line] == ["nvidia", "lib(x)?", "z"]


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)*$", "[", "x" * 300, "(?P<a>x)(?P=a)*{9}", "a*a*a*a*a*a*b"])
def test_patterns_that_are_not_safe_match_nothing(tmp_path: Path, pattern: str) -> None:
    tree = Tree(tmp_path)
    tree.unattended_upgrades(f'Unattended-Upgrade::Package-Blacklist:: "{pattern}";\n')
    name = "a" * 60 + "x" * 300
    found = package_state.automatic_upgrades(Sysroot(str(tmp_path)), [name])
    assert (found["enabled"], found["exposed"]) == (True, [name])


def test_a_date_that_is_none_says_nothing_about_the_boot(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    tree.history("Start-Date: yesterday\nUpgrade: libcuda1:amd64 (1-1, 2-1)\n")
    change = package_state.last_change(Sysroot(str(tmp_path)))
    assert change is not None
    assert (change["packages"], change["since_boot"]) == (["libcuda1 1-1 -> 2-1"], None)


@pytest.mark.parametrize(
    "text",
    ["a", "\n", " ", "/", "/*", '"', "(", "asymmetri ", "a:b (", "error: ", "NVRM version: ", "{;", "/**/", "\\\n"],
)
def test_big_files_of_one_thing_are_read_in_bounded_time(tmp_path: Path, text: str) -> None:
    """A megabyte on which a careless regular expression would work for hours."""
    tree = Tree(tmp_path)
    content = (text * (1 << 20))[: 1 << 20]
    for path in [*PATHS, "/var/lib/dkms/nvidia/1.1/build/make.log"]:
        tree.write(path, ("DKMS make.log for x for kernel k (x)\n" if path.endswith("make.log") else "") + content)
    began = time.monotonic()
    report = driver.inspect(str(tmp_path))
    driver.judge(report, {"version": VERSION, "flavour": "open"}, {})
    assert time.monotonic() - began < 30
