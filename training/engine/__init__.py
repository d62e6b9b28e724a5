"""Compute a step in DeepSpeed's engines: the pipeline, or ZeRO."""
