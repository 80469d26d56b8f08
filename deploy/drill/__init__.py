"""Fault injection: breaks a job on purpose, to check that it survives.

A feature: it imports no other feature and parses no arguments.
"""
