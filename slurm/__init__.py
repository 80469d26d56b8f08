"""The Slurm backend: `kit up` and the other commands for jobs that Slurm runs.

The files of this folder run where kit is called, and reach Slurm through the login node. In `submission` a job is
prepared and handed in, with what `sbatch_parameters` says is asked of sbatch; `run` and `watch` follow it, by what
`cluster` reads of Slurm and of the folder in which its nodes write. What runs inside the job is in `allocation`. It may
import the folders of `deploy` up to `launch`.
"""
