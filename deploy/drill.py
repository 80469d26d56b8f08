"""`kit drill`: runs a job once unbroken and then once per fault, and tells whether it survived each.

Every run is a `kit up` process of its own on a copy of the inventory under another name, so that the inventory's
own runs are not taken for the drill's, nor the other way round.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from nodekit.deploy import cluster, drill_report, runs
from nodekit.deploy.cluster import SshOptions
from nodekit.deploy.drill_report import Result, Trace
from nodekit.deploy.drill_watch import Watch
from nodekit.deploy.faults import FAULTS, Fault, NotTried, Struck, make_whole, why_not
from nodekit.deploy.hands import Hands
from nodekit.deploy.lab_cluster import Lab
from nodekit.deploy.link import Link
from nodekit.deploy.runs import Run
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Inventory

if TYPE_CHECKING:
    from rich.table import Table

EPOCHS, SNAPSHOT_EVERY, STRIKE_AT_STEP = 14, 20, 75
OWN_JOB = (
    "-m", "nodekit.training", "--task", "nodekit.deploy.drill_task:Paced", "--epochs", str(EPOCHS),
    "--snapshot-every", str(SNAPSHOT_EVERY), "--lr", "0.0005",
)  # fmt: skip
"""Half a minute of digits at a walking pace, and a snapshot every second."""
STRIKE_AT = 0.35
"""Where a user's own job is struck, in parts of its length."""
START_TIMEOUT_S = 300.0
PATIENCE_S = 120.0
"""Without anything new of a run for this long, it is not survived."""
END_TIMEOUT_S = 60.0
_POLL_S = 0.1
_RUN_ID = re.compile(r"^(?:run|resuming) ([^\s;]+)", re.MULTILINE)
_WIDE = 200


class NotPossible(KitError):
    """What was asked for cannot be tried on this inventory."""

    exit_code = 2


class _GaveUp(Exception):
    """The run does not get to where it should; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line of `kit drill` says."""

    inventory: Path
    faults: tuple[str, ...] = ()
    """Default: all that the inventory allows."""
    command: tuple[str, ...] | None = None
    json: bool = False
    ssh: SshOptions = field(default_factory=SshOptions)


def drill(options: Options) -> int:
    """Try the faults; the exit status is 0 if all were survived."""
    inventory = load_inventory(options.inventory)
    if inventory.slurm is not None:
        raise NotPossible(
            f"{options.inventory}: a drill needs `hosts:`; on Slurm it is for scontrol to break things"
        )
    lab, lab_names = lab_of(inventory)
    faults = chosen(options.faults, inventory, lab)
    say = Voice(sys.stderr if options.json else sys.stdout)
    folder = runs.folder().parent / "drills" / time.strftime(f"{inventory.name}-%m%d-%H%M%S")
    drilling = Drill(inventory, options, lab, lab_names, folder, say)
    with _interrupts():
        try:
            drilling.reference()
            say(
                f"{len(faults)} faults to try, about {drilling.estimate_s(len(faults)) / 60:.0f} min; Ctrl-C ends it"
            )
            for fault in faults:
                drilling.try_fault(fault)
        finally:
            if drilling.results:
                _conclude(drilling.results, folder, options)
    return 0 if drill_report.is_survived(drilling.results, asked_for=bool(options.faults)) else 1


def list_faults(options: Options, file: TextIO) -> int:
    """Print each fault, and why it cannot be tried on this inventory."""
    inventory = load_inventory(options.inventory)
    lab, _ = lab_of(inventory)
    width = max(map(len, FAULTS))
    for fault in FAULTS.values():
        reason = why_not(fault, num_nodes=len(inventory.hosts), lab=lab)
        print(
            f"{fault.name.ljust(width)}  {fault.text}" + (f"  (not here: {reason})" if reason else ""),
            file=file,
        )
    return 0


def chosen(names: Sequence[str], inventory: Inventory, lab: Lab | None) -> list[Fault]:
    """The faults of these names, or all that are possible.

    Raises:
        NotPossible: there is none of that name, or it cannot be tried here.
    """
    reasons = {
        name: why_not(fault, num_nodes=len(inventory.hosts), lab=lab) for name, fault in FAULTS.items()
    }
    possible = [name for name, reason in reasons.items() if not reason]
    problems = []
    for name in names:
        if name not in FAULTS:
            near = get_close_matches(name, FAULTS, n=1)
            problems.append(f"{name}: no such fault" + (f"; did you mean {near[0]}?" if near else ""))
        elif reasons[name]:
            problems.append(f"{name}: not on {inventory.path}: {reasons[name]}")
    if problems:
        raise NotPossible("\n".join([*problems, f"possible there: {', '.join(possible)}"]))
    return [FAULTS[name] for name in dict.fromkeys(names or possible)]


