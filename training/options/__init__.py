"""The options of the training module, the files that give some of them, and how both are read.

It may import `training.reporting`, `training.group` and `training.engine_info`.
"""
