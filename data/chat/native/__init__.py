"""Tokenizers that are published as Python files of their own, built without running these."""
