"""How a host is reached: SSH, host keys, and the channel over which its Python answers calls.

It may import `inventory` and `deploy.host`.
"""
