"""The order in which a stage works: DeepSpeed's schedules, ours, and how long a step takes under one."""
