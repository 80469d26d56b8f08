"""What a host is asked about its GPUs and other accelerators: which there are, which a job gets, what ails them.

It may import `nodekit.deploy.host` only.
"""
