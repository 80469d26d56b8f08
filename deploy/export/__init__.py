"""Writes the job of an inventory as files for other tools.

A feature: it imports no other feature and parses no arguments.
"""
