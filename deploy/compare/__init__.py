"""Measures the same training with every engine.

A feature: it imports no other feature and parses no arguments.
"""
