"""`kit rm`: removes runs from the nodes first, and then their records, so that no files are left without a record."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.deploy.host.probes import hostfacts
from nodekit.deploy.output.wording import size_text
from nodekit.deploy.records import find_runs, locks, record_files, runs
from nodekit.deploy.records.locks import SupervisorLock
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from nodekit.deploy.connect.channel import HostChannel
    from nodekit.deploy.connect.cluster import SshOptions

REMOVAL_SILENCE_S = 30.0
_ID = re.compile(r".+-\d{4}-\d{6}-[0-9a-f]{4}(\.\d+)?")
_AGE = re.compile(r"(\d+(?:\.\d+)?)([dhw])")
_HOURS = {"h": 1, "d": 24, "w": 168}


@dataclass
class Place:
    """A run's folder on one host."""

    host: str
    folder: str
    snapshots: str = ""
    """Folder of its snapshots, if they are outside `folder`; else ""."""
    found: Mapping[str, Any] = field(default_factory=dict)
    """The answer of `removal.list_run`."""

    @property
    def key(self) -> tuple[str, str]:
        """The same for all hosts that share the folder."""
        return (self.found["shared"], "") if self.found["shared"] else (self.host, self.folder)


@dataclass
class Removal:
    """What exists of a run, and why it cannot be removed."""

    run: Run
    places: list[Place] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Hosts that cannot be reached."""

    def lines(self, *, keep_snapshots: bool) -> list[str]:
        """Return what would be removed, for people; a folder that several hosts share is listed once."""
        lines, told = [f"{self.run.run_id}  {self.run.state}"], set()
        for place in self.places:
            if not place.found["there"] or place.key in told:
                continue
            told.add(place.key)
            size, held = place.found["bytes"], place.found["snapshots_bytes"]
            what = f"{size_text(size - held)}; snapshots {'stay' if keep_snapshots else size_text(held)}"
            lines.append(f"  {place.host}:{place.folder}  {what if held else size_text(size)}")
            if place.snapshots and held and not keep_snapshots:
                lines.append(f"  {place.host}:{place.snapshots}  among these snapshots")
        lines += [f"  {host}: cannot be reached; what is there stays" for host in self.lost]
        return [*lines, f"  the record in {self.run.folder}"]


def age_s(written: str) -> float:
    """Return the seconds in ``30d``, ``12h`` or ``2w``.

    Raises:
        KitError: the text has another form.
    """
    found = _AGE.fullmatch(written)
    if not found:
        raise KitError(f"--older-than: found '{written}', wanted days, hours or weeks, as 30d, 12h or 2w")
    return float(found[1]) * _HOURS[found[2]] * 3600


def chosen(names: Sequence[str], older_than: str | None) -> tuple[list[Run], list[str]]:
    """Return the runs to remove, all of a sweep if its id is given, and notes for the user.

    Raises:
        KitError: there is no such run, or no option selects any.
    """
    if not names and older_than is None:
        raise KitError("kit rm: wanted RUN…, or --older-than 30d; kit runs shows which there are")
    for name in names:
        find_runs.check_id(name)
    (on_record, unreadable), notes = runs.on_record(), []
    ids = [*(run.run_id for run in on_record), *(each.run_id for each in unreadable)]
    found: dict[str, Run] = {}
    for name in names:
        if _ID.fullmatch(name) and not any(each.startswith(name) for each in ids):
            notes.append(f"{name} is not on record: nothing to remove")
            continue
        found.update({run.run_id: run for run in find_runs.sweep(name) or [find_runs.find(name)]})
    if older_than is not None:
        before = time.time() - age_s(older_than)
        wanted = list(found.values()) if names else on_record
        found = {run.run_id: run for run in wanted if (run.ended or run.created) < before}
        for run in [run for run in found.values() if run.state in runs.LIVE]:
            notes.append(f"{run.run_id} is {run.state}, and stays")
            del found[run.run_id]
        if not names:
            notes += [f"{each.error()}; {each.run_id} stays" for each in unreadable]
        if not found:
            notes.append(f"no run that ended more than {older_than} ago")
    return list(found.values()), notes


@contextlib.contextmanager
def looked_at(run: Run, options: SshOptions) -> Iterator[tuple[Removal, dict[str, HostChannel]]]:
    """Yield what exists of a run on its hosts, and channels to them."""
    from nodekit.deploy.backend import backend_of
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.connect.channel import on_all

    removal = Removal(run)
    backend = backend_of(run)
    folders = backend.folders(run)
    removal.places = [Place(each.host, each.path, each.snapshots) for each in folders]
    hosts = {**backend.hosts(run), **{each.host: each.reached for each in folders if each.reached}}
    with cluster.channels(hosts.values(), options, some=True) as channels:
        if why := backend.still_there(run, channels):
            removal.problems.append(why)
        removal.lost = [place.host for place in removal.places if place.host not in channels]
        by_host = {place.host: place for place in removal.places if place.host in channels}
        removal.places = list(by_host.values())

        def look(place: Place) -> Any:
            return channels[place.host].stream(
                "removal.list_run", lambda _: None, silence_s=REMOVAL_SILENCE_S, **_arguments(run, place)
            )

        told: set[tuple[str, str]] = set()
        alive: set[tuple[tuple[str, str], str]] = set()
        answers = on_all(by_host, look)
        shared = hostfacts.folders(
            {host: each["shared"] for host, each in answers.items() if not isinstance(each, Exception)}
        )
        for host, found in answers.items():
            if isinstance(found, Exception):
                removal.problems.append(str(found))
                continue
            by_host[host].found = {**found, "shared": shared[host]}
            key = by_host[host].key
            # A shared folder belongs to each of its hosts; processes belong to one host, and are listed twice only by
            # hosts that are the same machine.
            if what := [each for each in found["alive"] if (key, each) not in alive]:
                alive |= {(key, each) for each in what}
                is_earlier = host in run.earlier.keys() - run.nodes.keys()
                ends = f"clean {shlex.quote(run.inventory_path)}" if is_earlier else f"down {run.run_id}"
                removal.problems.append(f"{host}: {'; '.join(what)}; kit {ends} ends it")
            elif found["problem"] and key not in told:
                removal.problems.append(f"{host}: {found['problem']}")
            elif not found["problem"] and (why := _not_seen_gone(run, host, found)):
                removal.problems.append(why)
            told.add(key)
        yield removal, channels


def _not_seen_gone(run: Run, host: str, found: Mapping[str, Any]) -> str:
    """Return why a live run may still run on a host that has no record of its agent's process; "" if it cannot."""
    if run.state not in runs.LIVE or not run.is_led_here or not found["there"] or host in found["agents"]:
        return ""
    return (
        f"{host}: {run.run_id} is {run.state}, as far as is known here, and no agent.json there says which process "
        f"its agent was; kit down {run.run_id} ends it"
    )


