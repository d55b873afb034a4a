"""Faults that no case of the bank has: one operation each, recorded by the names and metadata of docs/adding-a-case.md.

`ALL` has them all: name, expected first wrong tensor, class, constant or None, and the function that records the
operation, right or faulty. NumPy alone computes; nothing of assay does.
"""

from . import attention, cache, causes, ends, experts, ladder, layers, named, places, quantised, rotation  # noqa: F401
from .fault import ALL

__all__ = ["ALL"]
