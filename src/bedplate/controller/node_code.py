"""The node's part of Bedplate as one file: a zip that Python runs from (zipimport), the same bytes each time."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import bedplate.node

from .files import replace_file, user_cache

NAME = "bedplate.zip"
# The least date that a zip can hold: no time of this machine gets in.
EPOCH = (1980, 1, 1, 0, 0, 0)


def node_code(directory: Path | None = None) -> dict[str, str]:
    """Write the package ``bedplate`` for nodes (the modules of bedplate.node) and return {path, sha256}.

    directory: where the controller keeps the file; by default in the user's cache. The file's name holds its hash, so
    that one that is there is right, and two versions of Bedplate on one controller do not disturb each other. Raises
    OSError when it cannot be written.
    """
    source = Path(next(iter(bedplate.node.__path__)))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in sorted(source.rglob("*.py")):
            entry = zipfile.ZipInfo(f"bedplate/{path.relative_to(source)}", EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes(), compresslevel=9)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    target = (directory or user_cache() / "node") / f"{digest[:16]}-{NAME}"
    replace_file(target, content.getvalue())
    return {"path": str(target), "sha256": digest}
