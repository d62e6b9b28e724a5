"""Cache tokenized samples in memory-mapped files, keyed by content, built by one process for all."""
