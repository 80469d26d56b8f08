"""The processes of a node's ranks: start and watch them, find the first failure among them, stop them.

It may import `deploy.agent`, `deploy.host`, and `training`'s options, stages and imports, but does not import torch.
"""
