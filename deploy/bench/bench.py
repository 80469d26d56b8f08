"""`kit bench`: measures the network between the hosts, and forecasts a job's speed on it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.deploy.bench import forecast, gpu_links, model_size, netbench, netbench_report
from nodekit.deploy.bench.forecast import Curve, Forecast, Job
from nodekit.deploy.bench.netbench import Measured, Progress, Reduced
from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.output import terminal
from nodekit.deploy.output.interrupts import sigterm_interrupts
from nodekit.deploy.sync import sync
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import load_inventory

if TYPE_CHECKING:
    from rich.table import Table

JOB = "job"
"""Value of --plan: the model that the inventory's job trains."""
NUM_NODES = 8
"""Number of nodes to forecast for if no inventory is given."""
_MOST_COLUMNS = 5
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(b|bit|bits|B|bytes)?(?:/s|ps)?")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_NO_TERMINAL_WIDTH = 10_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `kit bench`."""

    inventory: Path | None
    ssh: SshOptions
    max_size: str = "1GiB"
    time_limit_s: float = netbench.REDUCE_S
    """Seconds for all sizes of the all-reduce together."""
    pair_s: float = netbench.PAIR_S
    png: Path | None = None
    csv: Path | None = None
    json: bool = False
    model: str | None = None
    """The model to forecast for: a number of parameters, a config.json, or `JOB`."""
    batch: int | None = None
    step_s: float | None = None
    dtype: str = "fp32"
    accumulate: int = 4
    local_steps: int | None = None
    num_nodes: int | None = None
    link: str | None = None
    latency: str = "0.2ms"


MOST_S = 86400.0
"""One day."""


def bench(options: Options) -> int:
    """Measure, print and forecast; return 1 if something could not be measured, else 0."""
    _refuse(options)
    max_bytes = size_bytes(options.max_size)
    job = _job(options) if options.model and options.model != JOB else None
    measured = None
    if options.link is None:
        measured, own = _measure(options, max_bytes)
        job = job or own
    elif options.model == JOB:
        job = _job_here(options)
    problems = list(measured.problems) if measured else []
    planned = None
    if job and measured and (not measured.reduced or len(measured.nodes) < 2):
        problems.append("no forecast, since it is made from the all-reduce of two nodes or more")
    elif job:
        planned = _plan(options, job, measured)
    if options.json:
        told: dict[str, Any] = netbench_report.to_json(measured) | {"problems": problems} if measured else {}
        if planned:
            told["plan"] = plan_json(planned)
        print(json.dumps(told, ensure_ascii=False, indent=2))
    else:
        _show(measured, planned, problems)
    if measured:
        _write(options, measured)
    return 1 if problems else 0


def _refuse(options: Options) -> None:
    """Raise KitError for options that contradict each other."""
    if options.link is None and options.inventory is None:
        raise KitError(
            "which hosts? kit bench INVENTORY measures between them; with no hosts, "
            "kit bench --plan 110e6 --step-time 0.4 --link 1Gb forecasts"
        )
    if options.link is not None and options.model is None:
        raise KitError("--link is in place of measuring, for a forecast", cure="give --plan MODEL, too")
    if options.link is not None and (options.png or options.csv):
        raise KitError("--png and --csv show what is measured, and with --link nothing is")
    if options.model is None and options.step_s is not None:
        raise KitError("--step-time is for a forecast", cure="give --plan MODEL, too")
    if options.model == JOB and options.inventory is None:
        raise KitError("--plan job: whose? give the INVENTORY, too")
    if options.model not in (None, JOB) and options.step_s is None:
        raise KitError(
            f"--plan {options.model} needs --step-time S, what a step takes on one node in seconds",
            cure="--plan job measures it, for the job of the inventory",
        )
    if not 0 < options.pair_s <= MOST_S or not 0 <= options.time_limit_s <= MOST_S:
        raise KitError(
            f"--seconds is above 0, and --time-limit at least 0 (0: no all-reduce); both at most {MOST_S:g}"
        )
    for option, path in (("--png", options.png), ("--csv", options.csv)):
        # Checked before minutes of measuring; writing at the end may still fail.
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            why = "it is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}"
            raise KitError(f"{option} {path}: cannot be written: {why}")


def _job(options: Options) -> Job:
    assert options.model is not None
    assert options.step_s is not None
    return Job(
        num_parameters=model_size.num_parameters(options.model),
        step_s=options.step_s,
        batch=options.batch,
        gradient_bytes=forecast.DTYPE_BYTES[options.dtype],
    )


