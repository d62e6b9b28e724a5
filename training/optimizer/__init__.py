"""The update rule and its learning rate."""
