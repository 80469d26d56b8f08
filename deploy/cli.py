"""The command line: parses, calls, prints errors, exits; nothing else of kit prints errors or exits."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from nodekit.inventory.errors import KitError

EXIT_CODES = """\
exit codes:
  0    trained to the end (up), or done (the other commands)
  1    bad input, or a host that cannot be reached or used
  2    wrong usage of the command line
  3    the job was started and failed
  4    the job was restarted again and again, and made no progress
  130  stopped by Ctrl-C
"""

UP = """\
Bring up the job of an inventory and watch it: check the hosts, sync the code, start an agent on each
node, stream every rank's output, and tell how it ended.

Safe to run again: on a running job it attaches, after `kit down` or a failure it goes on from the
newest snapshot. Ctrl-C stops the job on every node; a second Ctrl-C kills it at once.

Where the inventory has `slurm:` in place of `hosts:`, it submits the job and follows it through the queue
to its end; Ctrl-C cancels it.
"""

UP_EXAMPLES = """\
examples:
  kit up                                 two nodes on this machine train the shared module
  kit up inventory/lab.yaml              the job the inventory names
  kit up lab.yaml -- train.py --lr 0.1   this script, as torchrun would run it
  kit up lab.yaml --dry-run              print what each node would run, and run nothing
  kit up slurm.yaml --sweep lr=1e-3,3e-4 --sweep seed=0,1     four runs, as a Slurm array

"""

EXPORT = """\
Write a script that runs, by plain sbatch, what `kit up` would submit to Slurm.
All is checked as by kit up; the run's folder with the code is put in its place
in slurm.shared_dir now; nothing is queued. The script says what it does, and
has no secret in it. Such a run is sbatch's and yours: kit status does not know it.
"""

TEST = """\
Print precision, recall and F1 of each class, and which were taken for which, of
a run's weights on its task's test data. Computed by the run's own code on the
first of its nodes that has the newest weights; nothing is written there.
"""

PREDICT = """\
Print the label that a run's weights give to each text, and its probability.
Computed by the run's own code on a node that has the weights.
"""

DRILL = """\
Run the job once as it is, and then once per fault, with that fault in the
middle. For each: when it was detected, when training went on, how many steps
had to be done again, and whether the loss curve is still the unbroken run's:
bit for bit, or to rounding where the world size changed meanwhile.

