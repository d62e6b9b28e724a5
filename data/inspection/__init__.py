"""Report on the data before training: the counts that every run logs, and `--inspect`."""
