"""Inspect a host: facts, network, GPUs, software. This code is sent over the channel.

This folder may import `nodekit.deploy.host` only.
"""
