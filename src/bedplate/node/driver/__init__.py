"""The NVIDIA driver of a node: before a change, after it, and as the next boot will find it."""
