"""How long each rank of a node waits for others, and which rank or link makes the others wait.

`deploy/agent/straggler_watch.py` runs it, with the agents of the other nodes. It may import `deploy.agent` and what
that may.
"""
