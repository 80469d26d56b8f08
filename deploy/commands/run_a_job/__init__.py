"""The commands that start a job, stop it, take a node out of it, or write it down for another tool.

It may import what `deploy.commands` may, but no command of another group.
"""
