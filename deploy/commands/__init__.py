"""Kit's command line: a file for each command, with its arguments, its help, one call, and what it prints.

It may import everything; nothing imports it. Nothing else parses arguments. A command's file has `add_arguments` and
`run`, and `cli.GROUPS` lists it; what a command calls is imported where it is called, so that `kit --help` is there at
once.
"""
