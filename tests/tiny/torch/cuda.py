"""Bedplate test stand-in, not PyTorch: there is no GPU behind it."""


def is_available() -> bool:
    """Return False."""
    return False


def device_count() -> int:
    """Return 0."""
    return 0
