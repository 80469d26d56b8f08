"""How the agents of a run meet, know who may train, and notice at once that one is gone.

It may import `deploy.host`, `deploy.agent.spec` and `deploy.agent.agent_wire`.
"""
