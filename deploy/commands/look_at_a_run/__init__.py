"""The commands that show what a run does, or has done: its nodes, its output, its curves, and which runs there are.

It may import what `deploy.commands` may, but no command of another group.
"""
