"""What is known of a cluster and its jobs: what Slurm and its accounting say, and what lies in the shared folder.

All of it is read through the login node. It may import what `slurm` may, and nothing else of `slurm`.
"""
