"""What can be done with a run, whoever runs it. `backend_of` alone knows who there is."""

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
    """Who runs a run. What only some can do says so by a KitError, before anything is done."""

    def up(self, inventory: Inventory, options: Options) -> int:
        """Start the job of an inventory, or attach to the run that is there, and watch it; the exit status."""

    def watch(self, run: Run, ssh: SshOptions, *, plain: bool = False) -> int:
        """Show a run that goes on, until it ends or the user leaves; the exit status."""

    def down(self, run: Run, options: StopOptions) -> int:
        """Stop a run; the exit status is 1 where that is not certain."""

    def status(self, run: Run, ssh: SshOptions) -> Status:
        """What a run and each of its nodes does now."""

    def history(self, run: Run, ssh: SshOptions) -> tuple[Run, list[Event]]:
        """A run as its supervisor has it, and its events in the order of time."""

    def rules(self, run: Run, node: str) -> Rules:
        """By what its supervisor goes, for who wants a node out of it; KitError where that is not kit's to do."""

    def still_there(self, run: Run, channels: Mapping[str, HostChannel]) -> str:
        """What of a run is not over beside its agents, in words, read through channels to `hosts`; "" for nothing."""

    # --- all runs of a sweep at once, where `up` can start one ---

    def sweep_status(self, members: list[Run], ssh: SshOptions, *, as_json: bool) -> int:
        """Print a table of them; the exit status."""

    def sweep_down(self, members: list[Run], options: StopOptions) -> int:
        """Stop those that are not over, as `down` does; the exit status."""

    # --- what the nodes wrote ---

    @property
    def poll_s(self) -> float:
        """How often files may be looked at that are written to."""

    def hosts(self, run: Run, *, spare: bool = False) -> Mapping[str, Host]:
        """The hosts through which the files of a run's nodes are read, by name; `spare`: also of such that may come."""

    def folders(self, run: Run) -> Sequence[RunFolder]:
        """Where a run lies, on which of `hosts`."""

    def record(self, run: Run, channels: Mapping[str, HostChannel]) -> Run | None:
        """The run as its supervisor has it, with its nodes, read through channels to `hosts`; None before there is."""

    def nodes_at(self, record: Run, host: str) -> Sequence[str]:
        """The nodes that a record has, or may get, whose files are read through one of `hosts`."""

    def is_over(self, run: Run, channels: Mapping[str, HostChannel], *, all_gone: bool) -> bool:
        """Whether a run has ended; `all_gone`: no agent is left where it could be asked."""


def backend_of(about: Inventory | Run) -> Backend:
    """Who runs the job of an inventory, or has a run."""
    if about.slurm:
        from nodekit.slurm.backend import SlurmBackend

        return SlurmBackend()
    from nodekit.deploy.ssh_backend.backend import SshBackend

    return SshBackend()
