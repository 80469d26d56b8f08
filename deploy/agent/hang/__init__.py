"""How a hang is found, and which rank is named as holding up the others.

`deploy/agent/hang_diagnosis.py` runs it, with the agents of the other nodes. It may import `deploy.agent` and what that
may.
"""
