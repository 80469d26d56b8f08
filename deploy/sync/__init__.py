"""Sends the user's code and kit's own package to the hosts.

It may import `inventory`, `deploy.host`, `deploy.connect` and `deploy.output`.
"""
