"""Detect a hang, and name the rank that holds up the others.

`deploy/agent/hang_diagnosis.py` runs this, with the agents of the other nodes. It may import `deploy.agent` and what
that may.
"""
