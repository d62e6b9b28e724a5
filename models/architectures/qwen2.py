"""Qwen2 and Qwen2.5: the llama table with biases on the query, key and value projections."""

from models.architectures.llama import relative

FAMILY = relative("qwen2", "Qwen2")
