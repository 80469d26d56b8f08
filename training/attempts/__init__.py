"""Going from one attempt to the next in the same process, for the training module and for a user's own loop.

It may import `training.snapshots` and what is below that.
"""
