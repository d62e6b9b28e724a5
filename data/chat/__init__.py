"""Dialogues with a tokenizer's chat template: what is said, and exactly which tokens bear loss."""
