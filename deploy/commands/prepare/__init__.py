"""The commands to prepare a run: write an inventory, check and clean hosts, set up the shell.

It may import what `deploy.commands` may, but no command of another group.
"""
