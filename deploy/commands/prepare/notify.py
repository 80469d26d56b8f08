"""Show who is told of a run, and test whether that works.

`notify:` of an inventory names who is told when a run starts, when something has failed, when training goes
on after that, and at the end. With --test, a message is sent now.

  notify:
    on: [failure, end]                     # of start, failure, recovery, end (all)
    command: [./tell.sh, me]               # gets JSON on its stdin; in the folder of the inventory
    webhook: {url: https://example.org/x}  # gets the same JSON by POST
    # webhook:                             # where the address, or a header, is a secret: the names of variables
    #   url_from: SLACK_WEBHOOK
    #   headers_from: {Authorization: MY_TOKEN}

A run never waits for it, and does not fail of it: that something was not delivered is told once, among the
run's events. It is done where the run is supervised from: on this machine, under Slurm on the job's first
node.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from nodekit.deploy.commands import arguments

EPILOG = """\
the JSON: kind, run, time, text, node, step, total_steps, state, goodput; what is not known is null. A command finds
NODEKIT_NOTIFY (the kind), NODEKIT_RUN_ID, NODEKIT_TEXT, NODEKIT_NODE and NODEKIT_STEP in its environment, too.

examples:
  kit notify lab.yaml                    who is told, and when
  kit notify --test lab.yaml             does it get there?

exit codes:
  0    all were told
  1    one was not, or bad input
  2    wrong usage of the command line
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    arguments.add_inventory(command)
    command.add_argument("--test", action="store_true", help="send a message now, each way")


def run(args: argparse.Namespace) -> int:
    """List the targets, and with ``--test`` notify them; return 1 if one could not be reached."""
    from nodekit.deploy.notify import notify
    from nodekit.inventory.load import load_inventory

    inventory = load_inventory(arguments.inventory(args))
    targets = notify.targets(inventory)
    assert inventory.notify is not None  # else there are no targets, which raises
    if not args.test:
        for name, target in targets.items():
            print(f"{name}  {target}  at {', '.join(inventory.notify.on)}")
        return 0
    problems = 0
    text = f"a test of notify: in {inventory.path.name}\nkit notify {shlex.quote(args.inventory)}"
    for name, error in notify.send_test(inventory, text).items():
        if error is None:
            print(f"{name}  {targets[name]}  was told")
        else:
            problems += 1
            print(f"kit: {name}: {error}" + (f"\n{error.said}" if error.said else ""), file=sys.stderr)
    return 1 if problems else 0
