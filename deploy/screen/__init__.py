"""What a person sees while a run goes on.

A feature: it imports no other feature and parses no arguments.
"""
