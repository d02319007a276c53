"""What is wrong with a repository is said in words; that apt then sees it is tested on a node."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_openpgp import KEY, PRIMARY, SMUGGLED

from bedplate.node.packages import apt_preview
from bedplate.node.packages.apt_query import PackageError
from bedplate.node.packages.manage import perform

URIS = "file:/srv/repository/"

# Printed by apt 2.6.1's `apt-get update`.
UNSIGNED = """Err:1 file:/srv/repository ./ InRelease
W: GPG error: file:/srv/repository ./ InRelease: The following signatures couldn't be verified because the public key \
is not available: NO_PUBKEY 00C595D83BF81F4C
E: The repository 'file:/srv/repository ./ InRelease' is not signed.
"""
TORN = """Err:2 file:/srv/repository ./ Packages
E: Failed to fetch file:/srv/repository/./Packages.gz  Hash Sum mismatch
E: Some index files failed to download. They have been ignored, or old ones used instead.
"""
REFUSED = """Err:1 http://127.0.0.1:9/x ./ InRelease
E: Failed to fetch http://127.0.0.1:9/x/./InRelease  Could not connect to 127.0.0.1:9 (127.0.0.1). - connect \
(111: Connection refused)
E: Some index files failed to download. They have been ignored, or old ones used instead.
"""
EMPTY = """Err:2 file:/srv/repository ./ Release
E: The repository 'file:/srv/repository ./ Release' does not have a Release file.
"""
# Put together from reports of Debian 13's apt with NVIDIA's key for Debian 12.
SHA1 = """Err:1 file:/srv/repository ./ InRelease
W: OpenPGP signature verification failed: file:/srv/repository ./ InRelease: Sub-process /usr/bin/sqv returned an \
error code (1), error message is: Policy rejected non-revocation signature (PositiveCertification) requiring second \
pre-image resistance because: SHA1 is not considered secure since 2026-02-01T00:00:00Z
E: The repository 'file:/srv/repository ./ InRelease' is not signed.
"""


@pytest.mark.parametrize(
    ("output", "said", "action"),
    [
        (UNSIGNED, "its signature is not by the pinned key", "fingerprint"),
        (TORN, "its files do not fit together", "Try again later"),
        (REFUSED, "Connection refused", "reaches it"),
        (EMPTY, "does not have a Release file", "reaches it"),
        (SHA1, "for its SHA-1 signature", "a repository made for this release"),
        ("", "apt gave no reason", "reaches it"),
    ],
)
def test_mirror_error(output: str, said: str, action: str) -> None:
    error = apt_preview.mirror_error(URIS, output)
    assert (error.code, error.subject) == ("packages.mirror", URIS)
    verdict = error.verdict("driver")
    assert (verdict.code, verdict.status, verdict.layer) == ("packages.mirror", "fail", "driver")
    assert said in error.message
    assert ".." not in error.message
    assert action in error.action


def test_a_password_of_the_mirror_is_not_shown() -> None:
    error = apt_preview.mirror_error("https://user:secret@mirror/debian12/", REFUSED)
    assert error.subject == "https://mirror/debian12/"


def repository(**changed: str) -> dict[str, str]:
    return {
        "uris": URIS,
        "suites": "./",
        "key": "/nowhere/key.pub",
        "fingerprint": "0" * 40,
        "preferences": "",
        "without": [],
        **changed,
    }


@pytest.mark.parametrize("key", ["/nowhere/key.pub", "http://127.0.0.1:9/key.pub", "nonsense://key"])
def test_a_key_that_cannot_be_read(key: str) -> None:
    with (
        pytest.raises(PackageError, match="The key cannot be read") as error,
        apt_preview.preview(repository(key=key), 5),
    ):
        pytest.fail("apt was asked without a key")
    assert error.value.code == "packages.mirror"


def test_a_key_may_be_given_itself_and_must_be_the_pinned_one() -> None:
    with (
        pytest.raises(PackageError, match=f"must be {'0' * 40} and no other") as error,
        apt_preview.preview(repository(key=KEY.decode()), 5),
    ):
        pytest.fail("apt was asked with a wrong key")
    assert error.value.evidence == {"found": [PRIMARY], "pinned": "0" * 40}


def test_apt_is_given_no_key_beside_the_pinned_one() -> None:
    """gpg reads the pinned key alone from this file; apt-key would have trusted both."""
    with (
        pytest.raises(PackageError, match=f"must be {PRIMARY} and no other.*not one armored block") as error,
        apt_preview.preview(repository(key=SMUGGLED.decode(), fingerprint=PRIMARY), 5),
    ):
        pytest.fail("apt was asked with two keys")
    assert error.value.subject == "the key"


def test_files_that_would_go_are_not_shown_to_apt(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("cuda.list", "cuda-12.list", "debian.sources"):
        (tmp_path / "there" / name).touch()
    apt_preview._links(tmp_path / "there", tmp_path / "shown", ["cuda.list", "cuda-*.list"])
    assert [path.name for path in (tmp_path / "shown").iterdir()] == ["debian.sources"]


def test_a_repository_that_cannot_be_used_is_a_verdict() -> None:
    options = {"layer": "driver", "action": "simulate", "packages": {"x": "1"}, "timeout": 5, "preview": repository()}
    result, refused = perform(options)
    assert refused
    assert [verdict["code"] for verdict in result["verdicts"]] == ["packages.mirror"]
    assert (result["packages"], result["plan"]["steps"]) == ({}, [])


def test_a_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key.pub"
    key.write_text("<html>Not found</html>")
    with (
        pytest.raises(PackageError, match="the file holds no key") as error,
        apt_preview.preview(repository(key=str(key)), 5),
    ):
        pytest.fail("apt was asked with a wrong key")
    assert error.value.code == "packages.mirror"
