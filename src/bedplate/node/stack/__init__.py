"""The Python stack at work: imports, operations, collectives."""
