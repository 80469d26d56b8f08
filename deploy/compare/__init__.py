"""The same training by every engine, measured.

A feature: it imports no other feature and parses no arguments.
"""
