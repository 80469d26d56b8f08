"""Measure the network, and forecast what it costs.

Over the interfaces that a job would take: bandwidth and round trip of every pair of hosts, each way, and the
all-reduce over all nodes by the hosts' own torch. Names the link or the node that is slow.

With --plan: what that network leaves of a model's speed on 1 to N nodes, and what to do about it, before the
money is spent.

Nothing is left running on the hosts, and nothing written; but --plan job leaves kit's package and its copy of
the code on the first one, as `kit up` would.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nodekit.deploy.commands import arguments
from nodekit.inventory.errors import KitError

EPILOG = """\
MODEL is a number of parameters (110e6, 7B), a transformers config.json or its folder, or `job`: the model of
the inventory's own job, whose step is then measured, too, on the first node.

examples:
  kit bench lab.yaml                                  pairs and all-reduce
  kit bench lab.yaml --png network.png                likewise, and a picture
  kit bench lab.yaml --plan 7B --step-time 2.1        what 7 billion parameters would cost
  kit bench lab.yaml --plan job                       what this very job would
  kit bench --plan 110e6 --step-time 0.4 --link 1Gb   without hosts

exit codes:
  0    measured, slow links or not
  1    bad input, a host that cannot be used, or a pair or all-reduce that could not be measured
  2    wrong usage of the command line
  130  stopped by Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
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
        "--local-sgd",
        metavar="H",
        type=int,
        help="steps between two averages of local SGD or DiLoCo (the fewest that are fast enough)",
    )
    plan.add_argument("--link", metavar="RATE", help="measure nothing: nodes have this between them, as 1Gb")
    plan.add_argument(
        "--latency", metavar="T", default="0.2ms", help="with --link: of a round trip (%(default)s)"
    )
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Measure the network, and print the results."""
    from nodekit.deploy.bench.bench import Options, bench

    for name in ("batch", "step_time", "nodes", "accumulate", "local_sgd"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise KitError(f"--{name.replace('_', '-')} {value}: wanted a number above 0")
    return bench(
        Options(
            inventory=arguments.inventory(args) if args.inventory else None,
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
            local_steps=args.local_sgd,
            num_nodes=args.nodes,
            link=args.link,
            latency=args.latency,
        )
    )
