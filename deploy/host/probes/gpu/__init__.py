"""Inspect a host's GPUs and other accelerators: which exist, which a job gets, and their faults.

This folder may import `nodekit.deploy.host` only.
"""
