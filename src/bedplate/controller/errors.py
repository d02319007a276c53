"""The one exception that stands for a user's error: shown as plain text, never as a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from bedplate.node.addresses import without_user


class BedplateError(Exception):
    """Something the user can mend: the message names the object at fault and the next action.

    The command line prints it and exits with code 1; plugins turn it into Ansible's own error with the same
    text. A message holds no credentials of a URL: it ends in logs, and in files that are committed.
    """

    def __init__(self, message: str) -> None:
        """Keep the message, without the credentials of the URLs in it."""
        super().__init__(without_user(message))


def near(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean X?` for the known word nearest to *word*, or an empty string.

    A *prefix* that all of them share is left out of the comparison, for it would make everything near.
    """
    rests = [name.removeprefix(prefix) for name in known]
    match = difflib.get_close_matches(word.removeprefix(prefix), rests, n=1, cutoff=0.6)
    return f"; did you mean `{prefix}{match[0]}`?" if match else ""
