"""Builds the job's Python environment on the hosts.

It may import what `deploy.sync` may, and `deploy.sync`.
"""
