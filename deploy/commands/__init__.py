"""Kit's command line: arguments, help, one call, what it prints.

It may import everything; nothing imports it.
"""
