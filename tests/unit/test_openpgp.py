"""Fingerprints of key files, compared with what gpg 2.2 printed of the same file."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.node.packages.openpgp import fingerprints

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
    "content", [KEY, BINARY, KEY.replace(b"\n", b"\r\n"), b"Key of the mirror:\n" + KEY + b"\nend\n"]
)
def test_the_primary_key_and_no_subkey(content: bytes) -> None:
    assert fingerprints(content) == [PRIMARY]


def test_every_key_of_a_file_counts() -> None:
    assert fingerprints(KEY + KEY) == fingerprints(BINARY + BINARY) == [PRIMARY] * 2


@pytest.mark.parametrize("packet", [old(6, BODY), new(6, BODY, 1), new(6, BODY, 5)])
def test_headers_of_both_formats(packet: bytes) -> None:
    assert fingerprints(packet) == [PRIMARY]


@pytest.mark.parametrize("form", [2, 5])
def test_a_long_packet_is_passed_over(form: int) -> None:
    assert fingerprints(new(13, b"u" * 1000, form) + new(6, BODY, 1)) == [PRIMARY]


def test_a_key_of_another_version_is_not_overlooked() -> None:
    assert fingerprints(BINARY + new(6, b"\x06" + BODY[1:], 1)) == [PRIMARY, ""]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>Not found</html>",
        BINARY[:-1],
        KEY.replace(b"mDMEaw", b"mDMEa*"),
        b"\xc6\xe1" + BODY,  # a partial length
        b"\x9b" + BODY,  # no length
        b"\xc6\xff\xff\xff\xff\xff" + BODY,
        b"\xc6",
    ],
)
def test_what_is_no_key_file_has_none(content: bytes) -> None:
    assert fingerprints(content) == []


@given(st.binary(max_size=200))
def test_no_file_is_a_surprise(content: bytes) -> None:
    assert all(len(found) in (0, 40) for found in fingerprints(content))
