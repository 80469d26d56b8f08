"""What is known of a run, on disk: its record on this machine and its events.

It may import `inventory`, `deploy.host`, `deploy.agent` and `deploy.connect`.
"""
