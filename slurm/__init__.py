"""The Slurm backend: `kit up` and the other commands for jobs that Slurm runs.

The modules of this folder run where kit is called, and reach Slurm through the login node. `submission` prepares and
submits a job, with the sbatch options from `sbatch_parameters`; `run` and `watch` follow the job, with what `cluster`
reads from Slurm and from the shared folder. `allocation` has the code that runs inside the job. This folder may import
the folders of `deploy` up to `launch`.
"""
