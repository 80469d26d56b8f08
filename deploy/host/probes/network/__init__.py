"""What a host is asked about its network: interfaces, ports, names, the way to other hosts and how fast it is.

It may import `nodekit.deploy.host` only.
"""
