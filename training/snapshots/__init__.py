"""Snapshots: what is in one, how it is written, when it counts, and how nodes agree on one.

It may import `training.world` and torch.
"""
