"""What joins this process to the other ranks and to its agent: where they meet, what they send, how a loss is heard of.

It may import `training.process`.
"""
