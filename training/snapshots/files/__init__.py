"""The files of a snapshot: atomic writes, manifests, shards, and the fence that limits which generation may write.

It may import `training.snapshots.hostcopy` and what is below `training.snapshots`.
"""
