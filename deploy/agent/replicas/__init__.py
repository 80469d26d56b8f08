"""How a user's own snapshots outlive their node: the agents copy them to each other.

It may import `training.snapshots`, `deploy.host` and `deploy.agent.agent_wire`.
"""
