"""Key files: fingerprints compared with what gpg 2.2 printed of the same file, armor with what it wrote."""

from __future__ import annotations

import base64
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.packages.openpgp import KeyFileError, read

# gpg --quick-gen-key "Bedplate test key" ed25519 sign; with a subkey, whose fingerprint must not count.
KEY = b"""-----BEGIN PGP PUBLIC KEY BLOCK-----

mDMEaw+uaxYJKwYBBAHaRw8BAQdATGj29D9sPjXw5kxqCEjAy7JYfE51G0ijxwVe
AI+W2Rq0EUJlZHBsYXRlIHRlc3Qga2V5iJAEExYIADgWIQRaUEgkseky8vWCpHVw
oJ6DKaRs8wUCaw+uawIbAwULCQgHAgYVCgkICwIEFgIDAQIeAQIXgAAKCRBwoJ6D
KaRs89yYAQCxbHj7ejBa3eSv7S9jQ8j71SrwMqN1TW+JRXsx3b/hNwD+Oxm9KqQD
jTlDIR9a3U5styzdgz0cz7Hwzs38/jdNIQG4OARrD65rEgorBgEEAZdVAQUBAQdA
g1iZtTfP8L4QQB5tDgj1khItvuF5Lg28Pwpe4BsADgUDAQgHiHgEGBYIACAWIQRa
UEgkseky8vWCpHVwoJ6DKaRs8wUCaw+uawIbDAAKCRBwoJ6DKaRs8wIxAQDIS0qQ
X1nxZyN6NawAHRpEE60fOWIuRuw0hosjRHNBFwEAzbo14dhQMxq0Wxs9kOrE5FGT
PbGqVR0w45tAcn5Avgc=
=1O+C
-----END PGP PUBLIC KEY BLOCK-----
"""
PRIMARY = "5A504824B1E932F2F582A47570A09E8329A46CF3"
BINARY = base64.b64decode(KEY.split(b"\n\n")[1].split(b"=1O+C")[0])


# Another key, and a block that apt-key (apt 2.6) takes for a key's: its awk program looks for -----BEGIN alone.
OTHER = b"""-----BEGIN PGP PUBLIC KEY BLOCK-----

mDMEaw/mEBYJKwYBBAHaRw8BAQdAMeNF+wXbm8cfmHd6rFfqpD2hrK1NMavCeeid
V8LcMfG0DVNvbWVib2R5IGVsc2WIkAQTFggAOBYhBMU7dsus/XmYew4+HKqyRVns
l2wWBQJrD+YQAhsDBQsJCAcCBhUKCQgLAgQWAgMBAh4BAheAAAoJEKqyRVnsl2wW
tPcBALm0tZ0D+TYkXYTG/96Ih2vvnMcm93NNAbKFRxkYHYqsAQCd58n1OZ3NSKD1
5XhuoqI/Rg3J+qyctsYOjj/wS/j7Bg==
=ojE6
-----END PGP PUBLIC KEY BLOCK-----
"""
OTHER_PRIMARY = "C53B76CBACFD79987B0E3E1CAAB24559EC976C16"
SMUGGLED = KEY + OTHER.replace(b"PGP PUBLIC KEY BLOCK", b"X")


def old(tag: int, body: bytes) -> bytes:
    return bytes([0x80 | tag << 2 | 1]) + len(body).to_bytes(2, "big") + body


def new(tag: int, body: bytes, form: int) -> bytes:
    if form == 1:
        length = bytes([len(body)])
    elif form == 2:
        length = bytes([192 + (len(body) - 192 >> 8), len(body) - 192 & 255])
    else:
        length = b"\xff" + len(body).to_bytes(4, "big")
    return bytes([0xC0 | tag]) + length + body


BODY = BINARY[2:53]  # of the primary key: 51 bytes behind a header of two


