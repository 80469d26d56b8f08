"""Decide what to do next with a run, and do it: the policy and the supervisor.

It may import the folders of `deploy` up to `story`.
"""
