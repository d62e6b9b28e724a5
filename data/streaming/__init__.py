"""Sets that are tokenized while a run trains on them, a window at a time."""
