"""The Slurm backend: `kit up` and the other commands for jobs that Slurm runs.

The files of this folder run where kit is called, and reach Slurm through the login node (`login`): `prepare` checks and
syncs, `sbatch_parameters` says what is asked of sbatch, `submit` hands it in, `run` and `watch` follow the job, `jobs`
reads what Slurm says of it, `shared_folder` what its nodes write. What runs inside the job is in `allocation`. It may
import the folders of `deploy` up to `launch`.
"""