def _arguments(run: Run, place: Place) -> dict[str, Any]:
    return {
        "folder": place.folder,
        "run_id": Path(place.folder).name,
        "names": [*run.earlier, *run.nodes],
        "snapshots": place.snapshots,
    }


def remove(
    removal: Removal, channels: Mapping[str, HostChannel], *, keep_snapshots: bool, keep_record: bool = False
) -> None:
    """Remove a run from its hosts, and then its record.

    Raises:
        KitError: some files could not be removed; the record stays.
    """
    from nodekit.deploy.connect.channel import on_all

    run = removal.run
    one_each = {place.key: place for place in reversed(removal.places) if place.found["there"]}
    places = {place.host: place for place in one_each.values()}
    results = on_all(
        places,
        lambda place: channels[place.host].stream(
            "removal.remove",
            lambda _: None,
            silence_s=REMOVAL_SILENCE_S,
            keep_snapshots=keep_snapshots,
            **_arguments(run, place),
        ),
    )
    if problems := [str(error) for error in results.values() if isinstance(error, Exception)]:
        stays = [] if keep_record else [f"the record of {run.run_id} stays; kit rm again when that is mended"]
        raise KitError("\n".join([*problems, *stays]))
    if not keep_record:
        remove_record(run)


def remove_record(run: Run) -> None:
    """Remove a run's record: rename it away in one step, then delete its files."""
    if run.folder.is_symlink():
        raise KitError(f"{run.folder} is a link, and what it points to may be anybody's; remove it by hand")
    half = record_files.folder().parent / f"removing-{run.run_id}"
    shutil.rmtree(half, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        run.folder.rename(half)
    shutil.rmtree(half, ignore_errors=True)


@contextlib.contextmanager
def held(run: Run) -> Iterator[None]:
    """Hold the locks against supervising or resuming a run while it is being removed.

    Raises:
        KitError: the run is supervised now.
    """
    lock = SupervisorLock(run)
    with locks.starting(Path(run.inventory_path)):
        if not lock.acquire():
            raise KitError(
                f"{run.run_id} is running, supervised by process {lock.owner()}; kit down {run.run_id} stops it"
            )
        try:
            yield
        finally:
            lock.release()


def remove_sweep(removal: Removal, channels: Mapping[str, HostChannel]) -> None:
    """After the last run of a sweep, remove the code that its runs shared.

    Raises:
        KitError: the record of another run of the sweep cannot be read; it may still use that code.
    """
    run = removal.run
    sweep_id = run.sweep
    if not sweep_id or not removal.places:
        return
    others, unreadable = runs.on_record()
    for each in unreadable:
        if each.is_of(sweep_id):
            found, wanted, cure = each.problem
            raise KitError(
                f"{run.run_id} is removed; the code that the runs of {sweep_id} share stays: {found}",
                wanted,
                cure,
            )
    if any(each.sweep == sweep_id for each in others):
        return
    place = removal.places[0]
    shared = Place(
        place.host, str(Path(place.folder).with_name(sweep_id)), found={"there": True, "shared": ""}
    )
    remove(Removal(run, [shared]), channels, keep_snapshots=False, keep_record=True)
