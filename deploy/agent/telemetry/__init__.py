"""What an agent records of its node: events, the current status, samples of its use, the ranks' progress.

It may import `deploy.host`, `deploy.agent.spec` and `deploy.agent.hang`.
"""
