"""Connections to hosts: SSH, host keys, and the channel through which functions are called on a host.

It may import `inventory` and `deploy.host`.
"""
