"""Cache tokenized samples in memory-mapped Arrow files, keyed by content, built by one process for all."""
