"""The files of a run on this machine: its record, its events and its fetched logs.

It may import `inventory`, `deploy.host`, `deploy.agent` and `deploy.connect`.
"""
