"""The processes of a node's ranks: started, watched, told from each other when they fail, stopped.

Standard library only; it may import nothing else of kit.
"""
