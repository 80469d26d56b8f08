"""Examines whether the job can run on the hosts: the checks of `kit check`.

It may import the folders of `deploy` up to `plan`.
"""
