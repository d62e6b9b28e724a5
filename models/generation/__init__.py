"""Writing text with a model: how a token is chosen, and several answers at once."""
