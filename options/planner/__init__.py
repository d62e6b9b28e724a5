"""Predict time and memory of a run before it begins: `--plan`, `parts: auto` and the other `auto` keys."""
