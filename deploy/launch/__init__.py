"""How a run is started on nodes that can be reached, and led to its end.

Both backends stand on it. It may import the folders of `deploy` up to `supervise`, and those that show or tell.
"""
