"""What is to be done now with a run, and who does it.

It may import the folders of `deploy` up to `story`.
"""
