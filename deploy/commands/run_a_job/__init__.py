"""The commands that start a job, stop it, drain a node, or export the job for another tool.

It may import what `deploy.commands` may, but no command of another group.
"""
