"""Which keys are in an OpenPGP key file, without gpg: a node that has nothing yet may not have that either.

Formats: RFC 9580, section 4.2 (packet headers), 5.5.4.2 (fingerprint of a version 4 key), 6.2 (ASCII armor). Only names
are read here; signatures are checked by apt.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator

PRIMARY_KEY = 6  # packet of a primary public key

_BLOCK = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----[ \t\r]*\n(.*?)^-----END PGP PUBLIC KEY BLOCK-----", re.DOTALL | re.MULTILINE
)


def fingerprints(content: bytes) -> list[str]:
    """Return the fingerprints, 40 hexadecimal digits in capitals, of the primary keys (version 4) in a key file.

    content: of the file, armored or binary. What is no key file, or breaks off, has none; a key of another version
    counts with the empty text, so that a file with one is never taken for a file without.
    """
    try:
        data = b"".join(_dearmored(block) for block in _BLOCK.findall(content)) or content
        bodies = [body for tag, body in _packets(data) if tag == PRIMARY_KEY]
    except (ValueError, IndexError):
        return []
    return [_fingerprint(body) for body in bodies]


def _fingerprint(body: bytes) -> str:
    if body[:1] != b"\x04":
        return ""
    digest = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False)
    return digest.hexdigest().upper()


def _dearmored(block: bytes) -> bytes:
    """Return the bytes of an armored block, without its headers and checksum. Raises ValueError."""
    lines = block.replace(b"\r", b"").split(b"\n")
    start = lines.index(b"") + 1  # an empty line ends the headers
    text = b"".join(line.strip() for line in lines[start:] if not line.startswith(b"="))
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and body of each packet. Raises ValueError or IndexError for what is no sequence of packets."""
    position = 0
    while position < len(data):
        first = data[position]
        if not first & 0x80:
            raise ValueError("no packet begins here")
        position += 1
        if first & 0x40:
            tag, octet = first & 0x3F, data[position]
            if octet < 192:
                length, position = octet, position + 1
            elif octet < 224:
                length, position = ((octet - 192) << 8) + data[position + 1] + 192, position + 2
            elif octet == 255:
                length, position = int.from_bytes(data[position + 1 : position + 5], "big"), position + 5
            else:
                raise ValueError("a partial length is for data, not for keys")
        else:
            tag, size = (first >> 2) & 0x0F, 1 << (first & 3)
            if size == 8:
                raise ValueError("a length that is not given is for data, not for keys")
            length, position = int.from_bytes(data[position : position + size], "big"), position + size
        if position + length > len(data):
            raise ValueError("the file ends within a packet")
        yield tag, data[position : position + length]
        position += length
