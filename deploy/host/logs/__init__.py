"""Read and follow the files that a run writes, on the node where they are. This code is sent over the channel.

This folder may import `nodekit.deploy.host` only.
"""
