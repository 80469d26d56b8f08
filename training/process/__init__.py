"""The parts of one process that do not depend on the training: device, random numbers, stop, the step it keeps.

It may import nothing of `training`.
"""
