"""What is said to users: an error that they can mend, in one line, and warnings."""

import logging


class TrainingError(ValueError):
    """The message is for users: a rank reports it in one line, without a traceback."""


def log_to_stderr() -> None:
    """Show what the training module logs; other libraries show their own as they do without it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("nodekit: %(message)s"))
    logging.getLogger("nodekit").addHandler(handler)
