"""Finds the packages; all else is in pyproject.toml.

The top-level folders are mapped below one import root: bare `training` or `deploy` packages would
collide with the ones in users' own repositories.
"""

from setuptools import find_packages, setup

TOP = ("deploy", "inventory", "slurm", "training")

setup(
    packages=[f"nodekit.{name}" for name in find_packages(include=[f"{each}*" for each in TOP])],
    package_dir={f"nodekit.{each}": each for each in TOP},
)
