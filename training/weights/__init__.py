"""Trained weights: writing and reading them, and keeping the best of a run.

It may import `training.snapshots` and what is below that.
"""
