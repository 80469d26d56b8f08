"""What runs on every node beside the ranks, with torch: meets the other agents, starts the ranks, records what happens.

It may import `training.snapshots` and `deploy.host`.
"""
