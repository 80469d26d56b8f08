"""Stages that a rank tells in its progress file, by which its node's agent goes."""

STARTING = "starting: "
"""What the file begins with before the first step; the stage's name follows."""
KEEPING = "another rank is lost: keeping the newest step"
PAUSING = "another node comes in: pausing after this step"
"""In these two, the rank is not ended before the grace is over."""
WAITING = "waiting with the newest step for the next attempt"
"""The process goes on in the next attempt."""
