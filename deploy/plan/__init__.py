"""Plan what each node runs, from the inventory and the facts of the hosts; only gathering the facts does I/O.

This folder may import `inventory`, `training`, and the folders of `deploy` up to `environment`.
"""
