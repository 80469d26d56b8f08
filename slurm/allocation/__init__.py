"""What runs inside a job that Slurm has started: one task on each node, of which the first one leads.

It may import what `slurm` may, and `slurm.sbatch_parameters`.
"""
