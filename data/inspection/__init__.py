"""What there is to know about the data before training: the counts that every run logs, and `--inspect`."""
