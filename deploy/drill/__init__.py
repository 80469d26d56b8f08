"""Faults, made on purpose in a job, to see that it survives them.

A feature: it imports no other feature and parses no arguments.
"""
