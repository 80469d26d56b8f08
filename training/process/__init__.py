"""What one process has for itself, whatever it trains: its device, its random numbers, its stop, what it keeps.

It may import nothing of `training`.
"""
