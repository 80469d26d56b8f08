"""Executes the runs of a drill: one without a fault, then one per fault; cleans up after each."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.drill import drill_report
from nodekit.deploy.drill.drill_job import Job
from nodekit.deploy.drill.drill_report import Outcome, Result, Trace
from nodekit.deploy.drill.drill_site import Site
from nodekit.deploy.drill.drill_watch import Watch
from nodekit.deploy.drill.faults import Fault, Struck, make_whole
from nodekit.deploy.host.files import make_private
from nodekit.deploy.records import runs
from nodekit.deploy.records.record_files import told
from nodekit.deploy.records.runs import Run
from nodekit.deploy.supervise.node_client import NodeClient
from nodekit.inventory.copied import copied
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import load_inventory

OWN_JOB = (
    "-m", "nodekit.training", "--task", "nodekit.deploy.drill.drill_task:Paced", "--epochs", "14",
    "--snapshot-every", "20", "--lr", "0.0005",
)  # fmt: skip
"""322 slowed-down steps of digits: at least 20 s, with a snapshot about every second."""
STRIKE_AT_STEP = 75
STRIKE_AT = 0.35
"""When the fault is injected into a user's own job, as a share of its length."""
START_TIMEOUT_S = 300.0
PATIENCE_S = 240.0
"""Without a new step for this long, the job has not survived. A hang may take minutes to detect."""
LONGEST = 4
"""Nor has it if it takes longer than this many times the run without a fault, plus `PATIENCE_S`."""
SETTLED_S = 0.5
"""Events older than this have arrived from all nodes, so that the first one is known."""
_POLL_S = 0.1


class GaveUp(Exception):
    """The run makes no progress, or takes too long; the message says why."""


