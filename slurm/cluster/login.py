"""A channel to the node that jobs are submitted from: this machine, or a login node over SSH."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import ChannelLost, HostChannel
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.schema import Host, Inventory, SlurmSettings

LOGIN = "login"
LOGIN_TIMEOUT_S = 60.0
RETRY_S = 5.0


@contextlib.contextmanager
def login(inventory: Inventory, options: SshOptions) -> Iterator[HostChannel]:
    """A channel to the login node."""
    with cluster.channels([host_of(inventory)], options) as channels:
        yield channels[LOGIN]


def reach_again(
    channel: HostChannel,
    lost: ChannelLost,
    inventory: Inventory,
    options: SshOptions,
    *,
    say: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Log in anew, however long that takes: the job, which goes on, is to be watched again.

    Args:
        channel: to the login node; whoever has it goes on with it.
        lost: how its connection was.
        inventory: the job's.
        options: how to reach the login node.
        say: takes a line for the user; each reason once.
        wait: until it is tried again, so many seconds.
    """
    channel.close()  # one that is merely silent is lost, too
    why = str(lost)
    say(f"{why}; the job goes on, and the login node is tried every {RETRY_S:.0f} s")
    while True:
        try:
            cluster.reopen(channel, host_of(inventory), options)
        except HostError as error:
            if str(error) != why:
                why = str(error)
                say(why)
            wait(RETRY_S)
        else:
            say(f"{channel.host}: reached again")
            return


def refuse_if_lost(channel: HostChannel, run_id: str) -> None:
    """Say that nothing can be cancelled while the login node is out of reach.

    Raises:
        KitError: it is.
    """
    if channel.is_lost:
        raise KitError(
            f"{run_id} goes on: the login node cannot be reached to cancel it",
            cure=f"kit down {run_id} cancels it when it can be reached; kit watch {run_id} shows it",
        )


def host_of(inventory: Inventory) -> Host:
    """The login node, whose workdir is the shared folder."""
    settings = settings_of(inventory)
    values = inventory.defaults.model_dump(exclude_none=True)
    user, _, address = (settings.login or "").rpartition("@")
    here = {"address": "127.0.0.1", "connection": "local", "python": values.get("python", sys.executable)}
    there = {"address": address, "connection": "ssh", "python": values.get("python", "python3")}
    return Host.model_validate(
        {
            **values,
            **(there if settings.login else here),
            **({"user": user} if user else {}),
            "name": LOGIN,
            "workdir": settings.shared_dir,
        }
    )


def settings_of(inventory: Inventory) -> SlurmSettings:
    """The `slurm:` section."""
    assert inventory.slurm is not None
    return inventory.slurm


def execute(
    channel: HostChannel,
    *argv: str,
    text: str = "",
    env: Mapping[str, str | None] | None = None,
    limit_s: float = LOGIN_TIMEOUT_S,
) -> dict[str, Any]:
    """Run a program there, with `text` on its stdin: its ``status``, ``out`` and ``err``.

    What is None in `env` is taken out of its environment, and so is what a job of Slurm's has in it: within `salloc` or
    `srun --pty`, sbatch and srun would take that for options, and the new job would get the old one's cores.

    Raises:
        RemoteError: it is not there, or took too long.
    """
    given = {**dict.fromkeys(of_a_job(os.environ)), **(env or {})}
    done: dict[str, Any] = channel.call(
        "execute", timeout_s=limit_s + 5, limit_s=limit_s, argv=argv, text=text, env=given
    )
    return done


def of_a_job(environ: Mapping[str, str]) -> list[str]:
    """The variables that Slurm has set for the job that this process runs in; none outside of one."""
    if "SLURM_JOB_ID" not in environ:
        return []
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return [name for name in environ if name.startswith(("SLURM", "PMI")) and name not in kept]


def write(channel: HostChannel, path: str, text: str) -> None:
    """Write a file there, 0600, in one step; its folder is made."""
    channel.call("write_file", timeout_s=LOGIN_TIMEOUT_S, path=path, text=text)


def remove_private(channel: HostChannel, run_dirs: Iterable[str], names: Iterable[str]) -> None:
    """Remove the secrets of jobs that are over, or were never queued; none there is fine.

    Raises:
        KitError: they are still there.
    """
    names = list(names)
    files = [f"{run_dir}/slurm/{name}" for run_dir in run_dirs for name in names]
    if not files:
        return
    done = execute(channel, "rm", "-f", "--", *files)
    if done["status"]:
        raise KitError(
            f"{channel.host}: secrets of a job that is over are still there: {done['err'].strip()}",
            cure="remove them by hand",
        )


def read(channel: HostChannel, path: str) -> str:
    """What is in a file there; "" if there is none."""
    return str(channel.call("read_file", timeout_s=LOGIN_TIMEOUT_S, path=path) or "")
