"""Kit's command line: a file for each command, with its arguments, its help, one call, and its output.

This package may import everything, and nothing imports it; no other package parses arguments. The folders are the
groups of `kit --help`, as `cli.GROUPS` lists them. Each file in them is a command, with `add_arguments` and `run`,
inside which it imports what it calls, so that `kit --help` starts fast.
"""
