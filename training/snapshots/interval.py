"""How long to train from one snapshot to the next, from what they cost and how often training is cut short."""

import math

SHORTEST_S = 5.0
"""Never more often than this."""
LONGEST_S = 600.0
"""Never more seldom: nobody shall lose more work, however reliable the machines, or wrong the measured cost."""
MOST_SHARE = 0.01
"""The part of the time that snapshots may cost, as long as one costs less than ``MOST_SHARE * LONGEST_S``."""
FIRST_S = 3.0
"""The first one comes so early: a job that dies young has something, and the cost becomes known."""
PRIOR_S = 24 * 3600.0
"""The time between failures that is assumed before any was seen."""


def interval_s(cost_s: float, *, trained_s: float, num_restarts: int) -> float:
    """The best interval in seconds, by Young and Daly: √(2 · cost · mean time between failures), within bounds.

    Args:
        cost_s: what a snapshot holds the training up for.
        trained_s: how long the job has trained so far, restarts included.
        num_restarts: how often it was started again.
    """
    mtbf_s = (PRIOR_S + trained_s) / (1 + num_restarts)
    return min(LONGEST_S, max(SHORTEST_S, cost_s / MOST_SHARE, math.sqrt(2 * cost_s * mtbf_s)))
