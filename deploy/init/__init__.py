"""Writes an inventory from a survey of the hosts.

A feature: it imports no other feature and parses no arguments.
"""
