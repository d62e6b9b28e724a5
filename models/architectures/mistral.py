"""Mistral: the llama table with sliding-window attention where config.json has a sliding_window."""

from models.architectures.llama import relative

FAMILY = relative("mistral", "Mistral")
