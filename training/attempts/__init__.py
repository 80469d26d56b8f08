"""How a process goes from one attempt to the next, for the training module and for a training loop of a user's own.

It may import `training.snapshots` and what is below that.
"""
