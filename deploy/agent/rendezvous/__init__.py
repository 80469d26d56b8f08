"""The rendezvous of a run's agents: how they form a round, and how they notice at once that one of them is lost.

It may import `deploy.host`, and `spec`, `descriptors` and `agent_wire` of `deploy.agent`.
"""
