"""Tests on the user's own machines what only they can show: engines, restarts and NCCL on their GPUs.

A feature: it imports no other feature and parses no arguments. It runs kit's other commands as a user would.
"""

MEMORY_MARK = "kit-selftest-memory "
"""Prefix of the line in which a rank reports how much GPU memory was free when it started."""
