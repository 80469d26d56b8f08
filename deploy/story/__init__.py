"""Derives from a run's events what happened in it: its history, its verdict and their wording; pure.

It may import `deploy.records` and the folders before it.
"""
