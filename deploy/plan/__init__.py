"""Plans what each node runs, from the inventory and the facts of the hosts; pure, except for gathering these.

This folder may import `inventory`, `training`, and the folders of `deploy` up to `environment`.
"""
