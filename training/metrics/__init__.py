"""What a run measures and where the numbers go."""
