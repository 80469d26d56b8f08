"""How this process communicates with other ranks and its agent: rendezvous, collectives, and news of lost ranks.

It may import `training.process`.
"""
