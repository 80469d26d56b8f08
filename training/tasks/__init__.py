"""What can be trained: model, data and loss."""
