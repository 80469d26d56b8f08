"""One short file for each way of training."""
