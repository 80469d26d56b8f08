"""What happened in a run, in words and sums, from its events; pure.

It may import `deploy.records` and the folders before it.
"""
