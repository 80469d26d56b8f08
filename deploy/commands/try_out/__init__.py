"""The commands that test kit or measure: a lab, faults, a self-test, the network, engines.

It may import what `deploy.commands` may, but no command of another group.
"""
