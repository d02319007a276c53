"""Whether Secure Boot is on, which keys the machine trusts, and with which one DKMS signs.

EFI variables as Linux shows them in /sys/firmware/efi/efivars: four bytes of attributes, then the value
(Documentation/filesystems/efivarfs.rst). Key lists: EFI_SIGNATURE_LIST (UEFI specification, section 32.4.1). Keys
that the owner enrolled with mokutil are mirrored by shim in MokListRT.
"""

from __future__ import annotations

import re
import struct
import uuid
from typing import Any

from .der import Certificate, DerError, certificate
from .sysroot import Sysroot

EFI = "/sys/firmware/efi"
GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
SECURITY_DATABASE = "d719b2cb-3d3a-4596-a3bc-dad00e67656f"
SHIM = "605dab50-e046-4300-abb6-3dd810dd8b23"
X509 = uuid.UUID("a5c059a1-94e4-4aa7-87b5-ab155c2bf072").bytes_le

# Where the certificate of DKMS's key is: Ubuntu's, and the default of dkms (dkms(8), mok_certificate).
DKMS_CERTIFICATES = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")
DKMS_CONFIGURATION = "/etc/dkms/framework.conf"  # and the files of framework.conf.d, which come after it

_LIST = struct.Struct("<16sIII")


def efi_value(root: Sysroot, name: str) -> bytes | None:
    """Return the value of an EFI variable "name-guid", None when it is not there or too short."""
    data = root.read(f"{EFI}/efivars/{name}")
    return None if data is None or len(data) < 4 else data[4:]


def _certificate(data: bytes) -> Certificate | None:
    """Return a certificate, None when the bytes are none."""
    try:
        return certificate(data)
    except DerError:
        return None


def _mok_list(root: Sysroot) -> bytes | None:
    """Return the list of the owner's keys: from the kernel's copy, which is whole where a variable would be split."""
    copy = root.read(f"{EFI}/mok-variables/MokListRT")
    return efi_value(root, f"MokListRT-{SHIM}") if copy is None else copy


def _flag(root: Sysroot, name: str) -> bool | None:
    """Return an EFI variable of one byte as true or false, None when it is unknown."""
    value = efi_value(root, name)
    return None if not value else value[0] == 1


def key_list(data: bytes) -> tuple[list[Certificate], bool]:
    """Return the certificates of a list of EFI signature lists, and whether all of it could be read."""
    found: list[Certificate] = []
    at, whole = 0, True
    while at < len(data):
        if at + _LIST.size > len(data):
            return found, False
        kind, size, header, each = _LIST.unpack_from(data, at)
        if size < _LIST.size or at + size > len(data):
            return found, False
        if kind == X509 and each > 16:
            for start in range(at + _LIST.size + header, at + size - each + 1, each):
                read = _certificate(data[start + 16 : start + each])
                whole = whole and read is not None
                found += [read] if read else []
        at += size
    return found, whole


def inspect(root: Sysroot) -> dict[str, Any]:
    """Return what is known of Secure Boot; judges nothing.

    Keys: state ("on", "off", "unknown", or "no EFI"), setup_mode, validation (false when the owner switched off
    shim's, and the kernel then does not insist on signatures), keys (the enrolled ones: {subject, serial, sha256,
    list}), keys_readable, dkms_key ({path, subject, serial, sha256, enrolled} or None), kernel_keys (descriptions
    of the kernel's own keys).
    The private keys "_keys" holds the certificates as der.Certificate.
    """
    certificates: list[tuple[Certificate, str]] = []
    whole = True
    for name, value in (("MokListRT", _mok_list(root)), ("db", efi_value(root, f"db-{SECURITY_DATABASE}"))):
        found, complete = key_list(value or b"")
        whole = whole and complete
        certificates += [(item, name) for item in found]
    keys = [item for item, _ in certificates]
    # A list that is not there holds no key; one that may not be read may hold any.
    refused = any(path.startswith(EFI) for path in root.unreadable)
    return {
        "state": _state(root),
        "setup_mode": _flag(root, f"SetupMode-{GLOBAL}"),
        "validation": _flag(root, f"MokSBStateRT-{SHIM}") is not True,
        "keys": [
            {"subject": item.subject, "serial": item.serial, "sha256": item.sha256, "list": name}
            for item, name in certificates
        ],
        "keys_readable": whole and not refused,
        "dkms_key": _dkms_key(root, keys),
        "kernel_keys": kernel_keys(root.text("/proc/keys") or ""),
        "_keys": keys,
    }


def _state(root: Sysroot) -> str:
    """Return whether Secure Boot is on."""
    if not root.is_dir(EFI):
        return "no EFI"
    state = _flag(root, f"SecureBoot-{GLOBAL}")
    return "unknown" if state is None else "on" if state else "off"


def kernel_keys(text: str) -> list[str]:
    """Return the names of the X.509 keys in /proc/keys, such as "Debian Secure Boot CA".

    A line has the columns of keyrings(7), the type "asymmetri" and the description "<name>: <key id>: X509.<...>".
    """
    columns = [line.split(None, 8) for line in text.splitlines() if "X509." in line]
    descriptions = [words[8] for words in columns if len(words) == 9 and words[7].startswith("asymmetri")]
    return [name for name in (text.rpartition(": X509.")[0].rpartition(": ")[0] for text in descriptions) if name]


def _dkms_key(root: Sysroot, keys: list[Certificate]) -> dict[str, Any] | None:
    """Return the certificate with whose key DKMS signs, None when there is none yet."""
    more = [f"{DKMS_CONFIGURATION}.d/{name}" for name in root.names(f"{DKMS_CONFIGURATION}.d")]
    text = "\n".join(root.text(path) or "" for path in (DKMS_CONFIGURATION, *more))
    configured = re.findall(r"^[ \t]*mok_certificate=[\"']?([^\"'\s]+)", text, re.MULTILINE)
    for path in (*configured[-1:], *DKMS_CERTIFICATES):
        data = root.read(path)
        if data is None:
            continue
        try:
            mine = certificate(data)
        except DerError as error:
            return {"path": path, "subject": "", "serial": "", "sha256": "", "enrolled": None, "error": str(error)}
        enrolled = any(mine.sha256 == key.sha256 for key in keys)
        return {
            "path": path,
            "subject": mine.subject,
            "serial": mine.serial,
            "sha256": mine.sha256,
            "enrolled": enrolled,
        }
    return None


def insists(report: dict[str, Any]) -> bool | None:
    """Tell whether the kernel insists on signed modules; None when that is unknown.

    report: what ``inspect`` returned.
    """
    if report["state"] == "unknown":
        return None
    return bool(report["state"] == "on" and report["setup_mode"] is not True and report["validation"])
