"""Figures that are measured, not remembered: speed and memory, each with the command that gives it."""
