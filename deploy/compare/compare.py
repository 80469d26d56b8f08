"""`kit compare`: runs the same training with every engine on this machine, one after the other, and measures it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodekit.deploy.agent.hang.hang import Progress
from nodekit.deploy.compare import compare_chart, compare_plan, compare_report
from nodekit.deploy.compare.compare_plan import Machine, Run
from nodekit.deploy.compare.compare_report import Row
from nodekit.deploy.output import terminal
from nodekit.deploy.output.interrupts import NothingLeft, sigterm_interrupts
from nodekit.deploy.output.wording import count
from nodekit.deploy.records import record_files
from nodekit.inventory.errors import JobFailed, KitError, WrongUsage

TIMEOUT_S = 3600.0
_LOOK = "from nodekit.deploy.compare.compare import look; look()"
_LOOK_S = 300.0
_LOOK_EVERY_S = 0.25
_END_S = 15.0
_BUSY = 0.3  # share of the cores; above this load, warn
_MARK = "NODEKIT_COMPARE"
_NO_TERMINAL_WIDTH = 200
_WORDED = re.compile(r"^python -m nodekit\.training: (.+)$", re.MULTILINE)
_RAISED = re.compile(r"^(?:\[?rank\d+\]?: ?)?([\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `kit compare`."""

    engines: str | None = None
    """Comma-separated names; None: all."""
    table: str | None = None
    """A name in `compare_plan.TABLES`, instead of engines."""
    nproc: str | None = None
    """Comma-separated numbers of ranks."""
    arguments: tuple[str, ...] = ()
    """Arguments of the training module, for every run."""
    output: Path | None = None
    timeout_s: float = TIMEOUT_S
    """Time limit of each run, in seconds."""


