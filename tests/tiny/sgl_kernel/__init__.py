"""Bedplate test stand-in, not sgl-kernel: one extension that needs torch's C++ symbols."""

import torch  # noqa: F401  the extension has no RPATH: it finds torch's libraries only when they are loaded

try:
    from . import common_ops  # noqa: F401
except ImportError as error:
    # The real package tries several files and reports all attempts in one new error; so does this one.
    raise ImportError(
        f"[sgl_kernel] CRITICAL: Could not load any common_ops library!\nAttempted to import common_ops: {error}"
    ) from None
