"""A run's metrics, for Prometheus to scrape.

A feature: it imports no other feature and parses no arguments.
"""
