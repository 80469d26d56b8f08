"""Several real hosts on one Linux machine, to try kit on and to break.

A feature: it imports no other feature and parses no arguments.
"""
