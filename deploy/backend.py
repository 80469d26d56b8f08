"""The interface of the backends, SSH and Slurm, and `backend_of`, which chooses one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nodekit.deploy.connect.channel import HostChannel
    from nodekit.deploy.connect.cluster import SshOptions
    from nodekit.deploy.launch.options import Options, StopOptions
    from nodekit.deploy.records.events import Event
    from nodekit.deploy.records.runs import Run, RunFolder
    from nodekit.deploy.story.status import Status
    from nodekit.deploy.supervise.state import Rules
    from nodekit.inventory.schema import Host, Inventory


class Backend(Protocol):
    """Starts, shows and stops runs. What a backend cannot do raises a KitError before anything is done."""

    def up(self, inventory: Inventory, options: Options) -> int:
        """Start the job of an inventory, or attach to its run, and watch it; return the exit status."""

    def watch(self, run: Run, ssh: SshOptions, *, plain: bool = False) -> int:
        """Show a run until it ends or the user leaves; return the exit status."""

    def down(self, run: Run, options: StopOptions) -> int:
        """Stop a run; return the exit status, 1 if it is not certain that all of it has stopped."""

    def status(self, run: Run, ssh: SshOptions) -> Status:
        """Return what a run and each of its nodes is doing."""

    def history(self, run: Run, ssh: SshOptions) -> tuple[Run, list[Event]]:
        """Return the supervisor's record of a run, and its events in the order of time."""

    def rules(self, run: Run, node: str) -> Rules:
        """Return the supervisor's rules, which decide whether a node can be drained; KitError if Slurm does."""

    def still_there(self, run: Run, channels: Mapping[str, HostChannel]) -> str:
        """Return in words what is left of a run besides its agents, asked through channels to `hosts`; else ""."""

    # --- all runs of a sweep at once, if `up` can start one ---

    def sweep_status(self, members: list[Run], ssh: SshOptions, *, as_json: bool) -> int:
        """Print a table of the runs of a sweep; return the exit status."""

    def sweep_down(self, members: list[Run], options: StopOptions) -> int:
        """Stop the runs of a sweep that are not over, as `down` does; return the exit status."""

    # --- what the nodes wrote ---

    @property
    def poll_s(self) -> float:
        """Seconds between two looks at files that are being written."""

    def hosts(self, run: Run, *, spare: bool = False) -> Mapping[str, Host]:
        """Return name → host for the hosts that the nodes' files are read through; with `spare`, of spare nodes too."""

    def folders(self, run: Run) -> Sequence[RunFolder]:
        """Return the folders of a run, each with the one of `hosts` that it lies on."""

    def record(self, run: Run, channels: Mapping[str, HostChannel]) -> Run | None:
        """Return the supervisor's record of a run, read through channels to `hosts`; None before there is one."""

    def nodes_at(self, record: Run, host: str) -> Sequence[str]:
        """Return the nodes, spare ones included, whose files are read through `host`, which is one of `hosts`."""

    def is_over(self, run: Run, channels: Mapping[str, HostChannel], *, all_gone: bool) -> bool:
        """Whether a run has ended; `all_gone` says that no agent is alive on any host that could be asked."""


def backend_of(about: Inventory | Run) -> Backend:
    """Return the backend of an inventory, or of a run."""
    if about.slurm:
        from nodekit.slurm.backend import SlurmBackend

        return SlurmBackend()
    from nodekit.deploy.ssh_backend.backend import SshBackend

    return SshBackend()
