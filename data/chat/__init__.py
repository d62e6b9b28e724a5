"""Render dialogues with a chat template and find exactly which tokens are trained."""
