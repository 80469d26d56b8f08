"""One node of a run, in its folder on a host: its agent is started and stopped, its generation fenced, its status read.

It may import `nodekit.deploy.host` only.
"""
