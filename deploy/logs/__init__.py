"""What the ranks of a run have written, fetched and shown.

A feature: it imports no other feature and parses no arguments.
"""
