"""Files of the controller: where caches are, replaced whole, told apart by their sha256."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def user_cache() -> Path:
    """Return where this user's caches of Bedplate are: `$XDG_CACHE_HOME/bedplate`, else `~/.cache/bedplate`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bedplate"


def replace_file(path: Path, content: str | bytes) -> None:
    """Put *content* (text as UTF-8) in the place of *path* with one rename; a reader sees the old or the new file.

    Missing directories are made. The file is readable for all, whatever the umask of who runs this: nodes and other
    users read what the controller wrote. Errors: OSError; *path* is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal. Errors: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
