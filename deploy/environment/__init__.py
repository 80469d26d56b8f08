"""How the packages that a job needs get to the hosts.

It may import what `deploy.sync` may, and `deploy.sync`.
"""
