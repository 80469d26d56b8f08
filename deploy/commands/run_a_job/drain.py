"""Take a node out of a job that goes on.

To mend or reboot it, for example. Its ranks save a snapshot with the others, it leaves, and the others train
on without it, or with a spare in its place. It is not taken back before --undo. A node that the job cannot do
without (nodes.min) stays. After a run is stopped and started again, no node is drained.
"""

from __future__ import annotations

import argparse

ACTS = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_id", metavar="RUN", help="a run's id or its beginning")
    command.add_argument("node", metavar="NODE", help="the node's name in the inventory")
    command.add_argument("--undo", action="store_true", help="let it come back into the job")


def run(args: argparse.Namespace) -> int:
    """Drain a node, or take it back."""
    from nodekit.deploy.backend import backend_of
    from nodekit.deploy.records import find_runs, locks, runs
    from nodekit.deploy.supervise import drain
    from nodekit.inventory.errors import KitError

    run = find_runs.find(args.run_id)
    rules = backend_of(run).rules(run, args.node)
    if run.state not in runs.LIVE:
        raise KitError(f"{run.run_id} is over ({run.state}): there is nothing to drain")
    if args.node not in rules.nodes:
        raise KitError(f"{run.run_id}: {drain.refusal(rules, (), args.node)}")
    if not args.undo and (why := drain.refusal(rules, run.drained, args.node)):
        raise KitError(why)
    print(drain.ask(run, rules, args.node, undo=args.undo))
    if run.is_led_here and not locks.is_supervised(run):
        print(f"nobody supervises {run.run_id} at the moment: kit up does, and then it is done")
    return 0
