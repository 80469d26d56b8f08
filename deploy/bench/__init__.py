"""The network between the hosts, measured, and the speed of training that it allows.

A feature: it imports no other feature and parses no arguments.
"""
