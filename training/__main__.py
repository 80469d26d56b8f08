"""``python -m nodekit.training``: train a task; see ``--help``."""

import os

from nodekit.training.options.arguments import parse
from nodekit.training.process import gpus
from nodekit.training.process.stop import leave
from nodekit.training.rank import refused, train


def main() -> int:
    """Train, and return the exit status.

    0 trained to the end, 1 failed, 2 bad options, 130 stopped by Ctrl-C, 143 stopped by SIGTERM or SIGUSR2, with a
    snapshot, 144 fenced: a newer generation has taken over.
    """
    options = parse()
    if options.gpus:
        try:
            os.environ[gpus.VARIABLE] = gpus.chosen(options.gpus, os.environ)
        except ValueError as error:
            return refused(error)
    if options.launcher == "torchrun":
        return train(options)
    from nodekit.training import spawn  # imports torch, which is slow

    return spawn.run(options)


if __name__ == "__main__":
    leave(main())
