"""A kit that is there at once: a fork (`warm_python`) of a process that has imported kit and what it needs.

Half a second of imports is most of what a short command costs, and the tests call hundreds.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import warm_python

import nodekit.deploy
import nodekit.inventory
import nodekit.slurm
from nodekit.deploy.agent.ranks import fresh
from nodekit.deploy.agent.ranks.target import Target

CLI = "nodekit.deploy.commands.cli"
NOT_KITS_OWN = (
    "nodekit.deploy.agent",
    "nodekit.deploy.drill.drill_task",
    "nodekit.deploy.preflight.network.netdeep_job",
    "nodekit.deploy.selftest.selftest_task",
)
"""With torch; and programs that are sent to hosts."""
EXECUTABLE = "NODEKIT_TEST_EXECUTABLE"
"""The variable with the python by which kit starts programs of its own, if not by the real one."""


def argv(*args: str) -> list[str]:
    """The command line of ``kit ARGS…``; its pid is not kit's own."""
    return [str(warm_python.started(__file__)), "-m", CLI, *args]


PYTHON = """#!/bin/sh
case "$1 $2" in "-m {cli}") exec '{warm}' "$@" ;; esac
exec '{python}' "$@"
"""


@functools.cache
def own_kits() -> dict[str, str]:
    """The environment in which a kit that starts others, as a drill does, has forks of them."""
    path = warm_python.session() / f"python-of-kits-{os.getpid()}"
    path.write_text(PYTHON.format(cli=CLI, warm=warm_python.started(__file__), python=sys.executable))
    path.chmod(0o700)
    return {EXECUTABLE: str(path)}


class _Maker(warm_python._Maker):
    MAY_DIFFER = frozenset({"PYTHONPATH", "PYTHONIOENCODING", "LANG", "LC_ALL", "TZ"})

    def _as_ours(self, env: Mapping[str, str]) -> dict[str, str]:
        """What torch and its friends read is nothing to kit."""
        own = {name: value for name, value in env.items() if name.startswith(("PYTHON", "LC_", "LANG", "TZ"))}
        return {**self._env, **own}

    def _become(self, start: Mapping[str, Any], target: Target | None) -> NoReturn:
        sys.executable = start["env"].get(EXECUTABLE, sys.executable)
        super()._become(start, target)

    def load(self, preload: Iterable[str]) -> None:
        def forget_nothing(ours: Sequence[str], *, but: str) -> None:
            """All of kit is there."""

        fresh.forget_ours = forget_nothing
        super().load(preload)


def modules() -> list[str]:
    """All of kit's own, but for the one that is to be run."""
    found = [
        each.name
        for package in (nodekit.deploy, nodekit.inventory, nodekit.slurm)
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    left_out = (*NOT_KITS_OWN, CLI)
    return [name for name in found if not name.startswith(left_out) and not name.endswith("__main__")]


if __name__ == "__main__":
    warm_python.serve(sys.argv[1], modules(), _Maker)
