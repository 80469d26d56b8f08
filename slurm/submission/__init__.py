"""How a job is handed to Slurm: all that happens before it is queued, and what runs on the login node for that.

It may import `slurm.cluster`, `slurm.allocation`, `slurm.sbatch_parameters` and what `slurm` may.
"""
