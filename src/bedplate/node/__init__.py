"""What runs on nodes: standard library only, Python 3.9 or newer."""
