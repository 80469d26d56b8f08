"""Places the user's code, and a venv with the packages that it needs, on a host; sent over the channel.

It may import `nodekit.deploy.host` only.
"""
