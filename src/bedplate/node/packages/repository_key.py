"""The key of a package repository: read, held against the pinned fingerprint, and put where the source names it.

This is the only way in which a key comes to be trusted, in a preview (apt_preview.py) and on the node.
"""

from __future__ import annotations

import base64
import stat
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from ..addresses import USER, without_user
from ..state.durable import make_dir, write_atomic
from .apt_query import PackageError
from .openpgp import KeyFileError, read

KEY_LIMIT = 1 << 20  # bytes of a key file
KEY_TIMEOUT_S = 30.0
MODE = 0o644  # apt checks signatures as a user of its own


def pinned_key(where: str, fingerprint: str) -> str:
    """Return the armored key, once it is the pinned one and alone.

    where: address or path of the key, or the key itself, armored. fingerprint: 40 hexadecimal digits.

    Raises PackageError ``packages.mirror``.
    """
    if "\n" in where:  # in no address or path
        return _checked(where.encode(), fingerprint, "the key")
    place = without_user(where)
    try:
        content = _download(where) if "://" in where else Path(where).read_bytes()[:KEY_LIMIT]
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise PackageError(
            "packages.mirror", place, f"The key cannot be read: {reason}.", "Correct its place."
        ) from error
    return _checked(content, fingerprint, place)


def _download(address: str) -> bytes:
    """Return what is at an address. Raises OSError, ValueError and HTTPException."""
    request = urllib.request.Request(without_user(address))  # noqa: S310  # the operator's address
    user = USER.search(address)
    if user:  # as apt does; and not told to another server that this one names
        secret = base64.b64encode(unquote_to_bytes(user.group()[:-1])).decode()
        request.add_unredirected_header("Authorization", f"Basic {secret}")
    with urllib.request.urlopen(request, timeout=KEY_TIMEOUT_S) as answer:  # noqa: S310  # the operator's address
        content: bytes = answer.read(KEY_LIMIT)
    return content


def install(dest: str, where: str, fingerprint: str, *, check: bool) -> dict[str, Any]:
    """Do what the module bedplate_repository_key is asked for (its DOCUMENTATION describes options and result).

    A file that holds the pinned key needs nothing of the repository, whatever else is to be put right about it.

    Raises PackageError ``packages.mirror``, and StateError when the file cannot be written.
    """
    file = Path(dest)
    try:
        before, mode = file.read_bytes(), stat.S_IMODE(file.stat().st_mode)
    except OSError:
        before, mode = b"", MODE  # whatever it is, writing it says what is in the way
    try:
        after = _checked(before, fingerprint, dest)
    except PackageError:
        after = pinned_key(where, fingerprint)
    changed = (before, mode) != (after.encode(), MODE)
    if changed and not check:
        make_dir(str(file.parent))
        write_atomic(dest, after, MODE)
    diff = {
        "before_header": dest, "before": before.decode("utf-8", "replace"), "after_header": dest, "after": after,
    }  # fmt: skip
    return {"changed": changed, "diff": diff}


def _checked(content: bytes, fingerprint: str, subject: str) -> str:
    """Return the armored key of a file once its one primary key is the pinned one. Raises PackageError."""
    pinned = fingerprint.replace(" ", "").upper()
    found: tuple[str, ...] = ()
    try:
        key = read(content)
        found = key.fingerprints
        said = f"the file holds {', '.join(found)}"
    except KeyFileError as error:
        said = f"the file holds no key that can be used: {error}"
    if found == (pinned,):
        return key.armored()
    message = f"The key must be {pinned} and no other; {said}."
    action = (
        "Find out who changed it before anything trusts it. For a mirror that signs with its own key, pin that "
        "one: nvidia_driver_key_fingerprint, cuda_toolkit_key_fingerprint."
    )
    raise PackageError("packages.mirror", subject, message, action, found=list(found), pinned=pinned)
