"""Trained weights: writing and reading them, and keeping the best ones of a run.

It may import `training.snapshots` and what is below that.
"""
