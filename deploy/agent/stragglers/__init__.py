"""Measure how long each rank waits for others, and name the rank or link that makes the others wait.

`deploy/agent/straggler_watch.py` runs this, with the agents of the other nodes. It may import `deploy.agent` and what
that may.
"""
