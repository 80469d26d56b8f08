"""Several real hosts on one Linux machine, for trying kit and injecting faults.

A feature: it imports no other feature and parses no arguments.
"""
