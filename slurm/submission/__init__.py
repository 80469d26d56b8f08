"""Prepare and submit a job: all steps before it is queued, with the modules that run on the login node for that.

This folder may import `slurm.cluster`, `slurm.allocation`, `slurm.sbatch_parameters` and what `slurm` may.
"""
