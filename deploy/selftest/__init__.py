"""Tries on the user's own machines what can be proven only there: engines, restarts and NCCL on their GPUs.

A feature: it imports no other feature and parses no arguments. It runs kit's other commands as a user would.
"""

MEMORY_MARK = "kit-selftest-memory "
"""Begins the line in which a rank tells how much GPU memory was free when it started."""
