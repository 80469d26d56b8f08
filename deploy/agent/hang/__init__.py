"""How a hang is found, and which rank is named as holding up the others.

It may import `deploy.agent` and what that may.
"""
