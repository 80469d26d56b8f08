"""Inspect a host's network: interfaces, ports, names, connections to other hosts and their speed.

This folder may import `nodekit.deploy.host` only.
"""
