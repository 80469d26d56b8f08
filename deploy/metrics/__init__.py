"""Serves a run's metrics for Prometheus.

A feature: it imports no other feature and parses no arguments.
"""
