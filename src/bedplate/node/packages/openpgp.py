"""What is in an OpenPGP key file, without gpg: a node that has nothing yet may not have that either.

Formats: RFC 9580, section 4.2 (packet headers), 5.5.4.2 (fingerprint of a version 4 key), 6.2 (ASCII armor). Signatures
are checked by apt. What reads a key file later (apt-key's awk, gpgv, sqv, rpm) agrees on well-formed files only: what
they are given is written anew, from packets that were understood, and is never the file that came.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

PRIMARY_KEY = 6  # packet of a primary public key
# With signatures, user IDs and subkeys: all that a key needs. Not among them are secret keys (5, 7), and what GnuPG
# remembers of its own checks (12), which it would believe.
ALLOWED = {2, PRIMARY_KEY, 13, 14}

_BEGIN, _END = (f"-----{word} PGP PUBLIC KEY BLOCK-----" for word in ("BEGIN", "END"))
_ARMOR_HEADER = re.compile(rb"[A-Za-z]+: .*")


class KeyFileError(ValueError):
    """A file is not one that a key can be taken from; the text says why, as a part of a sentence."""


@dataclass(frozen=True)
class KeyFile:
    """The packets of a key file, as tag and body."""

    packets: tuple[tuple[int, bytes], ...]

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprint of every primary key: 40 hexadecimal digits in capitals, or words for another version."""
        return tuple(_fingerprint(body) for tag, body in self.packets if tag == PRIMARY_KEY)

    def armored(self) -> str:
        """Return the packets, and nothing else, as gpg writes them."""
        data = b"".join(_header(tag, len(body)) + body for tag, body in self.packets)
        text = base64.b64encode(data).decode()
        # The checksum is for older versions of rpm, which want it.
        checksum = base64.b64encode(_crc24(data).to_bytes(3, "big")).decode()
        lines = [*(text[start : start + 64] for start in range(0, len(text), 64)), f"={checksum}"]
        return "\n".join([_BEGIN, "", *lines, _END, ""])


def read(content: bytes) -> KeyFile:
    """Return what is in a key file, armored or binary: primary keys and what belongs to them.

    Raises KeyFileError for anything else, and for anything beside it.
    """
    try:
        packets = tuple(_packets(content if content[:1] >= b"\x80" else _dearmored(content)))
    except IndexError:
        raise KeyFileError("it ends within a packet") from None
    if [tag for tag, _ in packets[:1]] != [PRIMARY_KEY]:
        raise KeyFileError("it does not begin with a key")
    return KeyFile(packets)


def _fingerprint(body: bytes) -> str:
    if body[:1] != b"\x04" or len(body) > 0xFFFF:  # there is no such key of version 4
        return "a key of an unknown version"
    digest = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False)
    return digest.hexdigest().upper()


def _header(tag: int, length: int) -> bytes:
    """Return the header of a packet in the old format, which every tag of ALLOWED has."""
    kind = 0 if length < 1 << 8 else 1 if length < 1 << 16 else 2
    return bytes([0x80 | tag << 2 | kind]) + length.to_bytes(1 << kind, "big")


def _crc24(data: bytes) -> int:
    """Return the checksum of armor (RFC 9580, section 6.1)."""
    crc = 0xB704CE
    for octet in data:
        crc ^= octet << 16
        for _ in range(8):
            crc <<= 1
            if crc & 0x1000000:
                crc ^= 0x1864CFB
    return crc


def _dearmored(content: bytes) -> bytes:
    """Return the bytes of an armored file, without its headers and checksum. Raises KeyFileError."""
    lines = [line.strip() for line in content.strip().splitlines()]
    try:
        blank = lines.index(b"")  # it ends the headers
        data = lines[blank + 1 : -1]
        if data[-1].startswith(b"="):
            del data[-1]
        whole = lines[0] == _BEGIN.encode() and lines[-1] == _END.encode()
        if whole and all(_ARMOR_HEADER.fullmatch(line) for line in lines[1:blank]):
            return base64.b64decode(b"".join(data), validate=True)
    except (ValueError, IndexError):  # no blank line, no data, or none in base64
        pass
    raise KeyFileError("it is not one armored block with nothing around it")


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and body of each packet. Raises KeyFileError or IndexError for what is no sequence of packets."""
    position = 0
    while position < len(data):
        first = data[position]
        if not first & 0x80:
            raise KeyFileError("it holds something between its packets")
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
                raise KeyFileError("it has a packet of partial length, which is for data and not for keys")
        else:
            tag, size = (first >> 2) & 0x0F, 1 << (first & 3)
            if size == 8:
                raise KeyFileError("it has a packet without a length, which is for data and not for keys")
            length, position = int.from_bytes(data[position : position + size], "big"), position + size
        if tag not in ALLOWED:
            raise KeyFileError(f"it holds a packet of type {tag}, which no public key needs")
        if position + length > len(data):
            raise KeyFileError("it ends within a packet")
        yield tag, data[position : position + length]
        position += length
