"""Runs on hosts that kit reaches over SSH, or on this machine.

It may import the folders of `deploy` up to `supervise`.
"""
