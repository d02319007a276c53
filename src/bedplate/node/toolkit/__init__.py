"""The CUDA toolkit of a node: its releases, its layout on disk, and whether it builds programs."""
