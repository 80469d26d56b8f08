"""Installs the packages that a job needs on the hosts.

It may import what `deploy.sync` may, and `deploy.sync`.
"""
