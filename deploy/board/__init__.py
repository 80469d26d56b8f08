"""TensorBoard over the curves of runs.

A feature: it imports no other feature and parses no arguments.
"""