def _measure(options: Options, max_bytes: int) -> tuple[Measured, Job | None]:
    assert options.inventory is not None
    inventory = load_inventory(options.inventory)
    if not inventory.hosts:
        raise KitError(
            f"{options.inventory} has no hosts but Slurm's: kit bench measures hosts that it reaches by SSH"
        )
    if options.model == JOB:
        from nodekit.deploy.bench import pacing  # imported here, as it reads the job's code

        pacing.refuse(inventory)
    peers = cluster.peer_addresses(inventory.hosts)
    with (
        sigterm_interrupts(),
        cluster.channels(inventory.hosts, options.ssh) as channels,
        showing() as progress,
    ):
        measured = netbench.measure(
            inventory,
            channels,
            peers,
            pair_s=options.pair_s,
            reduce_s=options.time_limit_s,
            max_bytes=max_bytes,
            kit_digest=sync.package().digest if options.model == JOB else "",
            progress=progress,
        )
        job = None
        if options.model == JOB:
            try:
                job = pacing.on_first(inventory, channels, measured.nodes, progress)
            except KitError as error:  # the measurement is printed nevertheless
                problems = (*measured.problems, str(error))
                measured = dataclasses.replace(measured, problems=problems)
    return measured, job and _as_asked(job, options)


def _job_here(options: Options) -> Job:
    from nodekit.deploy.bench import pacing  # as above

    assert options.inventory is not None
    with showing() as progress:
        return _as_asked(pacing.here(load_inventory(options.inventory), progress), options)


def _as_asked(job: Job, options: Options) -> Job:
    """Return the job with the values that the command line gives instead."""
    return dataclasses.replace(job, step_s=options.step_s or job.step_s, batch=options.batch or job.batch)


def _plan(options: Options, job: Job, measured: Measured | None) -> forecast.Plan:
    if measured is None:
        assert options.link is not None
        rate = rate_bytes(options.link)
        curve = Curve.of_link(bytes_per_s=rate, rtt_s=time_s(options.latency))
        text = netbench.rate_text(rate)
        inventory = load_inventory(options.inventory) if options.inventory else None
        most = options.num_nodes or (inventory and len(inventory.hosts)) or NUM_NODES
    else:
        link = statistics.median(pair.bytes_per_s or 0.0 for pair in measured.pairs)
        curve = curve_of(measured.reduced, len(measured.nodes), link)
        text = netbench.rate_text(link)
        most = options.num_nodes or len(measured.nodes)
    return forecast.plan(
        job,
        curve,
        nums_nodes=nums_nodes(most),
        accumulate=options.accumulate,
        local_steps=options.local_steps,
        link_text=text,
    )


def curve_of(points: Sequence[Reduced], num_nodes: int, link_bytes_per_s: float) -> Curve:
    """Return the measured curve: NCCL's if there is one, which may use RDMA and be faster than TCP, else gloo's."""
    by_backend = netbench_report.by_backend(points)
    own = by_backend.get("nccl") or by_backend["gloo"]
    return Curve.measured(
        [(float(point.size_bytes), point.seconds) for point in own],
        num_nodes=num_nodes,
        link_bytes_per_s=None if "nccl" in by_backend else link_bytes_per_s,
    )


