"""A run as it is on record, and all its events, wherever it runs or ran."""

from __future__ import annotations

from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.records import events
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import ENDED, Run


def past(run: Run, options: SshOptions) -> tuple[Run, list[Event]]:
    """The record of who supervises the run and its events, in the order of time.

    For a run that Slurm has, these are the leader's, through the login node; when it is over, they are here.

    Raises:
        HostError: the login node of a Slurm run that goes on cannot be reached.
    """
    if run.slurm and (run.state not in ENDED or not (run.folder / events.FILE).exists()):
        from nodekit.inventory.load import restore
        from nodekit.slurm.login import login
        from nodekit.slurm.show import events_of, record_of

        with login(restore(run.inventory), options) as link:
            return record_of(run, link) or run, events.parse_all(events_of(run, link))
    return run, events.read(run.folder)
