"""What a user can mend, in one line."""


class TrainingError(ValueError):
    """The message is for users: a rank reports it in one line, without a traceback."""
