"""Measures the network between the hosts, and forecasts the training speed that it allows.

A feature: it imports no other feature and parses no arguments.
"""