def nums_nodes(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`, and `most`."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return found + ([most] if most > 1 else [])


def rate_bytes(text: str) -> float:
    """Parse a rate into bytes per second: ``1Gb``, ``25Gbit/s``, ``1.2GB/s``; as usual, b is a bit and B a byte."""
    found = _RATE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise KitError(f"--link {text}: wanted a rate, as 1Gb, 100Mbit/s or 1.2GB/s")
    number: float = float(found[1]) * 1000 ** _POWERS[found[2]]
    return number if found[3] in ("B", "bytes") else number / 8


def time_s(text: str) -> float:
    """Parse a time into seconds: ``0.2ms``, ``50us``."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise KitError(f"--latency {text}: wanted the time of a round trip, as 0.2ms or 50us")
    seconds: float = float(found[1]) * {"s": 1.0, "ms": 1e-3}.get(found[2], 1e-6)
    return seconds


def size_bytes(text: str) -> int:
    """Parse a size into bytes: ``64MiB``, ``1G``; all units are powers of 1024."""
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * 1024 ** _POWERS[found[2].upper()]) if found else 0
    if size < netbench.SMALLEST_BYTES:
        raise KitError(f"--max-size {text}: wanted a size from 1KiB on, as 64MiB or 1GiB")
    return size


# --- showing ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def showing() -> Iterator[Progress]:
    """Show progress on stderr: a bar in a terminal, else a line for each task that starts."""
    if not sys.stderr.isatty():
        begun: set[str] = set()

        def line(what: str, _done: int, of: int) -> None:
            if what not in begun:
                begun.add(what)
                print(f"measuring {what}" + (f" ({of})" if of else ""), file=sys.stderr, flush=True)

        yield line
        return
    from rich import progress as rich  # only terminals need it

    with rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(bar_width=24),
        rich.TextColumn("{task.fields[count]}"),
        rich.TimeElapsedColumn(),
        console=terminal.console(sys.stderr),
        transient=True,
    ) as bars:
        tasks: dict[str, Any] = {}

        def bar(what: str, done: int, of: int) -> None:
            for other, task in tasks.items():
                if other != what:
                    bars.update(task, visible=False)
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of or None, count="")
            bars.update(tasks[what], completed=done, count=f"{done} of {of}" if of else "")

        yield bar


def _show(measured: Measured | None, planned: forecast.Plan | None, problems: Sequence[str]) -> None:

    is_terminal = sys.stdout.isatty()
    console = terminal.console(width=None if is_terminal else _NO_TERMINAL_WIDTH, highlight=False)
    if measured:
        if len(measured.nodes) > 1:
            console.print(netbench_report.heat_map(measured, width=console.width, colours=is_terminal))
        if line := netbench_report.latency_line(measured):
            console.print(line)
        for points in netbench_report.by_backend(measured.reduced).values():
            console.print()
            console.print(netbench_report.reduced_table(points))
        for node in dict.fromkeys(pair.node for pair in measured.gpu_pairs):
            console.print()
            console.print(gpu_links.table(node, measured.gpu_pairs))
        said = [("", text) for text in measured.notes]
        said += [("yellow", text) for text in gpu_links.without_peers(measured.gpu_pairs)]
        said += [("yellow", f"slow: {text}") for text in gpu_links.slow_pairs(measured.gpu_pairs)]
        said += [("yellow", f"slow: {slow.text}") for slow in netbench.slow_links(measured.pairs)]
        said += [("bold red", text) for text in problems]
        if said:
            console.print()
        for style, text in said:
            console.print(text, style=style, markup=False, soft_wrap=True)
    if planned:
        if measured:
            console.print()
        job = planned.job
        console.print(
            f"{forecast.parameters_text(job.num_parameters)} parameters, {job.size_bytes / 1e6:,.4g} MB of gradients, "
            f"{forecast.seconds_of(job.step_s)} a step on one node, the same batch on each of more"
        )
        console.print(plan_table(planned))
        rates = "" if job.batch is None else ", samples/s"
        console.print(
            f"each: time from update to update, efficiency{rates} (powersgd: without its own computing)",
            style="dim",
        )
        console.print(f"\n{planned.sentence}", markup=False, soft_wrap=not is_terminal)


def plan_table(planned: forecast.Plan) -> Table:
    """Return a table with a row per strategy: time per update and scaling efficiency."""
    from rich.table import Table

    rows = [_columns(row) for row in planned.rows]
    found = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="bold")
    found.add_column("", no_wrap=True)
    for each in rows[0]:
        found.add_column(
            f"{each.num_nodes} node{'' if each.num_nodes == 1 else 's'}", justify="right", no_wrap=True
        )
    for row in rows:
        found.add_row(row[0].way.name, *(_plan_cell(each) for each in row))
    return found


def _columns(row: tuple[Forecast, ...]) -> list[Forecast]:
    """Return the columns that fit: one node, and the largest numbers of nodes."""
    return [row[0], *row[1:][-(_MOST_COLUMNS - 1) :]]


def _plan_cell(found: Forecast) -> str:
    rate = "" if found.samples_per_s is None else f" {found.samples_per_s:,.0f}/s"
    share = "" if found.num_nodes == 1 else f" {found.efficiency:.2f}"
    return f"{forecast.seconds_of(found.step_s)}{share}{rate}"


def plan_json(planned: forecast.Plan) -> dict[str, Any]:
    """Return the forecast as JSON values."""
    return {
        "num_parameters": planned.job.num_parameters,
        "gradient_bytes": planned.job.size_bytes,
        "step_s": planned.job.step_s,
        "forecasts": [
            {**dataclasses.asdict(each), "way": each.way.name} for row in planned.rows for each in row
        ],
        "recommendation": planned.sentence,
    }


def _write(options: Options, measured: Measured) -> None:
    for path in (options.csv, options.png):
        if path is None:
            continue
        try:
            if path is options.csv:
                netbench_report.write_csv(measured, path)
            elif why := netbench_report.write_png(measured, path):
                print(why, file=sys.stderr)
                continue
        except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the file's suffix
            raise KitError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        print(f"wrote {path}", file=sys.stderr)