def compare(options: Options) -> int:
    """Run all of them; return 3 if one failed, else 0."""
    if importlib.util.find_spec("torch") is None:
        raise KitError(
            f"kit compare trains on this machine, and {sys.executable} has no torch: pip install torch scikit-learn"
        )
    ways = compare_plan.chosen(compare_plan.named(options.table, options.engines))
    given = compare_plan.with_task(options.table, options.arguments)
    arguments = compare_plan.shared_arguments(given)
    nums_ranks = compare_plan.numbers(options.nproc) if options.nproc else None
    tried = [compare_plan.parsed((*arguments, *way.arguments)) for way in ways]
    fitting = [(way, found) for way, found in zip(ways, tried, strict=True) if not isinstance(found, str)]
    if not fitting:
        raise WrongUsage("\n".join(dict.fromkeys(map(str, tried))))
    if not options.timeout_s > 0:
        raise WrongUsage(f"--timeout {options.timeout_s:g}: seconds above 0 are wanted")
    folder = options.output or Path(time.strftime("compare-%Y%m%d-%H%M%S"))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise WrongUsage(
            f"-o {folder} is there and not empty: give a new folder, or two comparisons would mix"
        )
    (way, trained), *_ = fitting
    machine = _look_at_machine((*arguments, *way.arguments))
    plan = compare_plan.runs(ways, nums_ranks or compare_plan.usual_numbers(machine, options.table))
    reasons = {run: compare_plan.refusal(run, arguments, machine) for run in plan}
    if all(reasons.values()):
        raise WrongUsage("\n".join(dict.fromkeys(reason for reason in reasons.values() if reason)))
    what, where = compare_plan.heading(trained, given, machine, plan)
    print("\n".join([what, *where.split("; ", 2)]))
    if (load := os.getloadavg()[0]) > _BUSY * machine.num_cores:
        print(f"other work is going on (load {load:.1f}): figures will be off, and not all by as much")
    print(flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KitError(
            f"-o {folder}: cannot be made: {error.strerror}", cure="name another with -o"
        ) from error
    comparison = Comparison(folder, arguments, machine, options.timeout_s)
    with sigterm_interrupts():
        try:
            comparison.run(reasons)
        except KeyboardInterrupt as interrupt:
            if comparison.is_running:
                raise
            raise NothingLeft(*interrupt.args) from interrupt
        finally:
            remark = compare_plan.batch_remark(trained, plan)
            conclude(comparison.rows, folder, what=what, where=where, remark=remark)
    return JobFailed.exit_code if any(row.outcome == "failed" for row in comparison.rows) else 0


class Comparison:
    """Executes the runs one after the other; `rows` has the results so far."""

    def __init__(self, folder: Path, arguments: Sequence[str], machine: Machine, timeout_s: float) -> None:

        self.rows: list[Row] = []
        self.is_running = False
        """Whether processes of a run may exist."""
        self._folder = folder
        self._arguments = arguments
        self._machine = machine
        self._timeout_s = timeout_s
        self._console = terminal.console(highlight=False, soft_wrap=True)

    def run(self, reasons: Mapping[Run, str | None]) -> None:
        """Execute the runs that have no reason against them, and add a row for each."""
        plan = [run for run, reason in reasons.items() if not reason]
        width = max(len(str(run)) for run in reasons)
        took: list[float] = []
        for run, reason in reasons.items():
            if reason:
                row = _row(run, "not here", reason)
            else:
                left_s = statistics.mean(took) * (len(plan) - len(took)) if took else None
                at = f"{len(took) + 1} of {len(plan)}: {run}" + (f", {_about(left_s)} left" if left_s else "")
                row = self._train(run, at)
                took.append(row.seconds or 0.0)
            self.rows.append(row)
            _, _, whole, training, rate, _, memory, accuracy, f1 = compare_report.cells(row, None)
            told = f"{whole}, training {training}, {rate} samples/s, {memory}, accuracy {accuracy}, F1 {f1}"
            said = {"trained": told, "failed": f"failed: {row.problem}", "not here": "not here"}[row.outcome]
            self._console.print(f"{str(run).ljust(width)}  {said}", markup=False)

    def _train(self, run: Run, at: str) -> Row:
        """Execute one run; its log, result and metrics go to the folder."""
        log = self._folder / f"{run.file}.log"
        started_s = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix=".running-", dir=self._folder) as scratch,
            log.open("wb") as said,
        ):
            output, progress, mark = Path(scratch, "output"), Path(scratch, "progress"), secrets.token_hex(16)
            argv = compare_plan.argv(run, self._arguments, output)
            environ = compare_plan.environment(run, self._machine, os.environ)
            told = {"NODEKIT_PROGRESS_FILE": str(progress), _MARK: mark}
            threads = f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}"
            said.write(f"$ {threads} {shlex.join(argv)}\n".encode())
            said.flush()
            with self._console.status("") as status:
                self.is_running = True
                process = subprocess.Popen(
                    argv, env={**environ, **told}, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                    start_new_session=True,  # Ctrl-C reaches only this process, which then ends the run
                )  # fmt: skip
                try:
                    while process.poll() is None and time.monotonic() < started_s + self._timeout_s:
                        age_s = int(time.monotonic() - started_s)
                        status.update(f"{at}  {age_s // 60}:{age_s % 60:02}  {_step(progress)}")
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(_LOOK_EVERY_S)
                    seconds, code = time.monotonic() - started_s, process.poll()
                finally:
                    _end(process, mark)
                    self.is_running = False
            for name, ending in (("result.json", ".json"), ("metrics.jsonl", ".jsonl")):
                if (output / name).exists():
                    shutil.move(output / name, self._folder / f"{run.file}{ending}")
            step = _step(progress)
        result = self._folder / f"{run.file}.json"
        if code is None:
            where = f"the last thing that it told was step {step}"
            if (last := Progress.parse(step, 0)).step is None:
                where = "it had not made a step" + (f" (at {last.stage})" if last.stage else "")
            problem = f"not at its end after {self._timeout_s:g} s (--timeout), and {where}"
        elif code:
            problem = last_error(log.read_text(errors="replace")) or f"exit status {code}"
        elif not result.exists():
            problem = "it ended well, but without a result"
        else:
            values = json.loads(result.read_text())
            if values["world_size"] == run.num_ranks:
                return Row.of_result(run.way.name, run.num_ranks, seconds=seconds, result=values)
            problem = f"{count(values['world_size'], 'rank')} trained, and {run.num_ranks} were wanted"
        return _row(run, "failed", f"{problem} (all that it said: {log})", seconds)


