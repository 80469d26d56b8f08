"""Kit's command line: a file for each command, with its arguments, its help, one call, and what it prints.

It may import everything; nothing imports it. Nothing else parses arguments. The folders are the groups of `kit --help`,
as `cli.GROUPS` lists them, with a file for each command, which has `add_arguments` and `run`; what a command calls is
imported where it is called, so that `kit --help` is there at once.
"""
