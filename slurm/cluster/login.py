"""Open a channel to the node from which jobs are submitted: this machine, or a login node over SSH."""

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
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import HostError, KitError, LoginRefused
from nodekit.inventory.schema import Host, Inventory, SlurmSettings

LOGIN = "login"
LOGIN_TIMEOUT_S = 60.0
FILE_BYTES = 64 << 20  # the largest file that is read; a record has one to two kB for each node
RETRY_S, MAX_RETRY_S = 5.0, 60.0  # the first and the longest wait between two tries to log in again
HELD_S = 600.0  # if a connection has lasted for longer, the first retry does not wait


@contextlib.contextmanager
def login(inventory: Inventory, options: SshOptions) -> Iterator[HostChannel]:
    """Open a channel to the login node, and close it at the end of the context."""
    with cluster.channels([host_of(inventory)], options) as channels:
        yield channels[LOGIN]


class LoginAgain:
    """Reconnects to the login node when the connection breaks while a job is watched; the job itself goes on."""

    def __init__(
        self, channel: HostChannel, inventory: Inventory, options: SshOptions, say: Callable[[str], None]
    ) -> None:
        """Keep the channel to reopen; `say` shows a line to the user."""
        self._channel = channel
        self._host, self._options, self._say = host_of(inventory), options, say
        self._wait_s = 0.0
        self._reached_at = 0.0

    def __call__(self, lost: ChannelLost, wait: Callable[[float], None] = time.sleep) -> None:
        """Reopen the channel, retrying without a limit; its users then go on with the same object.

        Args:
            lost: how the connection was lost.
            wait: sleeps for a number of seconds.

        Raises:
            LoginRefused: the login node answers, and refuses the login: no later try would succeed.
        """
        self._channel.close()  # also if it is silent, but not closed
        if time.monotonic() - self._reached_at > HELD_S:
            self._wait_s = 0.0
        told = {str(lost)}
        self._say(f"{lost}; the job goes on, and kit logs in again when it can")
        while True:
            wait(self._wait_s)
            self._wait_s = min(max(RETRY_S, 2 * self._wait_s), MAX_RETRY_S)
            try:
                cluster.reopen(self._channel, self._host, self._options)
            except LoginRefused:
                raise
            except HostError as error:
                if (why := str(error)) not in told:
                    told.add(why)
                    self._say(why)
            else:
                self._reached_at = time.monotonic()
                self._say(f"{self._channel.host}: reached again")
                return


@contextlib.contextmanager
def cancelling(name: str, members: Iterable[Run], by: str) -> Iterator[None]:
    """Record who stops the runs whose jobs are cancelled in this context; undo that if the cancelling fails.

    Args:
        name: of the run, or of the sweep.
        members: the runs.
        by: who stops them, such as "Ctrl-C".

    Raises:
        KitError: the login node is unreachable.
    """
    members = list(members)
    for run in members:
        run.say_stop(by)
    try:
        yield
    except HostError as error:
        for run in members:
            run.say_stop("")
        raise still_on(name, error) from error


def still_on(name: str, error: HostError) -> KitError:
    """Return the error for a run or a sweep that could not be cancelled."""
    return KitError(
        f"{name} goes on, as far as is known: {error}",
        cure=f"kit down {name} cancels it when the login node can be reached",
    )


def host_of(inventory: Inventory) -> Host:
    """Return the login node as a host, with the shared folder as its workdir."""
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
    """Return the `slurm:` section of an inventory that has one."""
    assert inventory.slurm is not None
    return inventory.slurm


def execute(
    channel: HostChannel,
    *argv: str,
    text: str = "",
    env: Mapping[str, str | None] | None = None,
    limit_s: float = LOGIN_TIMEOUT_S,
    ends_with_us: bool = False,
) -> dict[str, Any]:
    """Run a program on the login node, with `text` on its stdin; return its ``status``, ``out`` and ``err``.

    The program and its children are killed after `limit_s`, and with `ends_with_us` also when the channel ends.

    Variables that are None in `env` are removed from the environment, and so are those of a surrounding Slurm job:
    within `salloc` or `srun --pty`, sbatch and srun would read them as options, and the new job would get the old
    one's cores.

    Raises:
        RemoteError: there is no such program, or it took too long.
    """
    given = {**dict.fromkeys(of_a_job(os.environ)), **(env or {})}
    done: dict[str, Any] = channel.call(
        "execute",
        timeout_s=limit_s + 5,
        limit_s=limit_s,
        argv=argv,
        text=text,
        env=given,
        ends_with_us=ends_with_us,
    )
    return done


def of_a_job(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that Slurm has set for the job of this process; none outside of a job."""
    if "SLURM_JOB_ID" not in environ:
        return []
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return [name for name in environ if name.startswith(("SLURM", "PMI")) and name not in kept]


def write(channel: HostChannel, path: str, text: str) -> None:
    """Write a file on the login node atomically, with mode 0600; create its folder."""
    channel.call("write_file", timeout_s=LOGIN_TIMEOUT_S, path=path, text=text)


def remove_private(channel: HostChannel, run_dirs: Iterable[str], names: Iterable[str]) -> None:
    """Remove the secrets of jobs that are over, or were never queued; missing files are fine.

    Raises:
        KitError: they could not be removed.
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
    """Return the text of a file on the login node; "" if there is no such file."""
    return str(channel.call("read_file", timeout_s=LOGIN_TIMEOUT_S, path=path, limit_bytes=FILE_BYTES) or "")
