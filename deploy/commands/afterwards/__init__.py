"""The commands for a run that is over: why it failed, its report, the quality of its weights, and its removal.

It may import what `deploy.commands` may, but no command of another group.
"""
