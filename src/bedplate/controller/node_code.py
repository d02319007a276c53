"""The node's part of Bedplate as one file: a zip that Python runs from (zipimport), the same bytes each time."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from pathlib import Path

import bedplate.node

NAME = "bedplate.zip"
# The least date that a zip can hold: no time of this machine gets in.
EPOCH = (1980, 1, 1, 0, 0, 0)


def default_directory() -> Path:
    """Return where the controller keeps the file."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bedplate" / "node"


def node_code(directory: Path | None = None) -> dict[str, str]:
    """Write the package ``bedplate`` for nodes (the modules of bedplate.node) and return {path, sha256}.

    The file's name holds its hash, so that one that is there is right, and two versions of Bedplate on one
    controller do not disturb each other. Raises OSError when it cannot be written.
    """
    source = Path(next(iter(bedplate.node.__path__)))
    place = directory or default_directory()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place, prefix=".", delete=False) as file:
        try:
            with zipfile.ZipFile(file, "w") as archive:
                for path in sorted(source.glob("*.py")):
                    entry = zipfile.ZipInfo(f"bedplate/{path.name}", EPOCH)
                    entry.external_attr = 0o644 << 16
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(entry, path.read_bytes(), compresslevel=9)
            file.close()
            digest = hashlib.sha256(Path(file.name).read_bytes()).hexdigest()
            target = place / f"{digest[:16]}-{NAME}"
            os.replace(file.name, target)
        except OSError:
            os.unlink(file.name)
            raise
    return {"path": str(target), "sha256": digest}