def conclude(rows: Sequence[Row], folder: Path, *, what: str, where: str, remark: str = "") -> None:
    """Print the table, and write it as CSV and as a chart.

    Raises:
        NotWritten: a file cannot be written; the table has been printed by then.
    """
    if not rows:
        return

    print()
    terminal.console(width=None if sys.stdout.isatty() else _NO_TERMINAL_WIDTH).print(
        compare_report.table(rows)
    )
    print()
    problems = {(row.engine, row.outcome, row.problem): row.num_ranks for row in rows if row.problem}
    for (engine, outcome, problem), num_ranks in problems.items():
        on = f", {count(num_ranks, 'rank')}" if outcome == "failed" else ""
        print(f"{engine}{on}: {outcome}: {problem}")
    if compare_report.base_of(rows) is None:
        print(f"no speed-up, since {compare_plan.BASE} has not trained")
    print("time is from the start of the first process to the end of the last; training is without imports")
    if remark:
        print(remark)
    sys.stdout.flush()
    kept = ["compare.csv"]
    with record_files.told(folder / "compare.csv"):
        compare_report.write_csv(rows, folder / "compare.csv")
    if any(row.outcome == "trained" for row in rows):
        chart = compare_chart.svg(rows, title=what, subtitle=f"{where}\n{remark}")
        with record_files.told(folder / "compare.svg"):
            (folder / "compare.svg").write_text(chart, encoding="utf-8")
        kept.append("compare.svg")
    print(f"{', '.join(kept)}, and each run's log, result and metrics: {folder}", flush=True)


def last_error(log: str) -> str:
    """Return why a run failed: the training module's own message, else the last exception before torchrun's."""
    if worded := _WORDED.findall(log):
        return str(worded[-1])
    raised = [line for line in _RAISED.findall(log) if "ChildFailedError" not in line]
    return str(raised[-1]) if raised else ""


def look() -> None:
    """Check the task, and print facts of this machine; runs in its own process, as torch is slow to import."""
    import torch

    from nodekit.training.options.arguments import parse
    from nodekit.training.tasks import task_of

    options = parse()
    try:
        task_of(options)
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print(json.dumps({"torch": torch.__version__, "gpus": gpus}))


def _look_at_machine(arguments: Sequence[str]) -> Machine:
    """Check the task and its data, and return facts of this machine.

    Raises:
        WrongUsage: the task or its data cannot be used.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOOK, *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LOOK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise KitError(f"the task and its data were not read after {_LOOK_S:g} s") from error
    if done.returncode == 2:
        raise WrongUsage(done.stderr.strip())
    if done.returncode:
        raise KitError(f"the task cannot be loaded:\n{done.stderr.strip()}")
    seen = json.loads(done.stdout.splitlines()[-1])
    return Machine(
        torch=seen["torch"], gpus=tuple(seen["gpus"]), cpu=_cpu(), num_cores=len(os.sched_getaffinity(0))
    )


def _cpu() -> str:
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End all processes of a run. Its ranks have their own sessions: torchrun ends them; `mark` finds any left."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
    finally:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended, or is another user's
                if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
        process.wait()


def _row(run: Run, outcome: compare_report.Outcome, problem: str, seconds: float | None = None) -> Row:
    return Row(
        engine=run.way.name, num_ranks=run.num_ranks, outcome=outcome, problem=problem, seconds=seconds
    )


def _step(progress: Path) -> str:
    try:
        return progress.read_text(errors="replace").strip()
    except OSError:
        return ""


def _about(seconds: float) -> str:
    return f"about {max(1, round(seconds / 60))} min" if seconds > 50 else f"about {round(seconds)} s"
