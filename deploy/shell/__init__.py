"""Runs one command on many hosts at once.

A feature: it imports no other feature and parses no arguments.
"""
