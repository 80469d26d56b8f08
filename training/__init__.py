"""What every rank runs: the shared training module and the pieces a user's own loop can take from it."""
