"""What a host is asked about itself: facts, network, GPUs, software. Sent over the channel.

It may import `nodekit.deploy.host` only.
"""
