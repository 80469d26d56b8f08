"""The commands for what is done before a run: an inventory written, hosts checked and cleaned, the shell set up.

It may import what `deploy.commands` may, but no command of another group.
"""
