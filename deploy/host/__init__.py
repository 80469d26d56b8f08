"""What runs on a host by the host's own Python: 3.8 or newer, standard library only, sent over the link.

It may import nothing but itself.
"""
