"""Operate one node of a run on its host: start and stop the agent, fence generations, and read the status.

This folder may import `nodekit.deploy.host` only.
"""
