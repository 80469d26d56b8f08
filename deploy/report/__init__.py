"""Writes the report of a run as one HTML page.

A feature: it imports no other feature and parses no arguments.
"""
