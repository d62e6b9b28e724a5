"""Pipeline schedules, DeepSpeed's and ours, and a simulator of their step time."""
