"""An inventory, written from what the hosts say of themselves.

A feature: it imports no other feature and parses no arguments.
"""
