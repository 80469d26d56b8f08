"""What each node will run, from the inventory and the facts of the hosts; pure but for gathering these.

It may import `inventory`, `training`, and the folders of `deploy` up to `environment`.
"""
