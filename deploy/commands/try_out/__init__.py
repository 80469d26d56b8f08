"""The commands that try kit, or measure: hosts on this machine, faults, proofs, the network, engines.

It may import what `deploy.commands` may, but no command of another group.
"""
