"""What runs on a host by the host's own Python: 3.8 or newer, standard library only.

Its source is sent over the channel (`deploy/connect/channel.py`), which calls its functions by name. Agents and the
control machine use the same files. This folder may import nothing else of nodekit.
"""
