"""Sends messages about a run to a command or a webhook.

A feature: it imports no other feature and parses no arguments.
"""
