"""The command line: parses, calls, prints errors, exits; nothing else of kit prints errors or exits."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from nodekit.deploy.commands import arguments, helptext
from nodekit.deploy.output import terminal
from nodekit.inventory.errors import KitError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    if "_ARGCOMPLETE" in os.environ:
        from nodekit.deploy.commands import completion

        completion.answer(_parser())
    argv = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if (
        argv[:1] in (["up"], ["drill"], ["export"], ["compare"], ["shell"], ["check"]) and "--" in argv
    ):  # what follows is the user's, byte for byte: argparse never sees it
        split = argv.index("--")
        argv, command = argv[:split], argv[split + 1 :]
    args = _parser().parse_args(argv)
    args.command = command
    with terminal.screen():
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


class _Version(argparse.Action):
    """What argparse has for this wants the version at once, and finding it takes longer than all else here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        print(f"kit {metadata.version('nodekit')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kit",
        description="Multi-node PyTorch training from one inventory file.",
        epilog=f"{helptext.EXIT_CODES}\nstart with: kit up",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show kit's version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_init(commands)
    _add_up(commands)
    _add_check(commands)
    for name, function, help_text in (
        ("status", _status, "what each node of a run is doing"),
        ("down", _down, "stop a run on every node"),
    ):
        command = arguments.add(commands, name, function, help_text)
        command.add_argument(
            "run_id",
            metavar="RUN",
            nargs="?",
            help="a run's id or its beginning, or a sweep's (the latest run)",
        )
        arguments.add_ssh(command)
        if name == "down":
            command.add_argument(
                "--force", action="store_true", help="kill at once, with no time for a snapshot"
            )
            command.add_argument(
                "--lost",
                action="store_true",
                help="nodes that cannot be reached are off, you know it: kit up may go on without them",
            )
            command.add_argument(
                "--fetch", action="store_true", help="copy its logs to this machine (kit logs)"
            )
        if name == "status":
            command.add_argument("--json", action="store_true", help="for programs")
    from nodekit.deploy.board import board
    from nodekit.deploy.commands import completion, lab, why
    from nodekit.deploy.logs import showlogs
    from nodekit.deploy.notify import notify
    from nodekit.deploy.report import report
    from nodekit.deploy.results import rm
    from nodekit.deploy.runs import runs_table

    _add_watch(commands)
    showlogs.add_command(commands)
    why.add_command(commands)
    report.add_commands(commands)
    board.add_command(commands)
    command = arguments.add(
        commands, "supervise", _supervise, "what `kit up -d` leaves running: act for a run, unwatched"
    )
    command.add_argument("run_id")
    _add_metrics(command)
    arguments.add_ssh(command)
    runs_table.add_command(commands)
    rm.add_command(commands)
    _add_apply(commands)
    _add_export(commands)
    _add_shell(commands)
    _add_drill(commands)
    _add_compare(commands)
    _add_bench(commands)
    arguments.add(commands, "schema", _schema, "the JSON Schema of an inventory, for editors")
    notify.add_command(commands)
    completion.add_command(commands)
    lab.add_commands(commands)
    return parser


def _add_metrics(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--metrics-port", metavar="PORT", type=int, help="serve nodekit_* metrics for Prometheus there"
    )
    command.add_argument(
        "--metrics-address",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="with --metrics-port: on this address of this machine, 0.0.0.0 for all (%(default)s)",
    )


def _add_init(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = arguments.add(
        commands,
        "init",
        _init,
        "write an inventory by looking at the hosts",
        helptext.INIT,
        helptext.INIT_EXAMPLES,
    )
    command.usage = "kit init [HOST…] [--ssh-config | --hostfile F | --ansible F | --slurm] [options]"
    command.add_argument(
        "hosts", metavar="HOST", nargs="*", help="the hosts; beside a file: only these of it, * and ? allowed"
    )
    source = command.add_mutually_exclusive_group()
    source.add_argument("--ssh-config", action="store_true", help="the hosts of ~/.ssh/config")
    source.add_argument(
        "--hostfile", metavar="F", type=Path, help="those of an MPI, DeepSpeed or Horovod hostfile"
    )
    source.add_argument("--ansible", metavar="F", type=Path, help="those of an Ansible inventory")
    source.add_argument("--slurm", action="store_true", help="ask scontrol, here, what the cluster has")
    command.add_argument("--group", metavar="G", help="with --ansible: this group only")
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("cluster.yaml"),
        help="what to write, - for stdout (%(default)s)",
    )
    command.add_argument("--force", action="store_true", help="write over FILE if it is there")
    arguments.add_ssh(command)


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = arguments.add(
        commands,
        "up",
        _up,
        "bring up the job of an inventory and watch it",
        helptext.UP,
        helptext.UP_EXAMPLES + helptext.EXIT_CODES,
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
    command.add_argument(
        "--skip-check",
        action="store_true",
        help="start whatever `kit check` would say; only what no job can do without is looked at",
    )
    command.add_argument("-q", "--quiet", action="store_true", help="only the nodes' status and the verdict")
    command.add_argument(
        "--plain", action="store_true", help="lines in place of the live view that a terminal gets"
    )
    command.add_argument(
        "--sweep",
        metavar="OPTION=V,V…",
        action="append",
        default=[],
        help="under Slurm: a run for each value, with `--OPTION V` after the command, in one array; given again, "
        "every value with every other",
    )
    _add_metrics(command)
    arguments.add_ssh(command)


def _add_watch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = arguments.add(commands, "watch", _watch, "a live view of a run", helptext.WATCH)
    command.add_argument(
        "run_id", metavar="RUN", nargs="?", help="a run's id or its beginning (the latest run)"
    )
    command.add_argument(
        "--plain", action="store_true", help="lines in place of the live view, in a terminal too"
    )
    arguments.add_ssh(command)
    command = arguments.add(
        commands, "drain", _drain, "take a node out of a job that goes on", helptext.DRAIN
    )
    command.add_argument("run_id", metavar="RUN", help="a run's id or its beginning")
    command.add_argument("node", metavar="NODE", help="the node's name in the inventory")
    command.add_argument("--undo", action="store_true", help="let it come back into the job")


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = arguments.add(
        commands,
        "check",
        _check,
        "would a job run on the hosts of an inventory?",
        helptext.CHECK,
        helptext.CHECK_EXAMPLES,
    )
    command.usage = "kit check INVENTORY [options] [-- SCRIPT.py ARGS…]"
    command.add_argument("inventory", metavar="INVENTORY", help="the inventory file")
    command.add_argument("--deep", action="store_true", help="end with a real rendezvous and an all-reduce")
    command.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        help="most seconds, without --deep's (10; more where this machine is busy)",
    )
    command.add_argument("--json", action="store_true", help="for programs")
    arguments.add_ssh(command)
    clean = arguments.add(
        commands, "clean", _clean, "end what earlier runs have left on the hosts", helptext.CLEAN
    )
    clean.add_argument("inventory", metavar="INVENTORY", help="the inventory file")
    clean.add_argument("--yes", action="store_true", help="end also what may still train")
    clean.add_argument("--dry-run", action="store_true", help="say what would be ended, and end nothing")
    arguments.add_ssh(clean)


def _add_apply(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    test = arguments.add(
        commands, "test", _test, "how good a run's weights are on the task's test data", helptext.TEST
    )
    predict = arguments.add(
        commands, "predict", _predict, "the labels that a run's weights give to texts", helptext.PREDICT
    )
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
        arguments.add_ssh(command)


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = arguments.add(
        commands,
        "export",
        _export,
        "write the job of an inventory for another tool",
        helptext.EXPORT,
        helptext.EXPORT_EPILOG,
    )
    command.usage = "kit export INVENTORY [--to FORMAT] [options] [-- SCRIPT.py ARGS…]"
    command.add_argument("inventory", metavar="INVENTORY", help="the inventory file")
    command.add_argument(
        "--to",
        metavar="FORMAT",
        choices=["hostfile", "ansible", "accelerate", "deepspeed", "sbatch", "shell", "compose"],
        default="sbatch",
        help="one of those above (sbatch)",
    )
    command.add_argument(
        "-o", "--output", metavar="PATH", type=Path, help="write it there, a file or a folder (stdout)"
    )
    command.add_argument(
        "--port",
        metavar="P",
        type=int,
        default=29500,
        help="where the nodes meet on the first host (%(default)s)",
    )
    arguments.add_ssh(command)


def _add_shell(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = arguments.add(
        commands,
        "shell",
        _shell,
        "run a command on the hosts of an inventory, or log in",
        helptext.SHELL,
        helptext.SHELL_EPILOG,
    )
    command.usage = "kit shell INVENTORY [HOSTS] [options] [-- COMMAND ARG…]"
    command.add_argument("inventory", metavar="INVENTORY", help="the inventory file")
    command.add_argument("hosts", metavar="HOSTS", nargs="?", help="these only, as gpu[1-3] (all)")
    command.add_argument("--hosts", metavar="HOSTS", dest="picked", help="the same")
    command.add_argument(
        "--timeout", metavar="S", type=float, help="end it on a host where it takes longer than S seconds"
    )
    arguments.add_ssh(command)


def _add_drill(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from nodekit.deploy.drill.faults import help_text

    epilog = f"{help_text()}\n{helptext.DRILL_EPILOG}"
    command = arguments.add(
        commands, "drill", _drill, "break a job, and see that it survives", helptext.DRILL, epilog
    )
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
    arguments.add_ssh(command)


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = arguments.add(
        commands,
        "compare",
        _compare,
        "train by every engine on this machine, and measure",
        helptext.COMPARE,
        helptext.COMPARE_EXAMPLES + helptext.EXIT_CODES,
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
    command = arguments.add(
        commands,
        "bench",
        _bench,
        "measure the network, and forecast what it costs",
        helptext.BENCH,
        helptext.BENCH_EPILOG,
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
    arguments.add_ssh(command)


def _metrics(args: argparse.Namespace):  # type: ignore[no-untyped-def]  # its import is slow
    if args.metrics_port is None:
        return None
    from nodekit.deploy.metrics.metrics_port import Place

    return Place(args.metrics_port, args.metrics_address)


def _init(args: argparse.Namespace) -> int:
    from nodekit.deploy.init import init

    options = init.Options(
        hosts=tuple(args.hosts),
        ssh_config=args.ssh_config,
        hostfile=args.hostfile,
        ansible=args.ansible,
        group=args.group,
        slurm=args.slurm,
        output=args.output,
        force=args.force,
        ssh=arguments.ssh_options(args),
    )
    is_file = str(args.output) != "-"
    talk = sys.stdout if is_file else sys.stderr
    written = init.init(options, say=lambda line: print(line, file=talk, flush=True))
    if not is_file:
        print(written.draft.text, end="")
    else:
        shown = shlex.quote(str(args.output))
        print(f"wrote {shown}: {written.draft.summary}")
        if written.draft.num_choices:
            print(f"  {written.draft.num_choices} for you to decide: grep CHOOSE {shown}")
        print(f"  what would run: kit up {shown} --dry-run")
    if written.num_reached == 0:
        print("kit: none of the hosts could be looked at; the file says why", file=sys.stderr)
        return 1
    return 0


def _up(args: argparse.Namespace) -> int:
    from nodekit.deploy.ssh_backend.start import Options
    from nodekit.deploy.ssh_backend.up import up

    return up(
        Options(
            inventory=_inventory(args),
            command=tuple(args.command) or None,
            dry_run=args.dry_run,
            json=args.json,
            detach=args.detach,
            new=args.new,
            quiet=args.quiet,
            plain=args.plain,
            sweep=tuple(args.sweep),
            skip_check=args.skip_check,
            metrics=_metrics(args),
            ssh=arguments.ssh_options(args),
        )
    )


def _watch(args: argparse.Namespace) -> int:
    from nodekit.deploy.screen import watch

    return watch.run_watch(args)


def _drain(args: argparse.Namespace) -> int:
    from nodekit.deploy.ssh_backend import drain

    return drain.run_drain(args)


def _check(args: argparse.Namespace) -> int:
    from nodekit.deploy.preflight import check_report, checkup

    if args.timeout is not None and args.timeout <= 0:
        raise KitError(f"kit check --timeout {args.timeout:g}: wanted some seconds")
    report = checkup.run(
        checkup.Options(
            inventory=_inventory(args),
            command=tuple(args.command) or None,
            deep=args.deep,
            timeout_s=args.timeout,
            ssh=arguments.ssh_options(args),
        )
    )
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    print(check_report.to_json(report) if args.json else check_report.text(report, width))
    return 1 if report.failed else 0


def _clean(args: argparse.Namespace) -> int:
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.preflight import leftovers
    from nodekit.inventory.load import load_inventory

    inventory = load_inventory(_inventory(args))
    with cluster.links(inventory.hosts, arguments.ssh_options(args), some=True) as links:
        found = leftovers.look(links, inventory)
        failed = [str(each) for each in found.values() if isinstance(each, Exception)]
        here = [left for each in found.values() if not isinstance(each, Exception) for left in each]
        chosen: list[leftovers.Left] = []
        refused: list[leftovers.Left] = []
        for left in here:
            print(
                f"{left.host}: {left.run}: {left.text}"
                + (" – it is running" if left.standing == "running" else "")
            )
            if left.standing != "running":
                (refused if left.still_trains and not args.yes else chosen).append(left)
        if refused and not args.dry_run and sys.stdin.isatty():
            print("it may still train: " + ", ".join(f"{left.run} on {left.host}" for left in refused))
            if input("end it? [y/N] ").strip().lower() in ("y", "yes"):
                chosen, refused = [*chosen, *refused], []
        if not args.dry_run:
            failed += [str(error) for error in leftovers.end(links, inventory, chosen).values()]
    for problem in failed:
        print(f"kit: {problem}", file=sys.stderr)
    for left in refused:
        why = "may still train; kit clean --yes ends it all the same"
        print(f"kit: {left.host}: {left.run} {why}", file=sys.stderr)
    if args.dry_run:
        print(f"{len(chosen) + len(refused)} would be ended" if here else "nothing is left")
    else:
        print(f"{len(chosen)} ended" if here else "nothing is left")
    return 1 if failed or refused or len(links) < len(inventory.hosts) else 0


def _inventory(args: argparse.Namespace) -> Path:
    from nodekit.inventory.load import example_names, example_path

    inventory = Path(args.inventory or "local")
    if not inventory.exists() and str(inventory) in example_names():
        inventory = example_path(str(inventory))
    return inventory


def _drill(args: argparse.Namespace) -> int:
    from nodekit.deploy.drill.drill import Options, drill, list_faults
    from nodekit.deploy.lab.lab_cluster import Lab

    options = Options(
        inventory=_inventory(args),
        faults=tuple(args.faults),
        command=tuple(args.command),
        json=args.json,
        load_lab=Lab.load,
        ssh=arguments.ssh_options(args),
    )
    return list_faults(options) if args.list else drill(options)


def _compare(args: argparse.Namespace) -> int:
    from nodekit.deploy.compare.compare import Options, compare

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
    from nodekit.deploy.bench.bench import Options, bench

    for name in ("batch", "step_time", "nodes", "accumulate", "apart"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise KitError(f"--{name.replace('_', '-')} {value}: wanted a number above 0")
    return bench(
        Options(
            inventory=_inventory(args) if args.inventory else None,
            ssh=arguments.ssh_options(args),
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
    from nodekit.deploy.export import export
    from nodekit.deploy.ssh_backend.start import Options

    options = Options(
        inventory=_inventory(args), command=tuple(args.command) or None, ssh=arguments.ssh_options(args)
    )
    if args.to == "sbatch":
        from nodekit.slurm import export as sbatch

        return sbatch.export(options, args.output)
    if not 0 < args.port < 65536:
        raise KitError(f"--port: found {args.port}, wanted a port from 1 to 65535")
    files = export.build(options, args.to, master_port=args.port)
    if args.output is None:
        sys.stdout.write(export.to_text(files))
    else:
        print(export.write(files, args.to, args.output))
    return 0


def _shell(args: argparse.Namespace) -> int:
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.shell import shell, shell_view
    from nodekit.inventory.load import load_inventory

    inventory = load_inventory(_inventory(args))
    if args.hosts and args.picked:
        raise KitError(
            f"kit shell: found HOSTS and --hosts ({args.hosts}, {args.picked}), wanted one of them"
        )
    if args.timeout is not None and not 0 < args.timeout < float("inf"):
        raise KitError(f"--timeout: found {args.timeout:g}, wanted seconds, a number above 0")
    hosts = shell.pick(inventory, args.hosts or args.picked)
    if not args.command:
        if len(hosts) > 1:
            names = shell.fold([host.name for host in hosts])
            raise KitError(
                f"a shell to type in is one host's, and this is {names}; name one: kit shell {args.inventory} "
                f"{hosts[0].name}; or a command for all: kit shell {args.inventory} -- uptime"
            )
        argv = cluster.login_argv(hosts[0], accept_new_host_keys=args.accept_new_host_keys)
        try:
            os.execvp(argv[0], argv)  # noqa: S606  # the terminal is its own from here
        except OSError as error:
            raise KitError(f"cannot run {argv[0]} on this machine: {error.strerror}") from error
    prefixes = shell_view.Prefixes([host.name for host in hosts])
    streams = {"out": sys.stdout, "err": sys.stderr}
    is_terminal = {name: stream.isatty() for name, stream in streams.items()}
    colour = {name: is_one and "NO_COLOR" not in os.environ for name, is_one in is_terminal.items()}
    ended: dict[str, shell.Ended] = {}
    with shell.Commands(
        hosts, args.command, timeout_s=args.timeout, ssh=arguments.ssh_options(args)
    ) as commands:
        for event in commands.events():
            if isinstance(event, shell.Ended):
                ended[event.host] = event
                continue
            name = event.stream
            shown = prefixes.apply(event, is_terminal=is_terminal[name], colour=colour[name])
            streams[name].buffer.write(shown)
            streams[name].flush()
    in_order = [ended[host.name] for host in hosts]
    print(shell_view.summary(in_order, colour=colour["err"]), file=sys.stderr)
    if commands.was_interrupted:
        return 130
    return 0 if all(each.is_good for each in in_order) else 1


def _test(args: argparse.Namespace) -> int:
    from nodekit.deploy.records import runs
    from nodekit.deploy.results import apply

    return apply.test(runs.find(args.run_id), _apply_options(args))


def _predict(args: argparse.Namespace) -> int:
    from nodekit.deploy.records import runs
    from nodekit.deploy.results import apply

    if bool(args.texts) == (args.file is not None):
        raise KitError("kit predict: wanted either TEXT… or --file F, and not both")
    if not all(text.strip() for text in args.texts):
        raise KitError("kit predict: found an empty text, wanted some words")
    run = runs.find(args.run_id)
    return apply.predict(run, args.texts or apply.read_texts(args.file), _apply_options(args))


def _apply_options(args: argparse.Namespace):  # type: ignore[no-untyped-def]  # its import is slow
    from nodekit.deploy.results.apply import Options

    return Options(
        weights=args.weights, timeout_s=args.timeout, json=args.json, ssh=arguments.ssh_options(args)
    )


def _supervise(args: argparse.Namespace) -> int:
    from nodekit.deploy.records import runs
    from nodekit.deploy.ssh_backend.start import Options
    from nodekit.deploy.ssh_backend.up import supervise

    run = runs.find(args.run_id)
    options = Options(
        inventory=Path(run.inventory_path),
        quiet=True,
        metrics=_metrics(args),
        ssh=arguments.ssh_options(args),
    )
    return supervise(run, options)


def _status(args: argparse.Namespace) -> int:
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.records import events, runs
    from nodekit.deploy.screen.view import status_line
    from nodekit.deploy.ssh_backend import up

    if members := runs.sweep(args.run_id):
        from nodekit.slurm import sweep

        return sweep.status(members, arguments.ssh_options(args), as_json=args.json)
    run = runs.find(args.run_id)
    if run.slurm:
        from nodekit.slurm import show

        return show.status(run, arguments.ssh_options(args), as_json=args.json)
    with cluster.links(up.inventory_of(run).hosts, arguments.ssh_options(args), some=True) as links:
        found = up.statuses(run, links)
    alive = any(status["alive"] for status in found.values())
    last = {
        name: status for name, status in events.now(run.folder).items() if name in run.nodes.keys() - found
    }
    state = run.state if run.state in runs.ENDED or alive else "ended while nobody watched; kit up goes on"
    if args.json:
        told = {**found, **{name: {**status, "alive": None} for name, status in last.items()}}
        print(json.dumps({**runs.public(run), "state": state, "status": told}, indent=2))
        return 0
    print(f"{run.run_id}  {state}" + (f": {run.verdict}" if run.verdict else ""))
    width = max(map(len, run.nodes), default=0)
    for name in run.nodes:
        status = found.get(name)
        if status is None:
            line = "unreachable"
            if name in last:
                when = time.strftime("%m-%d %H:%M:%S", time.localtime(last[name]["time"]))
                line += f"; last heard of {when}: {status_line(last[name], now=last[name]['time'])}"
        else:
            if not status["alive"] and status.get("state") not in runs.ENDED:
                status["state"] = "gone"
            line = status_line(status, now=time.time())
        print(f"  {name.ljust(width)}  {line}")
    if run.state == "failed":
        print(f"why: kit why {run.run_id}")
    return 0


def _down(args: argparse.Namespace) -> int:
    from nodekit.deploy.records import runs
    from nodekit.deploy.ssh_backend import up

    if members := runs.sweep(args.run_id):
        from nodekit.slurm import sweep

        return sweep.down(members, arguments.ssh_options(args), fetch=args.fetch)
    run = runs.find(args.run_id)
    if run.slurm:
        from nodekit.slurm import backend

        return backend.down(run, arguments.ssh_options(args), fetch=args.fetch)
    return up.down(run, arguments.ssh_options(args), force=args.force, lost=args.lost, fetch=args.fetch)


def _schema(args: argparse.Namespace) -> int:  # noqa: ARG001  # every command has this signature
    from nodekit.inventory.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
