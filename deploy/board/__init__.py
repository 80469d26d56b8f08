"""Shows the curves of runs in TensorBoard.

A feature: it imports no other feature and parses no arguments.
"""
