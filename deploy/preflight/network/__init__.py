"""Would the network carry the job? Interfaces, names, ports, pairs of hosts, a real rendezvous.

It may import what `deploy.preflight` may.
"""
