"""What a PyTorch model attended to, with no change to the model."""
