"""The views of a run in a terminal: a live screen, or lines; and the verdict.

A feature: it imports no other feature and parses no arguments.
"""
