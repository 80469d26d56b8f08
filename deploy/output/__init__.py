"""Text as a terminal or a page may show it: without secrets and without control sequences.

It may import nothing else of kit.
"""