Without a command the job is half a minute of kit's own training module. A job
of your own (the inventory's, or after --) should be short, too. Nothing is left
running or broken, and the inventory's own runs are left alone.
"""

DRILL_EPILOG = """\
examples:
  kit drill lab.yaml                      all that lab.yaml's hosts allow
  kit drill lab.yaml worker node          these two
  kit drill lab.yaml -- train.py --small  your own job

exit codes:
  0    every fault was survived
  1    one was not, or could not be tried though asked for, or the job fails as it is
  2    wrong usage, or a fault that is not possible there
  130  stopped by Ctrl-C
"""

COMPARE = """\
Train the same task with the same data, seed and batch by every engine on this
machine, one after the other, and measure: how long the whole run took, samples
per second in training, the greatest memory of any rank, the accuracy, and how
many times the throughput of one process it was (single).

A table, the same as CSV, a bar chart, and each run's log, result and metrics.
An engine that cannot run here is a row with the reason. single and dp are one
process, and run once. A batch is shared by all ranks, whatever their number.
"""

COMPARE_EXAMPLES = """\
examples:
  kit compare                                     the digits by all engines
  kit compare --task text -- --epochs 2           the sentences; after the --, options of the shared module
  kit compare --engines single,ddp,deepspeed:3 --nproc 1,2,4
  kit compare --engines single,ddp,ddp:bf16,ddp:spawn:bf16

after an engine, if wanted: :0 to :3 (deepspeed's stage), :bf16, :fp16, :spawn (its ranks without torchrun)

"""


BENCH = """\
Measure the network between the hosts, over the interfaces that a job would take:
bandwidth and round trip of every pair, each way, and the all-reduce over all
nodes by the hosts' own torch. Names the link or the node that is slow.

With --plan: what that network leaves of a model's speed on 1 to N nodes, and
what to do about it, before the money is spent.

Nothing is left running on the hosts, and nothing written; but --plan job leaves
kit's package and its copy of the code on the first one, as `kit up` would.
"""

BENCH_EPILOG = """\
MODEL is a number of parameters (110e6, 7B), a transformers config.json or its folder, or `job`: the model of
the inventory's own job, whose step is then measured, too, on the first node.

examples:
  kit bench lab.yaml                                  pairs and all-reduce
  kit bench lab.yaml --png network.png                likewise, and a picture
  kit bench lab.yaml --plan 7B --step-time 2.1        what 7 G parameters would cost
  kit bench lab.yaml --plan job                       what this very job would
  kit bench --plan 110e6 --step-time 0.4 --link 1Gb   without hosts

exit codes:
  0    measured, slow links or not
  1    bad input, a host that cannot be used, or a pair or all-reduce that could not be measured
  2    wrong usage of the command line
  130  stopped by Ctrl-C
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if (
        argv[:1] in (["up"], ["drill"], ["export"], ["compare"]) and "--" in argv
    ):  # what follows is the user's, byte for byte: argparse never sees it
        split = argv.index("--")
        argv, command = argv[:split], argv[split + 1 :]
    args = _parser().parse_args(argv)
    args.command = command
    try:
        return int(args.run(args))
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("kit: stopped; nothing is left running", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (head, less) has left; what we still hold for it must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kit",
        description="Multi-node PyTorch training from one inventory file.",
        epilog=f"{EXIT_CODES}\nstart with: kit up",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kit {metadata.version('nodekit')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_up(commands)
    for name, function, help_text in (
        ("status", _status, "what each node of a run is doing"),
        ("logs", _logs, "the output of a run's ranks"),
        ("down", _down, "stop a run on every node"),
    ):
        command = _add(commands, name, function, help_text)
        command.add_argument(
            "run_id",
            metavar="RUN",
            nargs="?",
            help="a run's id or its beginning, or a sweep's (the latest run)",
        )
        _add_ssh(command)
        if name == "logs":
            command.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
            command.add_argument("--node", metavar="N", help="this node only")
            command.add_argument("--rank", metavar="R", type=int, help="this rank only")
        if name == "down":
            command.add_argument(
                "--force", action="store_true", help="kill at once, with no time for a snapshot"
            )
            command.add_argument(
                "--lost",
                action="store_true",
                help="nodes that cannot be reached are off, you know it: kit up may go on without them",
            )
        if name == "status":
            command.add_argument("--json", action="store_true", help="for programs")
    command = _add(
        commands, "supervise", _supervise, "what `kit up -d` leaves running: act for a run, unwatched"
    )
    command.add_argument("run_id")
    _add_ssh(command)
    listing = _add(commands, "runs", _runs, "the runs on record, oldest first")
    listing.add_argument("--json", action="store_true", help="for programs")
    _add_apply(commands)
    _add_export(commands)
    _add_drill(commands)
    _add_compare(commands)
    _add_bench(commands)
    _add(commands, "schema", _schema, "the JSON Schema of an inventory, for editors")
    from nodekit.deploy import lab

    lab.add_commands(commands)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    function: object,
    help_text: str,
    description: str | None = None,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=help_text,
        description=description or help_text[0].upper() + help_text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=function)
    return command


def _add_ssh(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--accept-new-host-keys",
        action="store_true",
        help="add the key of a host that is not in known_hosts yet (a changed key is refused all the same)",
    )


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _add(
        commands, "up", _up, "bring up the job of an inventory and watch it", UP, UP_EXAMPLES + EXIT_CODES
    )
    command.usage = "kit up [INVENTORY] [options] [-- SCRIPT.py ARGS…]"
    command.add_argument(
        "inventory",
        metavar="INVENTORY",
        nargs="?",
        help="the inventory file (local: two nodes on this machine)",
    )
    command.add_argument(
        "-d", "--detach", action="store_true", help="leave the job running once it has started"
    )
    command.add_argument("--new", action="store_true", help="start a new run, even where one could go on")
    command.add_argument(
        "--dry-run", action="store_true", help="check, print what each node would run, run nothing"
    )
    command.add_argument("--json", action="store_true", help="with --dry-run: the plan for programs")
    command.add_argument("-q", "--quiet", action="store_true", help="only the nodes' status and the verdict")
    command.add_argument(
        "--sweep",
        metavar="OPTION=V,V…",
        action="append",
        default=[],
        help="under Slurm: a run for each value, with `--OPTION V` after the command, in one array; given again, "
        "every value with every other",
    )
    _add_ssh(command)


def _add_apply(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    test = _add(commands, "test", _test, "how good a run's weights are on the task's test data", TEST)
    predict = _add(commands, "predict", _predict, "the labels that a run's weights give to texts", PREDICT)
    test.add_argument("run_id", metavar="RUN", nargs="?", help="a run's id or its beginning (the latest run)")
    predict.add_argument("run_id", metavar="RUN", help="a run's id or its beginning")
    predict.add_argument("texts", metavar="TEXT", nargs="*", help="what to label")
    predict.add_argument("--file", metavar="F", help="in place of TEXT: a text on each line; - for stdin")
    for command in (test, predict):
        command.add_argument(
            "--weights",
            choices=["best", "last"],
            default="best",
            help="those that were best on the dev data, or the last (%(default)s)",
        )
        command.add_argument(
            "--timeout", metavar="S", type=float, default=600.0, help="seconds to wait (%(default)g)"
        )
        command.add_argument("--json", action="store_true", help="for programs")
        _add_ssh(command)


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _add(
        commands, "export", _export, "write the job of an inventory as a script for sbatch", EXPORT
    )
    command.usage = "kit export INVENTORY [options] [-- SCRIPT.py ARGS…]"
    command.add_argument("inventory", metavar="INVENTORY", help="the inventory file, with a slurm section")
    command.add_argument("--to", choices=["sbatch"], default="sbatch", help="what for (sbatch)")
    command.add_argument("-o", "--output", metavar="FILE", type=Path, help="write it there (stdout)")
    _add_ssh(command)


def _add_drill(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from nodekit.deploy.faults import help_text

    epilog = f"{help_text()}\n{DRILL_EPILOG}"
    command = _add(commands, "drill", _drill, "break a job, and see that it survives", DRILL, epilog)
    command.usage = "kit drill [INVENTORY] [FAULT…] [options] [-- SCRIPT.py ARGS…]"
    command.add_argument(
        "inventory",
        metavar="INVENTORY",
        nargs="?",
        help="the inventory file (local: two nodes on this machine)",
    )
    command.add_argument("faults", metavar="FAULT", nargs="*", help="which (all that the inventory allows)")
    command.add_argument(
        "--list", action="store_true", help="which faults the inventory allows, and run nothing"
    )
    command.add_argument("--json", action="store_true", help="the results for programs, on stdout")
    _add_ssh(command)


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _add(
        commands,
        "compare",
        _compare,
        "train by every engine on this machine, and measure",
        COMPARE,
        COMPARE_EXAMPLES + EXIT_CODES,
    )
    command.usage = "kit compare [options] [-- OPTIONS OF python -m nodekit.training…]"
    command.add_argument("--engines", metavar="NAME,NAME…", help="which (all)")
    command.add_argument(
        "--nproc",
        metavar="N,N…",
        help="on how many ranks (1, and as many as there are GPUs, or 2 without one)",
    )
    command.add_argument("--task", metavar="NAME", help="what to train (digits)")
    command.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="a new folder for all of it (compare-DATE-TIME)"
    )
    command.add_argument(
        "--timeout", metavar="S", type=float, default=3600.0, help="most seconds for a run (%(default)g)"
    )


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _add(
        commands, "bench", _bench, "measure the network, and forecast what it costs", BENCH, BENCH_EPILOG
    )
    command.usage = "kit bench [INVENTORY] [--plan MODEL --step-time S] [options]"
    command.add_argument("inventory", metavar="INVENTORY", nargs="?", help="the inventory file")
    measured = command.add_argument_group("what is measured")
    measured.add_argument(
        "--seconds", metavar="S", type=float, default=1.0, help="for each pair, each way (%(default)g)"
    )
    measured.add_argument(
        "--max-size", metavar="SIZE", default="1GiB", help="of the all-reduce, largest (%(default)s)"
    )
    measured.add_argument(
        "--time-limit",
        metavar="S",
        type=float,
        default=30.0,
        help="for all sizes of it together; 0: leave it out (%(default)g)",
    )
    measured.add_argument("--png", metavar="FILE", type=Path, help="a heat map and a curve (with matplotlib)")
    measured.add_argument("--csv", metavar="FILE", type=Path, help="the pairs, a line for each")
    measured.add_argument("--json", action="store_true", help="all of it for programs, on stdout")
    plan = command.add_argument_group("what it leaves of a model's speed")
    plan.add_argument("--plan", metavar="MODEL", help="forecast for this model (see below)")
    plan.add_argument("--step-time", metavar="S", type=float, help="seconds of a step on one node alone")
    plan.add_argument("--batch", metavar="N", type=int, help="samples in that step, to show samples/s")
    plan.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the gradients (%(default)s)"
    )
    plan.add_argument("--nodes", metavar="N", type=int, help="for 1 to N nodes (the inventory's, or 8)")
    plan.add_argument(
        "--accumulate", metavar="K", type=int, default=4, help="batches to one exchange (%(default)s)"
    )
    plan.add_argument(
        "--apart", metavar="H", type=int, help="steps to one exchange of local SGD or DiLoCo (enough of them)"
    )
    plan.add_argument("--link", metavar="RATE", help="measure nothing: nodes have this between them, as 1Gb")
    plan.add_argument(
        "--latency", metavar="T", default="0.2ms", help="with --link: of a round trip (%(default)s)"
    )
    _add_ssh(command)


def _ssh_options(args: argparse.Namespace):  # type: ignore[no-untyped-def]  # its import is slow
    from nodekit.deploy.cluster import SshOptions

    return SshOptions(
        accept_new_host_keys=args.accept_new_host_keys, notice=lambda text: print(text, file=sys.stderr)
    )


def _up(args: argparse.Namespace) -> int:
    from nodekit.deploy.start import Options
    from nodekit.deploy.up import up

    return up(
        Options(
            inventory=_inventory(args),
            command=tuple(args.command) or None,
            dry_run=args.dry_run,
            json=args.json,
            detach=args.detach,
            new=args.new,
            quiet=args.quiet,
            sweep=tuple(args.sweep),
            ssh=_ssh_options(args),
        )
    )


def _inventory(args: argparse.Namespace) -> Path:
    from nodekit.inventory.load import example_names, example_path

    inventory = Path(args.inventory or "local")
    if not inventory.exists() and str(inventory) in example_names():
        inventory = example_path(str(inventory))
    return inventory


def _drill(args: argparse.Namespace) -> int:
    from nodekit.deploy.drill import Options, drill, list_faults

    options = Options(
        inventory=_inventory(args),
        faults=tuple(args.faults),
        command=tuple(args.command),
        json=args.json,
        ssh=_ssh_options(args),
    )
    return list_faults(options.inventory) if args.list else drill(options)


def _compare(args: argparse.Namespace) -> int:
    from nodekit.deploy.compare import Options, compare

    task = ("--task", args.task) if args.task else ()
    return compare(
        Options(
            engines=args.engines,
            nproc=args.nproc,
            arguments=(*task, *args.command),
            output=args.output,
            timeout_s=args.timeout,
        )
    )


def _bench(args: argparse.Namespace) -> int:
    from nodekit.deploy.bench import Options, bench

    for name in ("batch", "step_time", "nodes", "accumulate", "apart"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise KitError(f"--{name.replace('_', '-')} {value}: wanted a number above 0")
    return bench(
        Options(
            inventory=_inventory(args) if args.inventory else None,
            ssh=_ssh_options(args),
            max_size=args.max_size,
            time_limit_s=args.time_limit,
            pair_s=args.seconds,
            png=args.png,
            csv=args.csv,
            json=args.json,
            model=args.plan,
            batch=args.batch,
            step_s=args.step_time,
            dtype=args.dtype,
            accumulate=args.accumulate,
            steps_apart=args.apart,
            num_nodes=args.nodes,
            link=args.link,
            latency=args.latency,
        )
    )


def _export(args: argparse.Namespace) -> int:
    from nodekit.deploy.start import Options
    from nodekit.slurm.export import export

    options = Options(inventory=_inventory(args), command=tuple(args.command) or None, ssh=_ssh_options(args))
    return export(options, args.output)


def _test(args: argparse.Namespace) -> int:
    from nodekit.deploy import apply, runs

    return apply.test(runs.find(args.run_id), _apply_options(args))


def _predict(args: argparse.Namespace) -> int:
    from nodekit.deploy import apply, runs

    if bool(args.texts) == (args.file is not None):
        raise KitError("kit predict: wanted either TEXT… or --file F, and not both")
    if not all(text.strip() for text in args.texts):
        raise KitError("kit predict: found an empty text, wanted some words")
    run = runs.find(args.run_id)
    return apply.predict(run, args.texts or apply.read_texts(args.file), _apply_options(args))


def _apply_options(args: argparse.Namespace):  # type: ignore[no-untyped-def]  # its import is slow
    from nodekit.deploy.apply import Options

    return Options(weights=args.weights, timeout_s=args.timeout, json=args.json, ssh=_ssh_options(args))


def _supervise(args: argparse.Namespace) -> int:
    from nodekit.deploy import runs
    from nodekit.deploy.start import Options
    from nodekit.deploy.up import supervise

    run = runs.find(args.run_id)
    return supervise(run, Options(inventory=Path(run.inventory_path), quiet=True, ssh=_ssh_options(args)))


def _status(args: argparse.Namespace) -> int:
    from nodekit.deploy import cluster, runs, up
    from nodekit.deploy.view import status_line

    if members := runs.sweep(args.run_id):
        from nodekit.slurm import sweep

        return sweep.status(members, _ssh_options(args), as_json=args.json)
    run = runs.find(args.run_id)
    if run.slurm:
        from nodekit.slurm import show

        return show.status(run, _ssh_options(args), as_json=args.json)
    with cluster.links(up.inventory_of(run).hosts, _ssh_options(args), some=True) as links:
        found = up.statuses(run, links)
    alive = any(status["alive"] for status in found.values())
    state = run.state if run.state in runs.ENDED or alive else "ended while nobody watched; kit up goes on"
    if args.json:
        print(json.dumps({**runs.public(run), "state": state, "status": found}, indent=2))
        return 0
    print(f"{run.run_id}  {state}" + (f": {run.verdict}" if run.verdict else ""))
    width = max(map(len, run.nodes), default=0)
    for name in run.nodes:
        status = found.get(name)
        if status is None:
            line = "unreachable"
        else:
            if not status["alive"] and status.get("state") not in runs.ENDED:
                status["state"] = "gone"
            line = status_line(status, now=time.time())
        print(f"  {name.ljust(width)}  {line}")
    return 0


def _logs(args: argparse.Namespace) -> int:
    from nodekit.deploy import cluster, runs, up
    from nodekit.deploy.showlogs import show

    run = runs.find(args.run_id)
    if run.slurm:
        from nodekit.slurm import show as slurm_show

        return slurm_show.logs(run, _ssh_options(args), node=args.node, rank=args.rank, follow=args.follow)
    hosts = [host for host in up.inventory_of(run).hosts if args.node in (None, host.name)]
    if not hosts:
        raise KitError(f"{run.run_id} has no node '{args.node}'; it has {', '.join(run.nodes)}")
    with cluster.links(hosts, _ssh_options(args), some=True) as links:
        show(run, links, rank=args.rank, follow=args.follow)
        return 0 if len(links) == len(hosts) else 1


def _down(args: argparse.Namespace) -> int:
    from nodekit.deploy import runs, up

    if members := runs.sweep(args.run_id):
        from nodekit.slurm import sweep

        return sweep.down(members, _ssh_options(args))
    run = runs.find(args.run_id)
    if run.slurm:
        from nodekit.slurm import backend

        return backend.down(run, _ssh_options(args))
    return up.down(run, _ssh_options(args), force=args.force, lost=args.lost)


def _runs(args: argparse.Namespace) -> int:
    from nodekit.deploy import runs

    found = runs.all_runs()
    if args.json:
        print(json.dumps([runs.public(run) for run in found], indent=2))
        return 0
    if not found:
        print(f"no run on record in {runs.folder()}; start one: kit up INVENTORY")
    width = max((len(run.run_id) for run in found), default=0)
    for run in found:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created))
        # Which nodes a run has that is in Slurm's queue, Slurm knows.
        num_nodes = str(run.inventory["slurm"]["nodes"] if run.slurm else len(run.nodes))
        nodes = f"{num_nodes} node" + ("" if num_nodes == "1" else "s")
        values = f"{run.slurm['values']}  " if "values" in run.slurm else ""
        print(
            f"{run.run_id.ljust(width)}  {started}  {nodes:<9} {run.state:<10} {values}{run.verdict}".rstrip()
        )
    return 0


def _schema(args: argparse.Namespace) -> int:  # noqa: ARG001  # every command has this signature
    from nodekit.inventory.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
