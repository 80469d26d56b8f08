"""What a run leaves: its weights, applied to data, and all of it, removed.

A feature: it imports no other feature and parses no arguments.
"""
