"""Tokenized once: samples in memory-mapped Arrow files, known by contents, built by one process for all."""
