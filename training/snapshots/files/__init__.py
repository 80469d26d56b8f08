"""The files of a snapshot: how one is written whole, what they say, which generation may write them, what was found.

It may import `training.snapshots.hostcopy` and what is below `training.snapshots`.
"""
