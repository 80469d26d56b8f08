"""The commands that show runs: their nodes, their output, their curves, and the list of runs.

It may import what `deploy.commands` may, but no command of another group.
"""
