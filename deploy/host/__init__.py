"""What runs on a host by the host's own Python: 3.8 or newer, standard library only.

Its source is sent over the channel (`deploy/connect/channel.py`), and its functions are called from there by name;
agents and the control machine use the same files. It may import nothing of nodekit but itself.
"""
