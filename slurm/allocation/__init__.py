"""What runs inside a job that Slurm has started.

It may import what `deploy.supervise` may, and the rest of `slurm`.
"""
