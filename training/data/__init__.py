"""Sampling and loading of the data on each rank, for training and evaluation, and the evaluation itself.

It may import `training.engines`, `training.tasks` and what is below these.
"""
