"""Sends the user's code and kit's own package to the hosts.

This folder may import `inventory`, `deploy.host`, `deploy.connect` and `deploy.output`.
"""
