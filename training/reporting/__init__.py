"""What a run says of its training: metrics, curves, trackers, evaluation.

It may import the rest of `training` but the loop.
"""
