"""The results of a run: applies its weights to data, and removes runs.

A feature: it imports no other feature and parses no arguments.
"""
