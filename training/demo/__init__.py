"""Talking to a model: what stands behind demo.py."""
