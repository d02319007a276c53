"""Addresses as they may be shown: without the user and password that they may carry."""

from __future__ import annotations

import re

# Up to the last @ before the path: who writes a password with an @ in it may not have escaped it (RFC 3986, 3.2.1).
USER = re.compile(r"(?<=://)[^/\s]*@")


def without_user(text: str) -> str:
    """Return a text in which each `https://user:password@host` is `https://host`."""
    return USER.sub("", text)
