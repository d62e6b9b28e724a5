"""Talk to a model: the package behind demo.py (docs/demo.md)."""