@pytest.mark.parametrize(
    "content",
    [
        KEY,
        BINARY,
        KEY.replace(b"\n", b"\r\n"),
        b"\n" + KEY + b"\n \n",
        KEY.replace(b"-\n\n", b"-\nVersion: GnuPG v2.0.22 (GNU/Linux)\nComment: of the mirror\n \n", 1),
        KEY.replace(b"=1O+C\n", b""),
    ],
)
def test_what_apt_gets_is_what_gpg_writes(content: bytes) -> None:
    """However the file is written: nothing but the key's packets comes through."""
    key = read(content)
    assert key.fingerprints == (PRIMARY,)
    assert key.armored() == KEY.decode()


@pytest.mark.parametrize(
    "packets", [old(6, BODY) + new(13, b"u" * 1000, 2), new(6, BODY, 1) + new(13, b"u" * 1000, 5), new(6, BODY, 5)]
)
def test_headers_of_both_formats(packets: bytes) -> None:
    key = read(packets)
    assert key.fingerprints == (PRIMARY,)
    assert read(key.armored().encode()) == key


def test_every_key_of_a_file_counts() -> None:
    other = base64.b64decode(OTHER.split(b"\n\n")[1].split(b"\n=")[0])
    assert read(BINARY + other).fingerprints == (PRIMARY, OTHER_PRIMARY)


@pytest.mark.parametrize("packet", [new(6, b"\x06" + BODY[1:], 1), new(6, BODY[:1] * 0x10000, 5)])
def test_a_key_of_another_version_is_not_overlooked(packet: bytes) -> None:
    assert read(BINARY + packet).fingerprints == (PRIMARY, "a key of an unknown version")


@pytest.mark.parametrize(
    "content",
    [
        SMUGGLED,
        OTHER.replace(b"PGP PUBLIC KEY BLOCK", b"X") + KEY,
        KEY + KEY,
        KEY + OTHER,
        b"Key of the mirror:\n" + KEY,
        KEY + b"end\n",
        KEY.replace(b"-\n\n", b"-\nComment: x\nno header\n\n", 1),
        KEY.replace(b"=1O+C\n", b"=1O+C\n-----BEGIN X-----\n"),
        KEY.replace(b"mDMEaw", b"mDMEa*"),
        KEY.replace(b"mDMEaw", b"mDMEa"),
        KEY.replace(b"-\n\n", b"-\n", 1),
        KEY.splitlines()[0] + b"\n\n" + KEY.splitlines()[-1],
        b"",
        b"<html>Not found</html>",
    ],
)
def test_one_block_and_nothing_beside_it(content: bytes) -> None:
    with pytest.raises(KeyFileError, match="not one armored block"):
        read(content)


@pytest.mark.parametrize(
    "packet",
    [
        *(old(tag, b"x") for tag in (0, 5, 7, 10, 12)),  # secret keys; what GnuPG remembers of its own checks; a marker
        *(new(tag, b"x", 1) for tag in (0, 5, 7, 10, 12, 17, 21)),  # and a picture, padding
    ],
)
def test_packets_of_other_types_are_refused(packet: bytes) -> None:
    with pytest.raises(KeyFileError, match="packet of type"):
        read(BINARY + packet)


@pytest.mark.parametrize("content", [old(13, b"somebody") + BINARY, KEY[:37] + b"\n=1O+C" + KEY[-36:]])
def test_a_key_comes_first(content: bytes) -> None:
    with pytest.raises(KeyFileError, match="does not begin with a key"):
        read(content)


@pytest.mark.parametrize(
    "content",
    [
        BINARY[:-1],
        b"\xc6\xe1" + BODY,  # a partial length
        b"\x9b" + BODY,  # no length
        b"\xc6\xff\xff\xff\xff\xff" + BODY,
        b"\xc6",
    ],
)
def test_what_is_no_sequence_of_packets(content: bytes) -> None:
    with pytest.raises(KeyFileError):
        read(content)


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda rest: BINARY + rest))
def test_no_file_is_a_surprise(content: bytes) -> None:
    with contextlib.suppress(KeyFileError):
        key = read(content)
        assert read(key.armored().encode()) == key
