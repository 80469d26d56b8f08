"""Output helpers: text without secrets and control sequences, keys, plots, numbers as words, whole files.

It may import nothing else of kit.
"""
