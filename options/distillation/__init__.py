"""Learn from the probabilities of a larger model too (docs/distillation.md)."""
