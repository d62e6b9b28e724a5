"""Qwen3 (dense): the llama table with a norm on each head's queries and keys."""

from models.architectures.llama import relative

FAMILY = relative("qwen3", "Qwen3")
