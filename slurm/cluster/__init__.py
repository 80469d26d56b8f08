"""Read the state of a cluster and its jobs, from Slurm, from its accounting, and from the shared folder.

All of it is read through the login node. This folder may import what `slurm` may, and nothing else of `slurm`.
"""
