"""Snapshots: their format, when and how they are written, and how the nodes agree on one to resume from.

How their files are written and read is in `files`. It may import `training.world`, `training.options` and
`training.reporting`.
"""
