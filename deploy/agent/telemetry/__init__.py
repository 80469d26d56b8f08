"""What an agent records of its node: events, the current status, samples of its usage, the ranks' progress.

It may import `deploy.host`, `training.measures`, and `spec`, `descriptors` and `hang` of `deploy.agent`.
"""
