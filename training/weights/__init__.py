"""Trained weights: exported, and the best of a run kept.

It may import the rest of `training` but the loop.
"""
