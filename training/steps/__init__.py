"""The parts of a step: its optimizer, sums over the ranks, averaging the weights, and values that are not finite.

It may import `training.snapshots` and what is below that.
"""
