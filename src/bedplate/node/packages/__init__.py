"""Exact package transactions through the system's package manager."""
