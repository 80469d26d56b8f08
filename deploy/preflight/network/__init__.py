"""Examines the network of the hosts: interfaces, names, ports, pairs of hosts, a real rendezvous.

It may import what `deploy.preflight` may.
"""
