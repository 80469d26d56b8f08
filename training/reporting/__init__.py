"""A run's reports while it trains: metrics, TensorBoard's curves, W&B and MLflow, progress and events for kit.

It may import `training.world`.
"""
