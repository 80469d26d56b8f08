"""The files that a run writes on its node, read and followed where they lie. Sent over the channel.

It may import `nodekit.deploy.host` only.
"""
