"""Replication of the user's own snapshots: agents copy the files to each other, so that they survive a lost node.

It may import `training.snapshots`, `deploy.host`, and `spec`, `descriptors` and `agent_wire` of `deploy.agent`.
"""
