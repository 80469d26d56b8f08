"""Programs beside the training, each run with ``python -m``: apply weights, gather them, measure the pace of a job.

It may import what `training.rank` may.
"""
