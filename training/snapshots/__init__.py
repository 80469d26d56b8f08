"""Snapshots: their format, when and how they are written, and how the nodes agree on one to resume from.

The writing and reading of files is in `files`. This package may import `training.world`, `training.options` and
`training.reporting`.
"""
