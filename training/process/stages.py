"""Stages that a rank writes to its progress file; its node's agent relies on them."""

STARTING = "starting: "
"""The beginning of the file before the first step; the stage's name follows."""
KEEPING = "another rank is lost: keeping the newest step"
PAUSING = "another node comes in: pausing after this step"
"""In the stages KEEPING and PAUSING, the agent does not kill the rank before the grace period is over."""
WAITING = "waiting with the newest step for the next attempt"
"""The rank's process goes on in the next attempt."""
