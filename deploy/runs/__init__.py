"""The runs on record, as a table, and compared with each other.

A feature: it imports no other feature and parses no arguments.
"""
