"""Tokenize a data set while a run trains on it, a window at a time."""
