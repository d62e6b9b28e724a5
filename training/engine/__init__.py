"""What computes a step: the pipeline or ZeRO, in DeepSpeed's engines."""
