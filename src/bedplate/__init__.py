"""Bedplate: pinned, verified GPU stacks with a way back."""