class Drill:
    """Runs the job, injects faults, and collects `results`."""

    def __init__(
        self,
        site: Site,
        command: Sequence[str],
        options: SshOptions,
        folder: Path,
        say: Callable[[str, str], None],
    ) -> None:
        """Prepare the folder; nothing is started yet.

        Args:
            site: the hosts, and their lab if they have one.
            command: replaces the inventory's command.
            options: how to reach the hosts.
            folder: for the copy of the inventory, and each run's output.
            say: called with the name of a run, and a line about it for the user.
        """
        self.results: list[Result] = []
        self.site, inventory = site, site.inventory
        self._hosts = {host.name: host for host in inventory.hosts}
        self._options = options
        self._folder = folder
        self._say = say
        self._is_own_job = not (command or inventory.job.command)
        self._command = OWN_JOB if self._is_own_job else tuple(command)
        with told(folder):
            make_private(folder)
        # Under another name, so that `kit up` does not resume a drill's run, and a drill does not end one of kit up's.
        self._inventory = folder / "inventory.yaml"
        text = copied(inventory.path, name=f"{inventory.name}-drill")
        self._inventory.write_text(text, encoding="utf-8")
        self._unbroken = Trace()
        self._training_s = 0.0
        self.run_s = 0.0
        """Duration of the run without a fault, including its start."""

    def unbroken(self) -> None:
        """Run the job without a fault.

        Raises:
            KitError: the job fails even without a fault.
        """
        started = time.monotonic()
        self._say("unbroken", "the job as it is, to compare with")
        with self._running("unbroken") as (job, watch):
            try:
                self._until(lambda: False, job, watch)
            except GaveUp as error:
                raise KitError(
                    f"the job does not even train unbroken: {error}", cure=f"see {job.output}"
                ) from None
            if job.exit_code != 0:
                raise KitError(f"the job fails even unbroken; {job.output} ends with\n{job.last_words()}")
            watch.close()
            self._unbroken = trace = watch.trace
            self.site.measure(watch.run)
        began = min((each.started for each in drill_report.attempts(trace)), default=time.time())
        ended = max([event["time"] for event in trace.events] + [each.time for each in trace.steps])
        self._training_s, self.run_s = ended - began, time.monotonic() - started
        steps = self._num_steps
        world = "→".join(map(str, drill_report.world_sizes(trace)))
        told = f"{f'{steps} steps' if steps else 'trained (it tells no steps)'} in {self._training_s:.0f} s"
        told += f", world size {world}"
        if not drill_report.losses(trace):
            told += "; it writes no metrics.jsonl: there is no curve to compare"
        self._say("unbroken", told)

    def try_fault(self, fault: Fault) -> None:
        """Run the job once more, and inject one fault."""
        started = time.monotonic()
        self._say(fault.name, fault.text)
        struck, problem, run_id, trace = None, "", "", Trace()
        outcome: Outcome = "not survived"
        try:
            with self._running(fault.name, prepare=fault.prepare) as (job, watch):
                run_id = watch.run.run_id
                try:
                    struck = self._strike(fault, job, watch)
                    self._follow(fault, struck, job, watch)
                    if job.exit_code != 0:
                        problem = f"kit up ended with exit status {job.exit_code}: {job.last_words()}"
                except GaveUp as error:
                    problem = str(error)
                if fault.needs_lab and fault.back:
                    # The job may have ended before, and all nodes must be reachable for their last events.
                    fault.back(self.site)
                watch.close()
                trace = watch.trace
        except KitError as error:
            problem = str(error)
            outcome = "not tried" if struck is None else "not survived"
        took_s = time.monotonic() - started
        if struck is None:
            result = Result(fault=fault.name, outcome=outcome, problem=problem, run=run_id, took_s=took_s)
        else:
            result = drill_report.judge(
                fault.name,
                where=struck.where,
                at=struck.at,
                unbroken=self._unbroken,
                trace=trace,
                problem=problem,
                run=run_id,
                took_s=took_s,
            )
        self.results.append(result)
        self._say(fault.name, f"{drill_report.sentence(result)}  ({took_s:.0f} s)")

    @property
    def _num_steps(self) -> int:
        return max((each.step for each in self._unbroken.steps), default=0)

    @contextlib.contextmanager
    def _running(
        self, name: str, *, prepare: Callable[[Site], None] | None = None
    ) -> Iterator[tuple[Job, Watch]]:
        """Start a run and watch it; on exit end it, and undo what `prepare` and the fault have done."""
        new_keys = self._options.accept_new_host_keys
        job = Job(self._inventory, self._command, self._folder / f"{name}.log", new_keys=new_keys)
        try:
            if prepare:
                prepare(self.site)
            job.start(new=True)
            run = self._wait_running(job)
            with Watch(run, self._hosts, self._options, job.output) as watch:
                self.site.enter(job, watch)
                yield job, watch
        finally:
            with _no_interrupts(lambda: self._say(name, "clearing up first; a moment")):
                self.site.leave()
                self._clear_up(job)

    def _wait_running(self, job: Job) -> Run:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            run = job.run
            if run is not None and run.state == "running":
                return run
            if job.exit_code is not None:
                raise KitError(f"kit up did not start the job; {job.output} ends with\n{job.last_words()}")
            if time.monotonic() > deadline:
                raise KitError(
                    f"the job was not started after {START_TIMEOUT_S:.0f} s", cure=f"see {job.output}"
                )
            time.sleep(_POLL_S)

    def _until(self, condition: Callable[[], bool], job: Job, watch: Watch) -> None:
        """Wait until the condition holds or the job has ended.

        Raises:
            GaveUp: the run makes no progress, or takes far too long.
        """
        deadline = time.monotonic() + LONGEST * self._training_s + PATIENCE_S if self._training_s else None
        since = time.monotonic()
        while job.exit_code is None and not condition():
            now = time.monotonic()
            if watch.step and now - max(since, watch.moved_at) > PATIENCE_S:
                raise GaveUp(f"no step in {PATIENCE_S:.0f} s, after step {watch.step}")
            if deadline is not None and now > deadline:
                raise GaveUp(f"not at its end {now - since:.0f} s later")
            time.sleep(_POLL_S)

    def _strike(self, fault: Fault, job: Job, watch: Watch) -> Struck:
        """Wait until the job is well under way, and inject the fault."""
        began = time.time()
        if self._num_steps:
            step = STRIKE_AT_STEP if self._is_own_job else max(1, round(STRIKE_AT * self._num_steps))
            self._until(lambda: watch.step >= step, job, watch)
        else:
            self._until(lambda: time.time() - began >= STRIKE_AT * self._training_s, job, watch)
        if job.exit_code is not None:
            raise KitError(f"the job ended before it was struck; {job.output} ends with\n{job.last_words()}")
        struck = fault.strike(self.site)
        when = f"at step {watch.step}" if watch.step else f"after {time.time() - began:.0f} s"
        self._say(fault.name, f"{struck.where}, {when}: {struck.what}")
        return struck

    def _follow(self, fault: Fault, struck: Struck, job: Job, watch: Watch) -> None:
        """Follow the run from the fault to its end, report events, and undo the fault in time."""
        told: set[str] = set()
        back_at = time.monotonic() + fault.back_after_s

        def look() -> bool:
            trace = watch.trace
            sign, again = drill_report.detected(trace, struck.at), drill_report.resumed(trace, struck.at)
            if sign and "detected" not in told and sign[0] < time.time() - SETTLED_S:
                told.add("detected")
                self._say(fault.name, f"detected after {sign[0] - struck.at:.1f} s: {sign[1]}")
            if again and "resumed" not in told and again.time < time.time() - SETTLED_S:
                told.add("resumed")
                world = [a.world_size for a in drill_report.attempts(trace) if a.started <= again.time][-1]
                at = f" at step {again.step}" if again.step >= 0 else ""
                self._say(fault.name, f"resumed after {again.time - struck.at:.1f} s{at}, world size {world}")
            if fault.back and "back" not in told and time.monotonic() > back_at:
                told.add("back")
                self._say(fault.name, fault.back(self.site))
            return False

        self._until(look, job, watch)

    def _clear_up(self, job: Job) -> None:
        """End the run on every node, and repair the lab."""
        job.kill()
        lab = self.site.lab
        if lab is not None:
            make_whole(lab)
        if (run := job.run) is not None:
            quiet = SshOptions(notice=lambda _: None)
            with cluster.channels(self._hosts.values(), quiet, some=True) as channels:
                results = NodeClient(run, load_inventory(self._inventory), channels).stop_all(force=True)
            run.reload()
            if run.state not in runs.ENDED:
                run.say_stop("kit drill")
                run.finish_stopped()
            unsure = [
                name for name in run.nodes if name not in results or isinstance(results[name], Exception)
            ]
            if unsure:
                where = ", ".join(unsure)
                self._say("warning", f"it may still run on {where}: kit down {run.run_id} when they are back")
        if lab is not None:
            make_whole(lab, small_disks_at=self.site.small_disk)


@contextlib.contextmanager
def _no_interrupts(say: Callable[[], None]) -> Iterator[None]:
    """Ignore Ctrl-C during the clean-up: an unfinished one would leave hosts broken."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: say()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
