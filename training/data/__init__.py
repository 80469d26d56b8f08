"""Which samples each rank takes, and how they get to it: to train on, and to measure the model on.

It may import `training.engines`, `training.tasks` and what is below these.
"""
