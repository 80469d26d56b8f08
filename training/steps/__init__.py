"""What belongs to a step: its optimizer, the sums of all ranks, averaging the weights, and values that are not finite.

It may import `training.snapshots` and what is below that.
"""
