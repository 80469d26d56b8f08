"""Shows and follows the ranks' output.

A feature: it imports no other feature and parses no arguments.
"""
