"""How the user's code, and a venv with the packages that it needs, come to lie on a host. Sent over the channel.

It may import `nodekit.deploy.host` only.
"""
