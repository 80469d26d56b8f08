"""What a host is asked about itself: facts, network, GPUs, software. Sent over the link.

It may import `nodekit.deploy.host` only.
"""
