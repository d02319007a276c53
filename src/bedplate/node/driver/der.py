"""Just enough DER to name who signed a kernel module and which certificates are enrolled.

Not a general decoder: definite lengths, the few structures of X.509 (RFC 5280, section 4.1) and CMS SignedData
(RFC 5652, section 5) that hold issuer, serial number and common name. No signature is checked here; the kernel
does that. Malformed input ends in ``DerError``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

SEQUENCE, SET, INTEGER, OID, CONTEXT_0 = 0x30, 0x31, 0x02, 0x06, 0xA0
KEY_ID = 0x80  # [0] IMPLICIT SubjectKeyIdentifier
COMMON_NAME = b"\x55\x04\x03"  # 2.5.4.3
MAX_CHILDREN = 4096


class DerError(ValueError):
    """The bytes are not the DER structure that was expected."""


@dataclass(frozen=True)
class Element:
    """One element: its tag, its content, and all of its bytes."""

    tag: int
    content: bytes
    raw: bytes


@dataclass(frozen=True)
class Certificate:
    """What identifies a certificate. serial: lower-case hex without leading zeros."""

    subject: str
    issuer: bytes
    serial: str
    sha256: str
    raw: bytes


@dataclass(frozen=True)
class Signer:
    """Who signed: the issuer's bytes and common name with the serial, or else the key's id (bytes)."""

    name: str
    issuer: bytes
    serial: str
    key_id: bytes

    def is_by(self, certificate: Certificate) -> bool:
        """Tell whether this certificate's key made the signature, as far as names say."""
        if self.key_id:
            return self.key_id in certificate.raw  # the extension SubjectKeyIdentifier holds it
        return (self.issuer, self.serial) == (certificate.issuer, certificate.serial)


def element(data: bytes, at: int = 0) -> Element:
    """Return the element at an offset. Raises DerError when it does not fit into the data."""
    if at + 2 > len(data):
        raise DerError("an element ends early")
    tag, length, start = data[at], data[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        if not 1 <= count <= 4 or start + count > len(data):
            raise DerError("an element has no definite length")
        length = int.from_bytes(data[start : start + count], "big")
        start += count
    if start + length > len(data):
        raise DerError("an element is longer than its place")
    return Element(tag, data[start : start + length], data[at : start + length])


def children(parent: Element) -> list[Element]:
    """Return the elements inside one. Raises DerError."""
    found: list[Element] = []
    at = 0
    while at < len(parent.content):
        if len(found) >= MAX_CHILDREN:
            raise DerError("an element has too many parts")
        found.append(element(parent.content, at))
        at += len(found[-1].raw)
    return found


def _child(parent: Element, index: int, tag: int) -> Element:
    """Return one part of an element, which must have this tag."""
    parts = children(parent)
    if index >= len(parts) or parts[index].tag != tag:
        raise DerError("an element lacks a part")
    return parts[index]


def common_name(name: Element) -> str:
    """Return the common name of a Name, "" when it has none. Raises DerError."""
    for group in children(name):
        for attribute in children(group):
            parts = children(attribute)
            if len(parts) == 2 and parts[0].tag == OID and parts[0].content == COMMON_NAME:
                return parts[1].content.decode("utf-8", "replace")
    return ""


def _serial(number: Element) -> str:
    """Return a serial number as lower-case hex."""
    if number.tag != INTEGER or not number.content:
        raise DerError("no serial number where one belongs")
    return f"{int.from_bytes(number.content, 'big'):x}"


def certificate(data: bytes) -> Certificate:
    """Return what identifies an X.509 certificate in DER. Raises DerError."""
    outer = element(data)
    if outer.tag != SEQUENCE:
        raise DerError("not a certificate")
    parts = children(_child(outer, 0, SEQUENCE))
    if parts and parts[0].tag == CONTEXT_0:  # the version, which v1 leaves out
        parts = parts[1:]
    # serialNumber, signature, issuer, validity, subject
    if len(parts) < 5 or parts[2].tag != SEQUENCE or parts[4].tag != SEQUENCE:
        raise DerError("not a certificate")
    digest = hashlib.sha256(outer.raw).hexdigest()
    return Certificate(common_name(parts[4]), parts[2].raw, _serial(parts[0]), digest, outer.raw)


def signer(data: bytes) -> Signer:
    """Return who made a CMS SignedData in DER, the first one of several. Raises DerError."""
    wrapper = _child(element(data), 1, CONTEXT_0)
    signed = element(wrapper.content)
    parts = children(signed)
    if signed.tag != SEQUENCE or not parts or parts[-1].tag != SET:
        raise DerError("not a CMS signature")
    info = _child(parts[-1], 0, SEQUENCE)
    fields = children(info)
    if len(fields) < 2:
        raise DerError("a signature without a signer")
    who = fields[1]
    if who.tag == KEY_ID and who.content:
        return Signer("", b"", "", who.content)
    names = children(who)
    if who.tag != SEQUENCE or len(names) != 2:
        raise DerError("a signature without a signer")
    return Signer(common_name(names[0]), names[0].raw, _serial(names[1]), b"")
