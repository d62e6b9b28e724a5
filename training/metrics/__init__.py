"""Measure a run, and write the numbers to files, the terminal and trackers."""