def lab_of(inventory: Inventory) -> tuple[Lab | None, dict[str, str]]:
    """The lab whose hosts these are, with each one's name there; None if they are not all of one lab's."""
    if os.geteuid() != 0:
        return None, {}
    folders = [inventory.path.resolve().parent]
    for host in inventory.hosts:
        folders += [Path(path).parent for path in (host.identity_file, host.known_hosts) if path]
    for folder in dict.fromkeys(folders):
        with contextlib.suppress(KitError, OSError):
            if (folder / "lab.json").exists():
                lab = Lab.load(folder)
                by_address = {host.address: name for name, host in lab.hosts.items()}
                if all(host.address in by_address for host in inventory.hosts):
                    return lab, {host.name: by_address[host.address] for host in inventory.hosts}
    return None, {}


class Voice:
    """One line per phase, as it happens."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._last = ""

    def __call__(self, text: str) -> None:
        """A line of its own."""
        print(text, file=self._file, flush=True)

    def of(self, name: str, text: str) -> None:
        """A line about one run."""
        shown = name if name != self._last else ""
        self._last = name
        self(f"{shown.ljust(max(map(len, FAULTS)))}  {text}")


class Job:
    """One `kit up` of the drill's inventory, in processes of their own."""

    def __init__(self, inventory: Path, command: Sequence[str], output: Path, *, new_keys: bool) -> None:
        self.output = output
        self._argv = [sys.executable, "-m", "nodekit.deploy.cli", "up", str(inventory)]
        self._options = ["--accept-new-host-keys"] if new_keys else []
        self._command = ["--", *command] if command else []
        self._process: subprocess.Popen[bytes] | None = None
        self.is_down_on_purpose = False

    def start(self, *, new: bool) -> None:
        """Start it; `new`: a new run, else the one that is there."""
        with self.output.open("a") as output:
            # A session of its own: a Ctrl-C in the terminal is for the drill, which then ends the run.
            self._process = subprocess.Popen(
                [*self._argv, *self._options, *(["--new"] if new else []), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.is_down_on_purpose = False

    def kill(self, *, on_purpose: bool = False) -> None:
        """SIGKILL, to it alone."""
        self.is_down_on_purpose = on_purpose
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or is to be started again."""
        if self._process is None or self.is_down_on_purpose:
            return None
        return self._process.poll()

    @property
    def said(self) -> str:
        """All that it has written."""
        with contextlib.suppress(OSError):
            return self.output.read_text(encoding="utf-8", errors="replace")
        return ""

    @property
    def run(self) -> Run | None:
        """The record of its run, once there is one."""
        if found := _RUN_ID.search(self.said):
            with contextlib.suppress(KitError):
                return runs.find(found.group(1))
        return None


class Drill:
    """The runs of one drill, one after the other; what one leaves behind is cleared up before the next."""

    def __init__(
        self,
        inventory: Inventory,
        options: Options,
        lab: Lab | None,
        lab_names: Mapping[str, str],
        folder: Path,
        say: Voice,
    ) -> None:
        self.lab = lab
        self.results: list[Result] = []
        self._hosts = {host.name: host for host in inventory.hosts}
        self._options = options
        self._lab_names = lab_names
        self._folder = folder
        self._say = say
        self._is_own_job = not (options.command or inventory.job.command)
        self._command = options.command or (OWN_JOB if self._is_own_job else ())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._inventory_path = folder / "inventory.yaml"
        self._inventory_path.write_text(
            copied(options.inventory, name=f"{inventory.name}-drill"), encoding="utf-8"
        )
        self._reference = Trace()
        self._reference_s = 0.0
        self._training_s = 0.0
        self._run: Run | None = None
        self._folders: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._watch: Watch | None = None
        self._job: Job | None = None

    # --- the runs ---

    def reference(self) -> None:
        """The job, unbroken.

        Raises:
            KitError: it does not train to its end even so.
        """
        started = time.monotonic()
        self._say.of("unbroken", "the job as it is, to compare with")
        with self._running("unbroken") as (job, watch):
            try:
                self._watch_it(job, watch, until=lambda: False)
            except _GaveUp as error:
                raise KitError(
                    f"the job does not run even unbroken: {error}; its output: {job.output}"
                ) from None
            if job.exit_code != 0:
                raise KitError(
                    f"the job fails even unbroken:\n{_last_words(job.said)}\nits output: {job.output}"
                )
            watch.close()
            self._reference = watch.trace
            self._folders = {
                name: str(Path(node["node_dir"]).parent.parent) for name, node in watch.run.nodes.items()
            }
            if self.lab is not None:
                node = list(self._hosts)[-1]
                self._sizes[node] = self._disk_usage(
                    node, str(Path(watch.run.nodes[node]["node_dir"]).parent)
                )
        self._reference_s = time.monotonic() - started
        found = drill_report.attempts(self._reference)
        self._training_s = self._reference_s
        if found:
            end = max(
                [each.time for each in self._reference.steps]
                + [event["time"] for event in self._reference.events]
            )
            self._training_s = end - found[0].started
        num_steps = max((each.step for each in self._reference.steps), default=0)
        told = f"{num_steps} steps" if num_steps else "no steps told of"
        world = drill_report.world_sizes(self._reference)
        self._say.of(
            "unbroken",
            f"{told} in {self._training_s:.0f} s, world size {world[-1] if world else '?'}"
            + (
                ""
                if drill_report.losses(self._reference)
                else "; it writes no metrics.jsonl: no curve to compare"
            )
            + f"  ({self._reference_s:.0f} s)",
        )

    def estimate_s(self, num_faults: int) -> float:
        """How long this many faults may take."""
        return num_faults * (self._reference_s + 10)

    def try_fault(self, fault: Fault) -> None:
        """One fault in a run of its own; what came of it is in `results`, also when it is cut short."""
        started = time.monotonic()
        self._say.of(fault.name, fault.text)
        where, struck, problem, trace = "", None, "", Trace()
        outcome: Literal["not survived", "not tried"] = "not survived"
        exit_code, run_id = None, ""
        try:
            if fault.prepare:
                fault.prepare(self)
            with self._running(fault.name) as (job, watch):
                run_id = watch.run.run_id
                try:
                    struck = self._strike(fault, job, watch)
                    where = struck.where
                    self._follow_fault(fault, struck, job, watch)
                    exit_code = job.exit_code
                except _GaveUp as error:
                    problem = str(error)
                if self.lab is not None and fault.needs_lab:
                    self._back(fault)  # or its last words are not to be had
                watch.close()
                trace = watch.trace
        except NotTried as error:
            outcome, problem = "not tried", str(error)
        except _GaveUp as error:
            problem = str(error)
        if exit_code not in (0, None):
            problem = f"kit up ended with exit status {exit_code}: {_last_words(job.said)}"
        self._add(
            self._judge(fault, struck, trace, problem, outcome, run_id, where, time.monotonic() - started)
        )

    def _judge(
        self,
        fault: Fault,
        struck: Struck | None,
        trace: Trace,
        problem: str,
        outcome: Literal["not survived", "not tried"],
        run_id: str,
        where: str,
        took_s: float,
    ) -> Result:
        if struck is None:
            return Result(fault=fault.name, outcome=outcome, problem=problem, run=run_id, took_s=took_s)
        sign = drill_report.detected(trace, struck.at)
        again = drill_report.resumed(trace, struck.at)
        curve = drill_report.compare(self._reference, trace)
        if not problem and curve.sameness == "different":
            problem = f"its loss curve {curve.text}"
        return Result(
            fault=fault.name,
            where=where,
            outcome="not survived" if problem else "survived",
            problem=problem,
            run=run_id,
            detected_s=sign[0] - struck.at if sign else None,
            detected_by=sign[1] if sign else "",
            resumed_s=again.time - struck.at if again else None,
            went_on=again is None and not problem,
            steps_lost=drill_report.steps_lost(trace),
            world_sizes=drill_report.world_sizes(trace),
            curve=curve,
            took_s=took_s,
        )

    def _add(self, result: Result) -> None:
        self.results.append(result)
        text = f"{result.outcome}: {result.problem}" if result.problem else result.outcome
        if not result.problem and result.curve.text:
            how = {
                "equal": "the curve equals the unbroken run's",
                "same": f"the curve is the {result.curve.text}",
            }
            text += f", {how.get(result.curve.sameness, result.curve.text)}"
        self._say.of(result.fault, f"{text}  ({result.took_s:.0f} s)")

    @contextlib.contextmanager
    def _running(self, name: str) -> Iterator[tuple[Job, Watch]]:
        """A run that is under way, watched; ended and cleared up behind it, whatever happens."""
        job = Job(
            self._inventory_path,
            self._command,
            self._folder / f"{name}.log",
            new_keys=self._options.ssh.accept_new_host_keys,
        )
        self._job = job
        try:
            job.start(new=True)
            run = self._wait_running(job)
            self._run = run
            with Watch(run, self._hosts, self._options.ssh, job.output) as watch:
                self._watch = watch
                yield job, watch
        finally:
            with _deaf(self._say):
                self._clear_up(job)

    def _wait_running(self, job: Job) -> Run:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            run = job.run
            if run is not None and run.state == "running":
                return run
            if job.exit_code is not None:
                raise KitError(f"kit up did not start the job:\n{_last_words(job.said)}")
            if time.monotonic() > deadline:
                raise KitError(
                    f"the job was not started after {START_TIMEOUT_S:.0f} s; its output: {job.output}"
                )
            time.sleep(_POLL_S)

    def _watch_it(self, job: Job, watch: Watch, *, until: Callable[[], bool]) -> None:
        """Until that is so or the job has ended.

        Raises:
            _GaveUp: nothing new was seen of it for too long.
        """
        while job.exit_code is None and not until():
            if time.monotonic() - watch.moved_at > PATIENCE_S + self._training_s:
                raise _GaveUp(f"nothing new was seen of it for {PATIENCE_S + self._training_s:.0f} s")
            time.sleep(_POLL_S)

    def _strike(self, fault: Fault, job: Job, watch: Watch) -> Struck:
        """Wait until the job is well under way, and strike."""
        began = time.time()
        last = max((each.step for each in self._reference.steps), default=0)
        if last:
            at = STRIKE_AT_STEP if self._is_own_job else max(1, round(STRIKE_AT * last))
            self._watch_it(job, watch, until=lambda: watch.step >= at)
        else:
            self._watch_it(job, watch, until=lambda: time.time() - began >= STRIKE_AT * self._training_s)
        if job.exit_code is not None:
            raise NotTried("the job had ended before it was struck")
        step = watch.step
        struck = fault.strike(self)
        told = f"at step {step}" if step else f"after {time.time() - began:.0f} s"
        self._say.of(fault.name, f"struck {told}, {struck.where}: {struck.what}")
        return struck

    def _follow_fault(self, fault: Fault, struck: Struck, job: Job, watch: Watch) -> None:
        """From the strike to the end of the run, telling what happens."""
        told: set[str] = set()
        back_at = time.monotonic() + fault.back_after_s if fault.back else None

        def look() -> bool:
            nonlocal back_at
            trace = watch.trace
            if "detected" not in told and (sign := drill_report.detected(trace, struck.at)):
                told.add("detected")
                self._say.of(fault.name, f"detected after {sign[0] - struck.at:.1f} s: {sign[1]}")
            if "resumed" not in told and (again := drill_report.resumed(trace, struck.at)):
                told.add("resumed")
                worlds = [
                    each.world_size for each in drill_report.attempts(trace) if each.started <= again.time
                ]
                at = f" at step {again.step}" if again.step >= 0 else ""
                self._say.of(
                    fault.name, f"resumed after {again.time - struck.at:.1f} s{at}, world size {worlds[-1]}"
                )
            if back_at is not None and time.monotonic() > back_at:
                back_at = None
                assert fault.back is not None
                self._say.of(fault.name, fault.back(self))
            return False

        self._watch_it(job, watch, until=look)

    def _back(self, fault: Fault) -> None:
        if fault.back is not None and fault.prepare is not None:
            fault.back(self)
        elif self.lab is not None:
            make_whole(self.lab)

    def _clear_up(self, job: Job) -> None:
        """End the run on every node and make a lab whole; `kit up` ends by that, or is killed."""
        job.kill()
        if self.lab is not None:
            make_whole(self.lab)
        if (run := job.run) is not None:
            quiet = SshOptions(notice=lambda _: None)
            with cluster.links(self._hosts.values(), quiet, some=True) as links:
                results = Hands(run, load_inventory(self._inventory_path), links).stop_all(force=True)
            run.reload()
            if run.state not in runs.ENDED:
                run.finish("stopped", "stopped by kit drill")
            unsure = [name for name in run.nodes if isinstance(results.get(name, KitError()), Exception)]
            if unsure:
                self._say(
                    f"warning: {run.run_id} may still run on {', '.join(unsure)}: kit down {run.run_id}"
                )
        if self.lab is not None and self._folders:
            make_whole(self.lab, runs_folder=next(iter(self._folders.values())))
        self._watch, self._job = None, None

    def _disk_usage(self, node: str, folder: str) -> int:
        assert self.lab is not None
        done = self.lab.run(self.lab_name(node), ["du", "-sb", folder], capture_output=True, text=True)
        return int(done.stdout.split()[0]) if done.returncode == 0 else 0

    # --- the site of a fault ---

    @property
    def nodes(self) -> list[str]:
        """Those that train now; before a run is there, all of the inventory's."""
        if self._watch is None:
            return list(self._hosts)
        statuses = self._watch.statuses
        return [name for name in self._hosts if statuses.get(name, {}).get("workers")] or list(self._hosts)

    @property
    def host(self) -> str:
        """The node that keeps the rendezvous."""
        assert self._run is not None
        self._run.reload()
        return str(self._run.judgement["host"])

    @property
    def rank0(self) -> str:
        """The node with rank 0."""
        assert self._watch is not None
        for name, status in self._watch.statuses.items():
            if any(worker["rank"] == 0 for worker in status.get("workers", ())):
                return name
        return self.host

    def inject(self, node: str, target: str, number: int, **how: Any) -> float:
        """Signal what runs on a node; when that was."""
        assert self._watch is not None
        link: Link = self._watch.link(node)
        node_dir = self._watch.run.nodes[node]["node_dir"]
        done = link.call("inject", timeout_s=90.0, node_dir=node_dir, target=target, number=number, **how)
        if not done["pids"]:
            saved = "saved nothing to its snapshot folder" if how.get("saving_s") else "had no such process"
            raise NotTried(f"{node} {saved}")
        return self._watch.local_time(node, done["time"])

    def lab_name(self, node: str) -> str:
        """What the lab calls a node."""
        return self._lab_names[node]

    def run_folder(self, node: str) -> str:
        """Where the runs' folders are on a node."""
        return self._folders[node]

    def size_bytes(self, node: str) -> int:
        """How large a run's folder becomes there."""
        return self._sizes.get(node, 0)

    def kill_kit(self) -> None:
        """SIGKILL to the `kit up` of this run."""
        assert self._job is not None
        self._job.kill(on_purpose=True)

    def start_kit(self) -> None:
        """Another `kit up` for this run."""
        assert self._job is not None
        self._job.start(new=False)


def copied(path: Path, *, name: str) -> str:
    """An inventory file under another name, to lie in another folder."""
    from nodekit.inventory.source import parse

    data = parse(path.read_text(encoding="utf-8")).data
    assert isinstance(data, dict)  # it was loaded before
    data["name"] = name
    hosts = data.get("hosts")
    blocks = list(hosts.values()) if isinstance(hosts, dict) else []
    for block in [data, *(each for each in blocks if isinstance(each, dict))]:
        for key in ("identity_file", "known_hosts"):
            if block.get(key) and not str(block[key]).startswith("~"):
                block[key] = str(path.resolve().parent / block[key])
    return json.dumps(data, indent=1, ensure_ascii=False)  # JSON is YAML, and leaves no doubt what is text


def _last_words(said: str, num_lines: int = 6) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:])


def _conclude(results: Sequence[Result], folder: Path, options: Options) -> None:
    text = json.dumps([result.to_dict() for result in results], indent=2)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    print()
    console.print(table(results))
    print(f"\n{drill_report.verdict(results)}")
    print(f"output of each run, and results.json: {folder}", flush=True)


def table(results: Sequence[Result]) -> Table:
    """All results, a line each."""
    from rich.table import Table
    from rich.text import Text

    found = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in drill_report.COLUMNS:
        found.add_column(column, justify="right" if column in ("detected", "resumed", "lost") else "left")
    styles = {"survived": "green", "not survived": "bold red", "not tried": "yellow"}
    for result in results:
        *cells, last = drill_report.row(result)
        found.add_row(*cells, Text(last, style=styles[result.outcome]))
    return found


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """SIGTERM is a Ctrl-C too: what was broken is mended in either case."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _deaf(say: Voice) -> Iterator[None]:
    """No Ctrl-C while it is cleared up: half of that would leave hosts broken."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {
        number: signal.signal(number, lambda *_: say("clearing up first; a moment")) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
